"""`verify origin` names the formula that made a checkpoint, and no formula where another made it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shardmill.verify.formats.formulas import FORMULAS, LOWS, PROOFS, Formula, Sample
from shardmill.verify.questions.origin import origin, tallies_of
from shardmill.verify.reading.checkpoint import open_checkpoint
from shardmill.verify.rules.findings import Report
from tests.verify.memory import Memory
from tests.verify.mutants import files_of
from tests.verify.zoo import encoders as e
from tests.verify.zoo.model import Model
from tests.verify.zoo.published import PUBLISHED, parent

Array = np.ndarray[Any, Any]
BF16 = ml_dtypes.bfloat16


def _blocks(count: int = 64, elements: int = 128) -> Array:
    return e.matrix("origin", count, elements)


def _cast(values: Array) -> Array:
    return np.clip(values.astype(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def _sample(w: Array, scales: Array, codes: Array, total: float = 1.0) -> Sample:
    amax = np.abs(w).max(1, keepdims=True)
    return Sample(w, amax, scales.astype(np.float32), codes, np.full((1, 1), total, np.float32), LOWS["BF16"])


def _low(w: Array) -> Array:
    return w.astype(BF16)


# What tools compute, written with ml_dtypes' own BF16 arithmetic and casts: (name of the row, its scale and codes).
def _tools(w: Array) -> Iterator[tuple[str, Array, Array]]:
    amax, top = np.abs(w).max(1, keepdims=True), np.float32(448)
    yield "FP8, amax / 448 in f32, divided", amax / top, _cast(w / (amax / top))
    low = _low(amax) / BF16(448)
    yield "FP8, amax / 448 in the weight's dtype, divided in it", low, _cast(_low(w) / low)
    stored = (amax / top).astype(BF16)
    yield "FP8, codes by f32 amax / 448, scale rounded to BF16 when stored", stored, _cast(w / (amax / top))
    yield ("FP8, amax / 448 in f32, quotients rounded to the weight's dtype",
           amax / top, _cast(_low(w / (amax / top))))  # fmt: skip
    r = top * (np.float32(1) / amax)
    yield "FP8, multiplied by 448 times 1 / amax, its reciprocal stored", np.float32(1) / r, _cast(w * r)
    r = top / amax
    yield "FP8, multiplied by 448 / amax, its reciprocal stored", np.float32(1) / r, _cast(w * r)
    r16 = BF16(448) / _low(amax)
    yield ("FP8, multiplied by 448 / amax in the weight's dtype, its reciprocal stored",
           np.float32(1) / r16.astype(np.float32), _cast(_low(w) * r16))  # fmt: skip
    up = np.exp2(np.ceil(np.log2(amax.astype(np.float64) / 448))).astype(np.float32)
    yield "FP8, power of two above amax / 448 (ue8m0)", up, _cast(w / up)
    near = np.exp2(np.rint(np.log2(amax.astype(np.float64) / 448))).astype(np.float32)
    yield "FP8, power of two nearest to amax / 448", near, _cast(w / near)
    floor = np.exp2(np.floor(np.log2(amax.astype(np.float64))) - 8).astype(np.float32)
    yield "FP8, power of two below amax less 8 (OCP MX)", floor, _cast(w / floor)


@pytest.mark.parametrize("number", range(10))
def test_each_fp8_formula_gives_what_its_tool_computes_and_no_other_row_does(number: int) -> None:
    name, scale, codes = list(_tools(_blocks()))[number]
    sample = _sample(_blocks(), scale, codes)
    full = [
        formula.name for formula in FORMULAS if "fp8-block" in formula.kinds and formula.equal(sample).all()
    ]
    assert full == [name]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ct nvfp4", "NVFP4, global"),
        ("nvfp4", "NVFP4, amax / (6 * global)"),
        ("mxfp4 packed", "MXFP4, power of two below amax less 2"),
        ("mxfp8 u8", "FP8, power of two above amax / 448"),
        ("block fp8", "FP8, amax / 448 in f32, divided"),
        ("block fp8 .scale of 32", "FP8, power of two above amax / 448"),
        ("int8", "integers, amax / (levels / 2) rounded to BF16"),
    ],
)
def test_a_checkpoint_of_the_zoo_is_named(name: str, words: str) -> None:
    """The zoo's own slow encoders are formulas too."""
    published = next(one for one in PUBLISHED if one.name == name)
    report = origin(Memory(files_of(published.model())), Memory(files_of(parent(published.moe))), 3)
    said = " ".join(str(value) for key, value in report.facts.items() if key != "seed")
    assert words in said
    assert "no known formula" not in said


def test_blocks_that_no_formula_gives_are_a_finding() -> None:
    """The parent's floats, each with another last bits than those that the codes were made of."""
    published = next(one for one in PUBLISHED if one.name == "block fp8")
    altered = {
        name: data[: len(data) // 2] + bytes(byte ^ 0x15 for byte in data[len(data) // 2 :])
        if name.endswith(".safetensors")
        else data
        for name, data in files_of(parent(published.moe)).items()
    }
    report = origin(Memory(files_of(published.model())), Memory(altered), 3)
    assert [finding.slug for finding in report.findings] == ["origin-unknown"]


def _mutations() -> Iterator[Callable[[Array], tuple[Array, Array]]]:
    """Scales and codes by arithmetic that no tool has: other tops, other roundings, other neighbours."""
    for step in range(70):
        top = np.float32(200 + 3.5 * step)
        if abs(float(top) - 448) > 1:
            yield lambda w, top=top: (_amax(w) / top, _cast(w / (_amax(w) / top)))  # type: ignore[misc]
    for step in range(1, 66):
        yield lambda w, n=step: (
            _amax(w) / np.float32(448),
            _cast(w / (_amax(w) / np.float32(448)) * np.float32(1 + n / 500)),
        )  # type: ignore[misc]
    for step in range(1, 66):
        yield lambda w, n=step: (
            np.roll(_amax(w), n % 13 + 1, 0) / np.float32(448) * np.float32(1 + n / 999),
            _cast(w / (_amax(w) / np.float32(448))),
        )  # type: ignore[misc]


def _amax(w: Array) -> Array:
    return np.abs(w).max(1, keepdims=True)


def test_none_of_two_hundred_mutated_formulas_is_named() -> None:
    w, named, tried = _blocks(24, 64), [], 0
    for mutate in list(_mutations())[:200]:
        sample = _sample(w, *mutate(w))
        tried += 1
        named += [
            f.name for f in (*FORMULAS, *PROOFS[:1]) if "fp8-block" in f.kinds and f.equal(sample).all()
        ]
    assert (tried, named) == (len(list(_mutations())[:200]), [])
    assert tried >= 198


# What each row computes is mutated at random: a scale a little off, a rounding of another kind, another neighbourhood.
def _mutated(formula: Formula, clean: Sample, random: np.random.Generator) -> Sample:
    """The formula's own blocks, but for one change that the number drawn decides."""
    with np.errstate(all="ignore"):
        scale = np.asarray(formula.scale(clean), np.float32)
        off = np.float32(1 + 2.0 ** -random.integers(1, 13) * random.choice([-1, 1]))
        way = random.integers(6)
        if way == 0:  # stored as it is, codes by another
            return replace(
                clean, scales=scale, codes=formula.codes(replace(clean, values=clean.values * off), scale)
            )
        if way == 1:  # stored and used
            return replace(clean, scales=scale * off, codes=formula.codes(clean, scale * off))
        if way == 2:  # the largest magnitude but one
            second = np.sort(np.abs(clean.values), axis=1)[:, -2 - random.integers(6)][:, None]
            other = replace(clean, amax=second)
            return replace(
                clean, scales=formula.scale(other), codes=formula.codes(other, formula.scale(other))
            )
        if way == 3:  # the neighbour's scale
            moved = np.roll(scale, int(random.integers(1, 9)), axis=0)
            return replace(clean, scales=moved, codes=formula.codes(clean, moved))
        codes = formula.codes(clean, scale).copy()
        some = random.random(codes.shape) < 2.0 ** -random.integers(2, 8)
        if way == 4:  # codes a step nearer to zero
            codes = np.where(some & (codes & 0x7 > 0), codes - 1, codes).astype(np.uint8)
        else:  # signs
            codes = np.where(some & (codes > 0), codes ^ (8 if codes.max() < 16 else 0x80), codes).astype(
                np.uint8
            )
        return replace(clean, scales=scale, codes=codes)


def _random_mutants(seed: int, count: int) -> Iterator[tuple[str, Sample]]:
    """(kind, sample) of `count` mutated formulas whose blocks are not the formula's own."""
    random = np.random.Generator(np.random.PCG64(seed))
    while count:
        formula = FORMULAS[random.integers(len(FORMULAS))]
        w = e.matrix(f"origin {seed} {count}", 96, 32) * np.float32(2.0 ** random.integers(-6, 3))
        total = float(np.abs(w).max() / 2688)
        total = 1 / total if "global *" in formula.name else total if "NVFP4" in formula.name else 1.0
        clean = _sample(w, np.ones((96, 1), np.float32), np.full(w.shape, 128, np.uint8), total)
        clean = replace(clean, scales=formula.scale(clean))
        if formula.zeros is not None:
            clean = replace(clean, zeros=formula.zeros(clean))
        clean = replace(clean, codes=formula.codes(clean, clean.scales))
        changed = _mutated(formula, clean, random)
        if (changed.codes != clean.codes).any() or (changed.scales != clean.scales).any():
            count -= 1
            yield formula.kinds[0], changed


@pytest.mark.parametrize("seed", [1, 2])
def test_no_formula_is_named_for_blocks_that_a_mutated_one_made(seed: int) -> None:
    """A hundred formulas of all forms, each changed at random in its scales, its codes or its largest magnitude."""
    named = [
        (kind, formula.name)
        for kind, sample in _random_mutants(seed, 100)
        for formula in (*FORMULAS, PROOFS[0])
        if kind in formula.kinds and formula.equal(sample).all()
    ]
    assert named == []


def test_a_scale_of_another_block_and_an_exchanged_row_are_altered_blocks() -> None:
    """Codes that are a formula's under a scale that is not; codes two steps off under its scale."""
    w = _blocks(16, 256)
    plain = FORMULAS[0]
    scale, codes = _amax(w) / np.float32(448), _cast(w / (_amax(w) / np.float32(448)))
    assert not plain.altered(_sample(w, scale, codes)).any()
    moved, other = scale.copy(), codes.copy()
    moved[3] *= np.float32(1.5)
    other[5, :20] = other[6, :20]
    assert np.flatnonzero(plain.altered(_sample(w, moved, other))).tolist() == [3, 5]


@pytest.mark.parametrize("other", range(1, 5))
def test_no_other_tools_rounding_is_taken_for_an_alteration(other: int) -> None:
    _, scale, codes = list(_tools(_blocks()))[other]
    assert not FORMULAS[0].altered(_sample(_blocks(), scale.astype(np.float32), codes)).any()


def test_formulas_have_names_of_their_own() -> None:
    names = [formula.name for formula in (*FORMULAS, *PROOFS)]
    assert len(names) == len(set(names))


def test_every_weight_without_floats_in_the_parent_is_left_out() -> None:
    published = next(one for one in PUBLISHED if one.name == "block fp8")
    child = open_checkpoint(Memory(files_of(published.model())), Report("x"))
    empty: Model = replace(parent(False), shards={"model.safetensors": {}})
    assert tallies_of(child, open_checkpoint(Memory(files_of(empty)), Report("x")), 1) == {}
    assert isinstance(FORMULAS[0], Formula)
