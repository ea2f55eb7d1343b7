"""The arithmetic by which tools turn floats into codes and scales, a row each: what a scale is, what a code is.

Every row gives bits: two formulas that differ in one rounding differ in some block of any weight. Read from
the tools' own sources (named in `tools`); tests hold the rows to these tools where they are installed. `low`
is a rounding to the parent's own dtype: tools that compute in BF16 or F16 round every intermediate so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.formats import E2M1_VALUES, E4M3_VALUES
from shardmill.verify.formats.encode import decodes_to, encode_block, nearest
from shardmill.verify.formats.linear import F32, U8

Low: TypeAlias = Callable[[F32], F32]

_E2M1_MIDDLES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


@dataclass(frozen=True, slots=True)
class Sample:
    """Blocks of one weight, a row each: the parent's values f32 [n, elements], and what the child stores for them."""

    values: F32
    amax: F32  # f32 [n, 1], of the whole block, or of what shares its scale
    scales: F32  # f32 [n, 1], as stored, before a scale of scales
    codes: U8  # [n, elements]
    total: F32  # f32 [1, 1]: the scale of scales, 1 where there is none
    low: Low
    zeros: F32 | None = None  # f32 [n, 1]: the stored zero points, as codes are stored

    def part(self, which: NDArray[np.bool_] | NDArray[np.int64]) -> Sample:
        """Some of the blocks."""
        zeros = self.zeros[which] if self.zeros is not None else None
        return Sample(
            self.values[which], self.amax[which], self.scales[which], self.codes[which], self.total, self.low, zeros
        )  # fmt: skip


Scale: TypeAlias = Callable[[Sample], F32]
Codes: TypeAlias = Callable[[Sample, F32], U8]


@dataclass(frozen=True, slots=True)
class Formula:
    """One way to make a kind of blocks."""

    name: str
    tools: str
    kinds: tuple[str, ...]
    scale: Scale
    codes: Codes
    rounds_low: bool = False  # whether it computes in the parent's dtype: for F32 parents it is another row's
    proves: Callable[[Sample], NDArray[np.bool_]] | None = None  # in place of scale and codes
    zeros: Scale | None = None  # of integers with zero points

    def equal(self, sample: Sample) -> NDArray[np.bool_]:
        """bool [n]: the blocks whose scale and codes it gives, bit for bit."""
        if self.proves is not None:
            return self.proves(sample)
        if (self.zeros is None) != (sample.zeros is None):
            return np.zeros(len(sample.values), bool)
        with np.errstate(all="ignore"):
            same = np.asarray(self.scale(sample) == sample.scales).reshape(-1)
            if self.zeros is not None:
                same &= np.asarray(self.zeros(sample) == sample.zeros).reshape(-1)
            if same.any():
                some = sample.part(same)
                same[same] = (self.codes(some, self.scale(some)) == some.codes).all(axis=1)
            return same

    def altered(self, sample: Sample) -> NDArray[np.bool_]:
        """bool [n], of E4M3 codes: blocks that are this formula's but for their scale, or but for some codes.

        No rounding moves a scale by 1 %, nor a code by two steps while its scale stays within 1 %.
        """
        with np.errstate(all="ignore"):
            scale = np.asarray(self.scale(sample))
            steps = np.abs(_order(self.codes(sample, scale)) - _order(sample.codes))
            moved = np.asarray(np.abs(sample.scales / scale - 1) > 0.01).reshape(-1)
        codes_are_its = (steps == 0).mean(axis=1) > 0.95
        most_are_near = (steps <= 1).mean(axis=1) > 0.5
        return np.asarray((moved & codes_are_its) | (~moved & most_are_near & (steps > 1).any(axis=1)))


def _order(codes: U8) -> NDArray[np.int16]:
    """E4M3 codes as whole numbers in the order of their values, the two zeros alike."""
    magnitude = (codes & 0x7F).astype(np.int16)
    return np.where(codes & 0x80, -magnitude, magnitude)


def to_bf16(values: F32) -> F32:
    """f32 rounded to BF16, ties to even, as f32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).reshape(np.shape(values))


def to_f16(values: F32) -> F32:
    return np.asarray(values, np.float32).astype(np.float16).astype(np.float32)


def same(values: F32) -> F32:
    return values


LOWS: Mapping[str, Low] = {"BF16": to_bf16, "F16": to_f16, "F32": same}


def _f(value: float) -> np.float32:
    return np.float32(value)


def e4m3(quotients: F32) -> U8:
    return nearest(np.clip(quotients, _f(-448), _f(448)).astype(np.float64))


def _e2m1(quotients: F32, down: bool = False, sign: str = "negative") -> U8:
    """Nearest E2M1 codes; ties to the even code, or `down`; `sign`: which values get the sign bit."""
    magnitude = np.abs(quotients).astype(np.float64)
    below = np.searchsorted(_E2M1_MIDDLES, magnitude, side="left").astype(np.uint8)
    above = np.searchsorted(_E2M1_MIDDLES, magnitude, side="right").astype(np.uint8)
    code = below if down else np.where(below % 2 == 0, below, above).astype(np.uint8)
    negative = _SIGNS[sign](quotients, code)
    return np.asarray(code | (negative.astype(np.uint8) << 3), np.uint8)


_SIGNS: Mapping[str, Callable[[F32, U8], NDArray[np.bool_]]] = {
    "negative": lambda quotients, code: quotients < 0,
    "not positive": lambda quotients, code: quotients <= 0,
    "bit": lambda quotients, code: np.signbit(quotients),
    "of codes": lambda quotients, code: (
        (quotients < 0) & (code > 0)
    ),  # what is rounded to zero loses its sign
}


def _power(exponents: F32) -> F32:
    return np.exp2(exponents.astype(np.float64)).astype(np.float32)


def _ceil_power(amax: F32, top: float) -> F32:
    """The smallest power of two at or above f32(amax / top)."""
    mantissa, exponent = np.frexp(np.maximum(amax / _f(top), _f(2.0**-127)))
    return _power((exponent - (mantissa == 0.5)).astype(np.float32))


def _nearest_power(amax: F32, top: float) -> F32:
    with np.errstate(divide="ignore"):
        return _power(np.rint(np.log2(amax.astype(np.float64) / top)).astype(np.float32))


def _floor_power(amax: F32, offset: int, add: float = 0.0) -> F32:
    """2^(floor(log2(amax)) - offset); `add` is a share of the mantissa that is added before the floor."""
    mantissa, exponent = np.frexp(amax)
    up = 2 * mantissa + add >= 2
    return _power((exponent - 1 + up - offset).astype(np.float32))


def _one_for_zero(scale: Scale) -> Scale:
    return lambda s: np.where(s.amax == 0, _f(1), scale(s))


def _block_scale_e4m3(values: F32, least: float = 0.0) -> F32:
    codes = nearest(np.clip(values, least, 448).astype(np.float64))
    return np.asarray(E4M3_VALUES[codes])


def _epsilon_for_zero(scales: F32) -> F32:
    """compressed-tensors replaces a scale of zero by the epsilon of E4M3."""
    return np.where(scales == 0, _f(0.125), scales)


def _over(values: F32) -> F32:
    return np.asarray(_f(1) / values, np.float32)


def _divided(s: Sample, scale: F32) -> U8:
    return e4m3(s.values / scale)


def _divided_low(s: Sample, scale: F32) -> U8:
    return e4m3(s.low(s.values / scale))


FP8 = ("fp8-block", "fp8-grid", "fp8-tensor", "fp8-channel", "fp8-pbwo", "comfy-fp8", "mistral-fp8")
MX8, MX4, NV4, CT4, INT = (
    (*FP8, "mxfp8"),
    ("mxfp4", "gpt-oss"),
    ("nvfp4",),
    ("ct-nvfp4",),
    ("int8", "int-pack"),
)

FORMULAS: tuple[Formula, ...] = (
    Formula("FP8, amax / 448 in f32, divided", "shardmill amax/1, slime, DeepSeek; ModelOpt and llm-compressor on F32",
            FP8, _one_for_zero(lambda s: s.amax / _f(448)), _divided),
    Formula("FP8, amax / 448 in the weight's dtype, divided in it", "llm-compressor and Quark on BF16 or F16",
            FP8, lambda s: s.low(s.amax / _f(448)), _divided_low, True),
    Formula("FP8, amax / 448 rounded to the weight's dtype, codes divided in f32", "scale rounded first",
            FP8, lambda s: s.low(s.amax / _f(448)), _divided, True),
    Formula("FP8, amax / 448 in f32, quotients rounded to the weight's dtype", "ModelOpt FP8 on BF16 or F16",
            FP8, lambda s: s.amax / _f(448), lambda s, scale: e4m3(s.low(s.values / scale)), True),
    Formula("FP8, codes by f32 amax / 448, scale rounded to BF16 when stored", "Qwen's and Mistral's releases",
            FP8, lambda s: to_bf16(s.amax / _f(448)), lambda s, _: e4m3(s.values / (s.amax / _f(448)))),
    Formula("FP8, multiplied by 448 times 1 / amax, its reciprocal stored", "transformers: torch divides a number so",
            FP8, lambda s: _f(1) / (_f(448) * (_f(1) / s.amax)),
            lambda s, _: e4m3(s.values * (_f(448) * (_f(1) / s.amax)))),
    Formula("FP8, multiplied by 448 / amax, its reciprocal stored", "fbgemm, torchao",
            FP8, lambda s: _f(1) / (_f(448) / s.amax), lambda s, _: e4m3(s.values * (_f(448) / s.amax))),
    Formula("FP8, multiplied by 448 / amax, amax / 448 stored", "TensorRT-LLM's and TransformerEngine's way",
            FP8, lambda s: s.amax / _f(448), lambda s, _: e4m3(s.values * (_f(448) / s.amax))),
    Formula("FP8, amax / 448, multiplied by its reciprocal", "CUDA kernels that avoid a division",
            FP8, lambda s: s.amax / _f(448), lambda s, scale: e4m3(s.values * (_f(1) / scale))),
    Formula("FP8, amax times f32(1 / 448), divided", "torch on CUDA, which divides by a number so",
            FP8, lambda s: s.amax * (_f(1) / _f(448)), _divided),
    Formula("FP8, multiplied by 448 / amax in the weight's dtype, its reciprocal stored", "AutoFP8, vLLM's older tools",
            FP8, lambda s: _f(1) / s.low(_f(448) / s.amax), lambda s, _: e4m3(s.low(s.values * s.low(_f(448) /
            s.amax))), True),
    Formula("FP8, power of two above amax / 448 (ue8m0)", "shardmill ue8m0/1, DeepGEMM, transformers, ModelOpt MXFP8",
            MX8, _one_for_zero(lambda s: _ceil_power(s.amax, 448)), _divided),
    Formula("FP8, power of two nearest to amax / 448", "tools that round log2", MX8,
            lambda s: _nearest_power(s.amax, 448), _divided),
    Formula("FP8, power of two below amax less 8 (OCP MX)", "torchao, AutoRound", MX8,
            lambda s: _floor_power(s.amax, 8), _divided),
    Formula("FP8, power of two below amax and a quarter, less 8", "llm-compressor MXFP8", MX8,
            lambda s: _floor_power(s.amax, 8, 0.25), _divided),
    Formula("MXFP4, power of two above amax / 6, ties down", "ModelOpt MXFP4", MX4,
            lambda s: _ceil_power(s.amax, 6), lambda s, scale: _e2m1(s.values / scale, True, "not positive")),
    Formula("MXFP4, power of two above amax / 6, ties to even", "DeepSeek-V4", MX4,
            lambda s: _ceil_power(s.amax, 6), lambda s, scale: _e2m1(s.values / scale, sign="bit")),
    Formula("MXFP4, power of two below amax less 2 (OCP MX)", "gpt-oss, torchao, AutoRound", MX4,
            lambda s: _floor_power(s.amax, 2), lambda s, scale: _e2m1(s.values / scale, sign="bit")),
    Formula("MXFP4, power of two below amax and a quarter, less 2", "llm-compressor MXFP4", MX4,
            lambda s: _floor_power(s.amax, 2, 0.25), lambda s, scale: _e2m1(s.values / scale)),
    Formula("MXFP4, power of two below amax and a quarter, less 2, zeros unsigned", "AMD Quark MXFP4", MX4,
            lambda s: _floor_power(s.amax, 2, 0.25), lambda s, scale: _e2m1(s.values / scale, sign="of codes")),
    Formula("NVFP4, amax / (6 * global) in f32", "ModelOpt NVFP4", NV4,
            _one_for_zero(lambda s: _block_scale_e4m3(s.amax / (_f(6) * s.total), 2.0**-9)),
            lambda s, scale: _e2m1(s.values / (scale * s.total))),
    Formula("NVFP4, global * (amax / 6) in f32", "llm-compressor NVFP4 on F32", CT4,
            lambda s: _epsilon_for_zero(_block_scale_e4m3(s.total * (s.amax / _f(6)))),
            lambda s, scale: _e2m1(s.values / (scale / s.total))),
    Formula("NVFP4, global * (amax / 6 in the weight's dtype)", "llm-compressor NVFP4 on BF16 or F16", CT4,
            lambda s: _epsilon_for_zero(_block_scale_e4m3(s.total * s.low(s.amax / _f(6)))),
            lambda s, scale: _e2m1(s.values / (scale / s.total)), True),
    Formula("NVFP4, global * (amax times f32(1 / 6)), codes by reciprocals", "AutoRound NVFP4", CT4,
            lambda s: _block_scale_e4m3(s.total * (s.amax * (_f(1) / _f(6)))),
            lambda s, scale: _e2m1(s.values * _over(scale * _over(s.total)), sign="of codes")),
    Formula("integers, amax / (levels / 2) in f32", "llm-compressor on F32", INT,
            lambda s: s.amax / _levels(s), lambda s, scale: _integers(s, s.values / scale)),
    Formula("integers, amax / (levels / 2) in the weight's dtype", "llm-compressor on BF16 or F16", INT,
            lambda s: s.low(s.amax / _levels(s)), lambda s, scale: _integers(s, s.low(s.values / scale)), True),
    Formula("integers, amax / (levels / 2) rounded to BF16, codes divided in f32", "shardmill int4/1, int8-bf16/1", INT,
            lambda s: to_bf16(s.amax / _levels(s)), lambda s, scale: _integers(s, s.values / scale)),
    Formula("integers with zero points, (max - min) / levels in the weight's dtype", "llm-compressor on BF16 or F16",
            ("int-pack",), lambda s: s.low(s.low(_most(s) - _least(s)) / _whole_levels(s)),
            lambda s, scale: _shifted(s, s.low(s.low(s.values / scale) + _signed_zeros(s))), True,
            zeros=lambda s: _zero_points(s, s.low)),
    Formula("integers with zero points, (max - min) / levels in f32", "llm-compressor on F32",
            ("int-pack",), lambda s: (_most(s) - _least(s)) / _whole_levels(s),
            lambda s, scale: _shifted(s, s.values / scale + _signed_zeros(s)), zeros=lambda s: _zero_points(s, same)),
    Formula("MXFP4, the better by squared error of the power of two above amax / 6 and its half", "shardmill mxfp4/1",
            MX4, lambda s: _better_power(s), lambda s, scale: _e2m1(s.values / scale, sign="bit")),
    Formula("FP8, amax / 448 rounded to BF16, codes divided in f32", "shardmill amax-bf16/1 on F16 and F32",
            FP8, lambda s: to_bf16(s.amax / _f(448)), _divided),
)  # fmt: skip


def _better_power(s: Sample) -> F32:
    """mxfp4/1 of shardmill: never below 2^-100; of equal errors the larger; the exponent 0 for zeros."""
    whole = _ceil_power(np.maximum(s.amax, _f(6 * 2.0**-100)), 6)
    half = np.maximum(whole / _f(2), _f(2.0**-100))
    nearer = (half < whole) & (_units(s.values / half) < 4 * _units(s.values / whole))
    return np.where(s.amax == 0, _f(2.0**-127), np.where(nearer, half, whole))


def _units(quotients: F32) -> NDArray[np.int64]:
    """i64 [n, 1]: the squared error of E2M1 in whole units of 2^-30 of the scale squared; 32 at most an element."""
    codes = _e2m1(quotients, sign="bit")
    errors = np.minimum(np.abs(E2M1_VALUES[codes] - quotients), _f(32)).astype(np.float64)
    units: NDArray[np.int64] = (errors * errors * 2.0**30 + 0.5).astype(np.int64).sum(axis=1, keepdims=True)
    return units


def _levels(s: Sample) -> np.float32:
    """127.5 of INT8, 7.5 of INT4: half of the integers that there are, less one. INT4 codes stay below 16."""
    return _f(7.5) if int(s.codes.max(initial=0)) < 16 else _f(127.5)


def _integers(s: Sample, quotients: F32) -> U8:
    half = 8 if int(s.codes.max(initial=0)) < 16 else 128
    rounded = np.clip(np.rint(quotients), -half, half - 1).astype(np.int16)
    return np.asarray((rounded + half) if half == 8 else rounded & 0xFF, np.uint8)


def _least(s: Sample) -> F32:
    return np.asarray(np.minimum(s.values.min(axis=1, keepdims=True), _f(0)), np.float32)


def _most(s: Sample) -> F32:
    return np.asarray(np.maximum(s.values.max(axis=1, keepdims=True), _f(0)), np.float32)


def _whole_levels(s: Sample) -> np.float32:
    return _levels(s) * _f(2)


def _half(s: Sample) -> np.float32:
    return (_whole_levels(s) + _f(1)) / _f(2)


def _signed_zeros(s: Sample) -> F32:
    assert s.zeros is not None
    return np.asarray(s.zeros - _half(s), np.float32)


def _zero_points(s: Sample, low: Low) -> F32:
    """-half - min / scale, clipped and rounded, as it is stored."""
    zeros = low(-_half(s) - low(_least(s) / s.scales))
    return np.asarray(np.rint(np.clip(zeros, -_half(s), _half(s) - _f(1))) + _half(s), np.float32)


def _shifted(s: Sample, numbers: F32) -> U8:
    """Codes of four bits are stored with their offset; those of eight come with the sign bit turned."""
    clipped = np.rint(np.clip(numbers, -_half(s), _half(s) - _f(1))).astype(np.int16)
    return np.asarray((clipped + 8) if _half(s) == 8 else clipped & 0xFF, np.uint8)


def _decoded(s: Sample) -> NDArray[np.bool_]:
    if s.low is not to_bf16:
        return np.zeros(len(s.values), bool)
    return np.array(
        [decodes_to(v, scale[0], c) for v, scale, c in zip(s.values, s.scales, s.codes, strict=True)]
    )


def _searched(s: Sample) -> NDArray[np.bool_]:
    found = []
    for values, scale, codes in zip(s.values, s.scales, s.codes, strict=True):
        wanted, their = encode_block(values, "mse/1")
        found.append(wanted == scale[0] and np.array_equal(their, codes))
    return np.array(found, bool)


# Slow or of another kind: asked where no row of the table explains every block.
PROOFS: tuple[Formula, ...] = (
    Formula("FP8 that decodes to the parent's BF16 bit for bit", "shardmill recover/1; or a parent decoded from it",
            FP8, lambda s: s.scales, _divided, proves=_decoded),
    Formula("FP8, the best of eight scales from amax / 448", "shardmill mse/1", FP8, lambda s: s.scales, _divided,
            proves=_searched),
)  # fmt: skip
