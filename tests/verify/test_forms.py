"""The table of forms, its page, and the decoders against outside oracles."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from shardmill.verify.formats.by_elements import BY_ELEMENTS
from shardmill.verify.formats.by_inputs import BY_INPUTS, decoded_by_inputs
from shardmill.verify.formats.catalogue import CATALOGUE, catalogue
from shardmill.verify.formats.declared import declaration
from shardmill.verify.formats.forms import codes
from shardmill.verify.formats.matrices import can_decode, decoded, matrix_of, matrix_with_state
from shardmill.verify.formats.schemes import quantized
from shardmill.verify.formats.table import FORMS
from shardmill.verify.reading.checkpoint import open_checkpoint
from shardmill.verify.reading.open_files import OpenFiles
from shardmill.verify.rules.findings import Report
from tests.verify.memory import Memory
from tests.verify.mutants import files_of
from tests.verify.zoo import encoders
from tests.verify.zoo.published import PUBLISHED, Published

BYTES = np.arange(256, dtype=np.uint8).reshape(1, -1)
ROOT = Path(__file__).resolve().parents[2]
# Largest relative error of a bell-shaped matrix rounded to nearest in each form.
ERRORS = {
    "fp8": 0.04,
    "mxfp8": 0.04,
    "int8": 0.02,
    "int-pack": 0.15,
    "mxfp4": 0.2,
    "nvfp4": 0.13,
    "ct-nvfp4": 0.13,
}


def test_the_page_of_forms_is_what_the_tables_say() -> None:
    assert (ROOT / CATALOGUE).read_text() == catalogue()


def test_e5m2_and_e4m3_codes_are_those_of_ml_dtypes() -> None:
    for mine, theirs in ((codes.e4m3, ml_dtypes.float8_e4m3fn), (codes.e5m2, ml_dtypes.float8_e5m2)):
        np.testing.assert_array_equal(mine(BYTES)[0], BYTES.view(theirs).astype(np.float32))


def test_e2m1_codes_are_those_of_ml_dtypes_low_nibble_first() -> None:
    values, nibbles = codes.e2m1(BYTES)
    np.testing.assert_array_equal(nibbles[0, 0::2], BYTES[0] & 0xF)
    np.testing.assert_array_equal(values, nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32))


def test_exponents_are_those_of_ml_dtypes() -> None:
    from shardmill.verify.formats.opened import scale_values
    from shardmill.verify.reading.header import Tensor

    tensor = Tensor("s", "F8_E8M0", (255,), "f", 0, 255)
    some = np.arange(255, dtype=np.uint8)
    np.testing.assert_array_equal(
        scale_values(tensor, some), some.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    )


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.name)
def test_every_form_decodes_to_the_floats_that_it_was_made_from(published: Published) -> None:
    """The relative error is what rounding to nearest costs, so that no axis, nibble, group or bias is read amiss."""
    checkpoint = open_checkpoint(Memory(files_of(published.model())), Report("integrity"))
    with OpenFiles(checkpoint.source) as opened:
        for module, linear in quantized(checkpoint.tensors).items():
            if linear.weight is None or linear.kind in ("gpt-oss", "other") or "folded" in published.name:
                continue
            declared = declaration(checkpoint.quantization)[0]
            if linear.kind in BY_ELEMENTS:
                matrix = matrix_with_state(linear, opened)
                assert matrix is not None
            else:
                assert can_decode(linear)
                matrix = matrix_of(linear, declared)
            got = decoded(matrix, opened, 0, matrix.shape[0])[0]
            if linear.kind in BY_INPUTS:
                by_inputs = decoded_by_inputs(linear, opened, 0, linear.shape[0], declared.zeros_as_stored)
                np.testing.assert_array_equal(got, by_inputs.T)
            want = encoders.matrix(module, *got.shape)
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            assert error < ERRORS.get(
                linear.kind, ERRORS["fp8"] if linear.kind.startswith("fp8") else 0.15
            ), (module, error)


def test_every_form_says_what_it_lacks_or_is_decoded() -> None:
    decoded_elsewhere = (*BY_INPUTS, *BY_ELEMENTS)
    assert all(form.unpack or form.lacks or form.kind in decoded_elsewhere for form in FORMS.values())


def test_packed_integers_are_those_of_compressed_tensors() -> None:
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    values = torch.randint(-8, 8, (4, 64), dtype=torch.int8)
    words = helpers.pack_to_int32(values, 4).numpy()
    got = codes.offset_words(words.view(np.uint8).reshape(4, -1), 4)[0]
    np.testing.assert_array_equal(got, values.numpy().astype(np.float32))
