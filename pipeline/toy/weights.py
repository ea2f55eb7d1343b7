"""The data of a toy parent's tensors, each a pure function of its name, dtype and shape.

Bell-shaped numbers are sums of twelve uniform 16-bit integers, drawn once into a bank; a tensor picks pieces of
the bank by PCG64's raw bits, whose stream numpy promises to keep. Floating point appears only where IEEE 754
fixes the result: division, multiplication, and the casts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from math import prod

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8 import decode
from shardmill.kernels.formats import f32_to_bf16
from shardmill.pipeline.toy.glm53 import EXPERT, GROUP, NATIVE_FP8
from shardmill.pipeline.types import Shape, TensorRef

Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
Codes = NDArray[np.uint16]  # BF16 bit patterns

_BLOCK = 128  # side of the blocks in which the base model is natively FP8
_PIECES = 1 << 16  # pieces in a bank: one 16-bit draw picks one
_WORDS_AT_ONCE = 1 << 15  # random words drawn at a time, which bounds memory
_E4M3_MAX = 0x7E  # the code of 448
_BF16_ONE = 0x3F80

# Uniform F32 tensors, by the end of the name: lowest value and span (a power of two, so that scaling is exact).
UNIFORM = {
    ".A_log": (0.0, 2.0),
    ".dt_bias": (-6.0, 4.0),
    ".e_score_correction_bias": (0.0, 0.5),
    "_base": (-1.0, 2.0),
    "hc_attn_scale": (0.5, 1.0),
    "hc_ffn_scale": (0.5, 1.0),
    ".weight_scale_2": (2.0**-14, 2.0**-14),
    ".input_scale": (2.0**-9, 2.0**-7),
}


def tensor_data(ref: TensorRef) -> Iterator[memoryview]:
    """The bytes of the tensor `ref`, in pieces of bounded size, little-endian."""
    name, shape = ref.name, ref.shape
    if ref.dtype == "F32":
        yield from _uniform(name, shape)
    elif ref.dtype == "U8":
        yield from _expert_codes(name, shape)
    elif ref.dtype == "F8_E4M3":
        yield from _expert_scales(name, shape)
    elif NATIVE_FP8.fullmatch(name):
        yield from _native_fp8(name, shape)
    elif "norm" in name.rsplit(".", 2)[-2] and name.endswith(".weight"):
        yield from _near_one(name, shape)
    else:
        yield from _fresh(name, shape)


def _bits(name: str) -> np.random.PCG64:
    """The random bits that belong to `name`, and to nothing else."""
    return np.random.PCG64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little"))


def _words(name: str, count: int) -> Words:
    return np.asarray(_bits(name).random_raw(count), dtype="<u8")


def _picks(name: str, count: int) -> Iterator[Codes]:
    """`count` uniform 16-bit numbers, in runs."""
    bits = _bits(name)
    while count > 0:
        words = np.asarray(bits.random_raw(min(_WORDS_AT_ONCE, -(-count // 4))), dtype="<u8")
        yield words.view("<u2")[:count]
        count -= 4 * len(words)


def _uniform(name: str, shape: Shape) -> Iterator[memoryview]:
    low, span = next(law for ends, law in UNIFORM.items() if name.endswith(ends))
    steps = (_words(_shared_name(name), prod(shape)) >> np.uint64(40)).astype(np.float32)
    yield (np.float32(low) + steps * np.float32(span * 2.0**-24)).astype("<f4").data.cast("B")


def _shared_name(name: str) -> str:
    """One name for what gate and up of an expert share: the input they see, and w13's global scale."""
    if name.endswith((".weight_scale_2", ".input_scale")):
        return name.replace(".gate_proj.", ".w13.").replace(".up_proj.", ".w13.")
    return name


def _near_one(name: str, shape: Shape) -> Iterator[memoryview]:
    """Norm weights: the 32 BF16 numbers from 0.9375 to 1.1171875."""
    for picks in _picks(name, prod(shape)):
        yield (picks % 32 + np.uint16(_BF16_ONE - 16)).astype("<u2").data.cast("B")


def _fresh(name: str, shape: Shape) -> Iterator[memoryview]:
    """BF16 that never was FP8: bell-shaped, standard deviation 2^-6."""
    count = prod(shape)
    bank = _fresh_bank()
    for picks in _picks(name, -(-count // 4)):
        run = bank[picks].view("<u2")[:count]
        count -= len(run)
        yield run.data.cast("B")


def _native_fp8(name: str, shape: Shape) -> Iterator[memoryview]:
    """BF16 copies of block-FP8 [128,128]: every block holds a code of 448, so scale = amax / 448 up to rounding."""
    R, C = shape
    codes = _e4m3_bank()[np.concatenate(list(_picks(name + "/codes", -(-R * C // 8))))].view(np.uint8)
    codes = codes[: R * C].reshape(R, C)
    grid = (-(-R // _BLOCK), -(-C // _BLOCK))
    places = _words(name + "/places", prod(grid)).reshape(grid)
    scales = _native_scales(name, grid)
    for i in range(grid[0]):
        strip = codes[i * _BLOCK : (i + 1) * _BLOCK]
        for j in range(grid[1]):
            block = strip[:, j * _BLOCK : (j + 1) * _BLOCK]
            row, column = divmod(int(places[i, j]) % block.size, block.shape[1])
            block[row, column] = _E4M3_MAX
        yield f32_to_bf16(decode(strip, scales[i : i + 1], (_BLOCK, _BLOCK))).data.cast("B")


def _native_scales(name: str, grid: Shape) -> NDArray[np.float32]:
    """f32 scales = amax / 448, amax in [1/16, 1/8) and within a quarter step of a BF16 number.

    Were amax a BF16 number, re-quantizing the copy would find its scale; with any amax, it would err by 0.22 %. So
    it errs by 0.17 %, near what is published for the real parent (0.12 to 0.16 %).
    """
    words = _words(name + "/scales", prod(grid))
    numbers = (words >> np.uint64(57) << np.uint64(16)) + np.uint64((127 - 4) << 23)  # 7 bits of mantissa
    amax = (numbers + (words & np.uint64(0x7FFF)) - np.uint64(0x4000)).astype(np.uint32).view(np.float32)
    return (amax / np.float32(448)).reshape(grid)


def _expert_codes(name: str, shape: Shape) -> Iterator[memoryview]:
    """Packed E2M1, two codes a byte, the earlier one in the low half."""
    codes, _, _ = _nvfp4_bank()
    for picks in _expert_picks(name, prod(shape) * 2 // GROUP):
        yield codes[picks].data.cast("B")


def _expert_scales(name: str, shape: Shape) -> Iterator[memoryview]:
    _, scales, _ = _nvfp4_bank()
    for picks in _expert_picks(name.removesuffix("_scale"), prod(shape)):
        yield scales[picks].data.cast("B")


def _expert_picks(weight: str, count: int) -> Iterator[Codes]:
    """Which groups of the bank make up the expert's matrix `weight`.

    The first group of gate and of down is the bank's largest, whose scale is 448: the global scale of w13 and of
    down is amax / (6 * 448), as it is where weights were quantized.
    """
    assert EXPERT.fullmatch(weight), weight
    for number, picks in enumerate(_picks(weight, count)):
        if number == 0 and ".up_proj." not in weight:
            picks[0] = _nvfp4_bank()[2]
        yield picks


@cache
def _bell() -> NDArray[np.int32]:
    """Integers [pieces, 16] of standard deviation 2^16 and mean 0, none of them 0, at most 6 * 65535 in size."""
    words = _words("bell", 12 * _PIECES * GROUP // 4).view("<u2").reshape(12, _PIECES, GROUP)
    bell: NDArray[np.int32] = words.sum(axis=0, dtype=np.int32) - np.int32(6 * 65535)
    bell[bell == 0] = 1
    return bell


@cache
def _fresh_bank() -> Words:
    """[pieces] of four BF16 of standard deviation 2^-6."""
    numbers = _bell()[:, :4].astype(np.float32)
    return f32_to_bf16(numbers * np.float32(2.0**-22)).view("<u8").ravel()


@cache
def _e4m3_bank() -> Words:
    """[pieces] of eight E4M3 codes of standard deviation 112, a quarter of the largest, none above 448."""
    numbers = np.clip(_bell()[:, :8].astype(np.float32) * np.float32(112 / 65536), -448, 448)
    codes: Words = numbers.astype(ml_dtypes.float8_e4m3fn).view("<u8").ravel()
    return codes


@cache
def _nvfp4_bank() -> tuple[Words, Bytes, int]:
    """Groups as NVFP4 holds them: packed codes [pieces], E4M3 scales [pieces], and the place of the largest group."""
    numbers = _bell().astype(np.float32)
    amax = np.abs(numbers).max(axis=1)
    scales = (amax * np.float32(448) / amax.max()).astype(ml_dtypes.float8_e4m3fn)
    step = scales.astype(np.float32) * (amax.max() / np.float32(6 * 448))
    nibbles = (numbers / step[:, None]).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    packed = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return packed.view("<u8").ravel(), scales.view(np.uint8), int(amax.argmax())
