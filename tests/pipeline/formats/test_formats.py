"""What holds of every number format: its parts as declared, the same bytes from every kernel, near when decoded."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardmill.kernels.block_fp8 import NonFinite
from shardmill.kernels.group_codes import widened
from shardmill.pipeline.formats import formats
from shardmill.pipeline.types import DTYPE_BITS
from tests.pipeline.formats.matrices import COLUMNS, ROWS, kinds, setting, source, targets

GOLDEN = Path(__file__).parent / "golden.json"
DTYPES = ("bf16", "f16", "f32")
PARAMS = {"fp8-block": {"block": (16, 64)}, "int4-group": {"group": 32}}
LARGEST_ERROR = {"fp8": 0.04, "mxfp8": 0.04, "int8": 0.02, "mxfp4": 0.14, "nvfp4": 0.13, "int4": 0.12}


def encoded(name, profile, strip, kernel="numpy", law=None):
    made = setting(name, profile, strip, kernel, **PARAMS.get(name, {}))
    made = replace(made, law=law or made.law)
    return formats()[name].encode(strip, made), made


def digest(arrays):
    whole = hashlib.sha256()
    for role in sorted(arrays):
        whole.update(np.ascontiguousarray(arrays[role]).tobytes())
    return whole.hexdigest()


def goldens():
    """Format, profile and dtype -> one digest of all matrices' parts; and so of each law that is nobody's default."""
    found = {}
    for name, profile in targets():
        for dtype in DTYPES:
            found[f"{name} {profile} {dtype}"] = whole_digest(name, profile, dtype)
    for name, law in drafted_laws():
        for dtype in DTYPES:
            found[f"{name} {law} {dtype}"] = whole_digest(name, "compressed-tensors", dtype, law)
    return found


def drafted_laws():
    return [
        (form.name, each.drafted) for form in formats().values() for each in form.spellings if each.drafted
    ]


def whole_digest(name, profile, dtype, law=None):
    made = [digest(encoded(name, profile, source(values, dtype), law=law)[0]) for _, values in kinds()]
    return hashlib.sha256("".join(made).encode()).hexdigest()


def test_no_bit_of_any_format_changes():
    """Every format's parts have the bytes on file; to change one is to give the law a new name."""
    assert goldens() == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize(("name", "profile"), targets())
def test_parts_have_the_declared_shapes(name, profile):
    """What encode returns are the parts that the format declares, of their dtype's size and shape."""
    strip = source(dict(kinds())["bell"], "bf16")
    arrays, made = encoded(name, profile, strip)
    declared = {part.role: part for part in formats()[name].parts(strip.shape, made.params)}
    for role, array in arrays.items():
        assert array.shape == declared[role].shape
        stored = made.spelling.dtypes.get(role, declared[role].dtype)
        assert 8 * array.dtype.itemsize == DTYPE_BITS[stored]
    assert set(declared) - set(arrays) <= {"shape"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "profile"), targets())
def test_numba_writes_numpys_bytes(name, profile, dtype):
    """Both kernels give the same parts for every kind of matrix and every float dtype."""
    pytest.importorskip("numba", reason="needs the extra `fast`")
    for _, values in kinds():
        strip = source(values, dtype)
        assert digest(encoded(name, profile, strip)[0]) == digest(encoded(name, profile, strip, "numba")[0])


@pytest.mark.parametrize(("name", "profile"), targets())
def test_strips_of_rows_give_what_the_whole_gives(name, profile):
    """A matrix encoded in strips, each of whole blocks, has the parts of one encoded at once."""
    strip = source(dict(kinds())["edges"], "bf16")
    whole, made = encoded(name, profile, strip)
    halves = [formats()[name].encode(strip[rows], made) for rows in (slice(0, 16), slice(16, ROWS))]
    for part in formats()[name].parts(strip.shape, made.params):
        if part.per:
            joined = np.concatenate([each[part.role] for each in halves])
            assert joined.tobytes() == whole[part.role].tobytes()


@pytest.mark.parametrize(("name", "profile"), targets())
def test_decoded_weights_are_near(name, profile):
    """Decoding what was encoded errs as much as the format's step allows, and no more."""
    strip = source(dict(kinds())["bell"], "bf16")
    arrays, made = encoded(name, profile, strip)
    weights, decoded = widened(strip), formats()[name].decode(arrays, made)
    error = np.linalg.norm(decoded - weights) / np.linalg.norm(weights)
    assert 0 < error < LARGEST_ERROR[name.partition("-")[0]]


@pytest.mark.parametrize(("name", "profile"), targets())
def test_a_matrix_of_zeros_decodes_to_zeros(name, profile):
    """Zeros stay zeros, and no scale is NaN."""
    strip = np.zeros((ROWS, COLUMNS), np.uint16)
    arrays, made = encoded(name, profile, strip)
    assert not formats()[name].decode(arrays, made).any()


@pytest.mark.parametrize(("name", "profile"), targets())
def test_what_is_not_finite_is_refused_with_its_place(name, profile):
    """A NaN or an Inf has no code: encoding names the row and the column."""
    if name == "fp8-tensor":
        pytest.skip("its survey refuses, before a code is chosen")
    for bad in (np.nan, np.inf):
        values = dict(kinds())["bell"].copy()
        sound = setting(name, profile, values, **PARAMS.get(name, {}))
        values[3, 17] = bad
        with pytest.raises(NonFinite) as refused:
            formats()[name].encode(values, sound)
        assert (refused.value.row, refused.value.col) == (3, 17)
