"""The report's numbers: the judge's own, and those as served against an independent spelling of the runtime's rule."""

from __future__ import annotations

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.kernels.formats import E4M3_VALUES
from shardmill.verify.questions.pairs import pairs_of
from shardmill.verify.questions.roundtrip import Limits, loss_of, roundtrip
from shardmill.verify.reading.checkpoint import open_checkpoint
from shardmill.verify.reading.source import Folder
from shardmill.verify.report.facts import Facts
from shardmill.verify.report.histogram import CODE_BINS, ERROR_BINS, STEPS, code_counts, error_counts
from shardmill.verify.report.served import is_rerounded, power_of_two_above, reround
from shardmill.verify.report.units import percent
from shardmill.verify.rules.findings import Report

POSITIVE = st.floats(min_value=2.0**-120, max_value=2.0**120, width=32)


def test_each_weight_s_error_is_the_one_that_verify_roundtrip_measures(
    small: tuple[Path, Path], facts: Facts
) -> None:
    """Equal as floats, to the last digit, for every converted weight."""
    parent, out = (Folder(folder) for folder in small)
    pairs = pairs_of(
        open_checkpoint(out, Report("roundtrip")), open_checkpoint(parent, Report("roundtrip")), False
    )
    judged = {pair.name: loss_of(pair, out, parent).error for pair in pairs}
    assert {weight.name: weight.error and weight.error.stored for weight in facts.weights} == judged
    assert len(judged) == 5


def test_each_family_s_error_stands_in_what_verify_roundtrip_prints(
    small: tuple[Path, Path], facts: Facts
) -> None:
    """The digits of its sentence are those of the page, of the family and of its worst weight."""
    parent, out = (Folder(folder) for folder in small)
    pytest.importorskip("jinja2", reason="the report needs the extra `report`")
    pytest.importorskip("matplotlib", reason="the report's figures need the extra `report`")
    from shardmill.verify.report.page import render_page

    printed = roundtrip(out, parent, Limits()).facts["families"]
    assert isinstance(printed, dict)
    page = render_page(facts)
    for family in facts.families:
        if family.numerics:
            assert family.error is not None
            assert family.error.stored is not None
            assert family.worst is not None
            sentence = str(printed[family.name])
            assert f"error {family.error.stored:.3%} (worst {family.worst:.3%})" in sentence
            assert percent(family.error.stored) in page


def test_the_sums_of_a_family_s_weights_give_its_error(facts: Facts) -> None:
    """So a reader of the JSON can add up groups of his own."""
    for family in facts.families:
        errors = [weight.error for weight in facts.weights if weight.family == family.name and weight.error]
        if errors:
            assert family.error is not None
            for kind in ("stored", "rounded", "served"):
                squares = sum(getattr(error, f"{kind}_squares") for error in errors)
                relative = math.sqrt(squares / sum(error.parent_squares or 0 for error in errors))
                assert getattr(family.error, kind) == pytest.approx(relative, rel=1e-12)


def test_a_layer_has_the_error_of_its_weights(facts: Facts) -> None:
    """One weight a layer here, so the layer's error is the weight's; what lies in no layer comes last."""
    by_place = {(weight.family, weight.layer): weight.error for weight in facts.weights}
    for family in facts.families:
        assert {(family.name, at.layer): at.error for at in family.layers}.items() <= by_place.items()
        layers = [at.layer for at in family.layers]
        assert layers == sorted(layers, key=lambda layer: (layer is None, layer))
    assert [at.layer for family in facts.families for at in family.layers] == [0, 1, 1, 1, None]


def test_what_the_runtime_leaves_alone_is_served_as_stored(facts: Facts) -> None:
    """Only the [128,128] weights are re-rounded, and that costs."""
    for weight in facts.weights:
        assert weight.error is not None
        assert weight.rerounded == (weight.block == (128, 128))
        assert (weight.error.served == weight.error.stored) == (not weight.rerounded)
        assert weight.error.served is not None
        assert 0.02 < weight.error.served < 0.05


def test_exact_blocks_leave_no_error_but_the_parent_s_own_rounding(facts: Facts) -> None:
    """Rounded to the parent's dtype a recovered weight is the parent's, bit for bit, and no other is."""
    for weight in facts.weights:
        assert weight.error is not None
        assert (weight.error.rounded == 0) == (weight.family == "native")
    [family] = [family for family in facts.families if family.name == "native"]
    assert (family.exact_blocks, family.blocks) == (4, 4)
    assert family.error is not None
    assert family.error.stored is not None
    assert 0.001 < family.error.stored < 0.002


def test_as_served_is_one_rounding_of_the_stored_value_by_the_runtime_s_scale(
    small: tuple[Path, Path], facts: Facts
) -> None:
    """Spelled out with a loop over blocks, scalar logarithms and ml_dtypes alone."""
    parent, out = (Folder(folder) for folder in small)
    child, origin = open_checkpoint(out, Report("r")), open_checkpoint(parent, Report("r"))
    name = "model.layers.0.big.weight"
    stored = np.memmap(small[1] / child.tensors[name].file, np.uint8)
    tensor, scales = child.tensors[name], child.tensors[name + "_scale_inv"]
    codes = stored[tensor.begin : tensor.end].reshape(tensor.shape)
    grid = stored[scales.begin : scales.end].view("<f4").reshape(scales.shape)
    file = np.memmap(small[0] / origin.tensors[name].file, np.uint8)
    bits = file[origin.tensors[name].begin : origin.tensors[name].end].view(ml_dtypes.bfloat16)
    want = bits.reshape(tensor.shape).astype(np.float64)
    away = 0.0
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            at = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            values = codes[at].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * grid[i, j]
            scale = 2.0 ** math.ceil(math.log2(float(np.float32(np.abs(values).max()) / np.float32(448))))
            served = (values / np.float32(scale)).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
            away += float(np.square(served - want[at]).sum())
    error = {weight.name: weight.error for weight in facts.weights}[name]
    assert error is not None
    assert error.served == pytest.approx(math.sqrt(away / np.square(want).sum()), rel=1e-12)


@given(POSITIVE)
def test_the_scale_as_served_is_the_smallest_power_of_two_that_is_not_below(value: float) -> None:
    power = float(power_of_two_above(np.array([[value]], np.float32))[0, 0])
    assert math.frexp(power)[0] == 0.5
    assert power / 2 < value <= power


@given(st.integers(-20, 20), st.integers(0, 2**32 - 1))
def test_a_weight_written_with_powers_of_two_is_served_as_stored(exponent: int, seed: int) -> None:
    """Re-rounding changes no value of a block whose scale is a power of two and whose largest code is 448."""
    codes = np.random.Generator(np.random.PCG64(seed)).integers(0, 256, (130, 140), dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    codes[::128, ::128] = 0x7E  # 448
    values = E4M3_VALUES[codes] * np.float32(2.0**exponent)
    assert np.array_equal(reround(values, (128, 128)), values)


@pytest.mark.parametrize(
    ("shape", "block", "expected"),
    [
        ((192, 256), (128, 128), True),
        ((192, 250), (128, 128), False),
        ((100, 256), (128, 128), False),
        ((192, 256), (32, 32), False),
        ((256,), (128, 128), False),
    ],
)
def test_deep_gemm_takes_whole_multiples_alone(
    shape: tuple[int, ...], block: tuple[int, int], expected: bool
) -> None:
    assert is_rerounded(shape, block) == expected


def test_histograms_count_every_element_once() -> None:
    """None, half-percent steps, and beyond; a wanted zero that was missed is beyond, one that was met has no error."""
    want = np.array([1, 1, 1, 1, 0, 0, -1], np.float32)
    got = np.array([1, 1.004, 1.006, 2, 0, 0.5, -1.119], np.float32)
    counts = error_counts(got, want)
    assert len(counts) == ERROR_BINS
    assert {place: int(count) for place, count in enumerate(counts) if count} == {
        0: 2,
        1: 1,
        2: 1,
        STEPS: 1,
        STEPS + 1: 2,
    }


def test_codes_are_counted_by_their_power_of_two() -> None:
    """Both zeros first, then subnormal ones, then each exponent."""
    counts = code_counts(np.array([0x00, 0x80, 0x01, 0x87, 0x08, 0x7E, 0xFE], np.uint8))
    assert len(counts) == CODE_BINS
    assert {place: int(count) for place, count in enumerate(counts) if count} == {0: 2, 1: 2, 2: 1, 16: 2}


def test_the_worst_come_first_with_all_their_elements(facts: Facts) -> None:
    weights = {weight.name: weight for weight in facts.weights}
    errors = []
    for shown in facts.worst:
        error = weights[shown.name].error
        assert error is not None
        errors.append(error.stored)
        assert sum(shown.stored) == sum(shown.served) == sum(shown.codes) == error.elements
    assert errors == sorted(errors, key=lambda stored: -(stored or 0))


def test_the_json_holds_numbers_that_a_strict_reader_takes(facts: Facts) -> None:
    read = json.loads(facts.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert read["format"] == "shardmill/report/2"
    assert [weight["error"]["stored"] for weight in read["weights"]] == [
        weight.error and weight.error.stored for weight in facts.weights
    ]
