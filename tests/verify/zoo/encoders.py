"""Slow, obvious encoders of every form, in numpy: what tools write of a float matrix. Shares no code with the judge."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.verify.zoo.clean import nearest_e4m3
from tests.verify.zoo.model import Blob, bits

Array = np.ndarray[Any, Any]
Blobs = dict[str, Blob]
DTYPES = {
    "F32": "<f4",
    "F16": "<f2",
    "U8": "u1",
    "I8": "i1",
    "F8_E8M0": "u1",
    "F8_E4M3": "u1",
    "I32": "<i4",
    "I64": "<i8",
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def blob(dtype: str, values: Array) -> Blob:
    if dtype == "BF16":
        return Blob(dtype, values.shape, bf16_bits(values).tobytes())
    return Blob(dtype, values.shape, np.ascontiguousarray(values.astype(DTYPES[dtype])).tobytes())


def bf16_bits(values: Array) -> Array:
    wide = np.ascontiguousarray(values, "<f4").view("<u4").astype(np.uint64)
    rounded: Array = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype("<u2")
    return rounded.reshape(np.shape(values))


def rounded(values: Array) -> Array:
    """To BF16, as f32."""
    return (bf16_bits(values).astype("<u4") << 16).view("<f4").reshape(np.shape(values))


def matrix(name: str, rows: int, cols: int, size: float = 0.02) -> Array:
    """BF16 numbers of a bell shape, of a deviation of about `size`; rows differ in size as trained ones do."""
    raw = bits(name, rows * cols * 4).reshape(rows, cols, 4).astype("<f4").sum(-1) - 510
    tall = 0.75 + bits(f"{name}.rows", rows).astype("<f4").reshape(rows, 1) / 512
    return rounded(raw / np.float32(148) * np.float32(size) * tall)


def nearest_e2m1(values: Array) -> Array:
    magnitude = np.abs(values.astype(np.float64))
    upper = np.clip(np.searchsorted(E2M1, magnitude), 1, 7)
    below, above = magnitude - E2M1[upper - 1], E2M1[upper] - magnitude
    lower = (below < above) | ((below == above) & ((upper - 1) % 2 == 0))
    codes = np.where(lower, upper - 1, upper).astype(np.uint8) | (np.signbit(values).astype(np.uint8) << 3)
    packed: Array = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed


def blocks(w: Array, rows: int, cols: int) -> Array:
    """[R, C] -> the largest magnitude of each block."""
    r, c = -(-w.shape[0] // rows), -(-w.shape[1] // cols)
    padded = np.zeros((r * rows, c * cols), "<f4")
    padded[: w.shape[0], : w.shape[1]] = np.abs(w)
    largest: Array = padded.reshape(r, rows, c, cols).max((1, 3))
    return largest


def spread(scales: Array, rows: int, cols: int, shape: tuple[int, ...]) -> Array:
    return np.repeat(np.repeat(scales, rows, 0), cols, 1)[: shape[0], : shape[1]]


def power_above(values: Array) -> Array:
    return np.ceil(np.log2(np.maximum(values.astype(np.float64), 2.0**-126)))


def fp8(
    name: str, w: Array, scale: Array, rows: int, cols: int, leaf: str, dtype: str, shape: Any = None
) -> Blobs:
    codes = nearest_e4m3(np.clip(w / spread(scale, rows, cols, w.shape), -448, 448))
    if dtype in ("F8_E8M0", "U8"):
        scale = np.log2(scale) + 127
    scale = scale if shape is None else scale.reshape(shape)
    return {f"{name}.weight": blob("F8_E4M3", codes), f"{name}.{leaf}": blob(dtype, scale)}


def block_fp8(
    side: int = 128, leaf: str = "weight_scale_inv", dtype: str = "F32"
) -> Callable[[str, Array], Blobs]:
    def encode(name: str, w: Array) -> Blobs:
        scale = blocks(w, side, side) / np.float32(448)
        if dtype in ("F8_E8M0", "U8"):
            scale = np.exp2(power_above(scale)).astype("<f4")
        return fp8(name, w, rounded(scale) if dtype == "BF16" else scale, side, side, leaf, dtype)

    return encode


def block_of_rank_4(name: str, w: Array) -> Blobs:
    made = block_fp8(128, "weight_scale")(name, w)
    scale = made[f"{name}.weight_scale"]
    scale.shape = (scale.shape[0], 1, scale.shape[1], 1)
    return made


def tensor_fp8(
    leaf: str = "weight_scale", dtype: str = "F32", shape: tuple[int, ...] = (), inputs: str = ""
) -> Callable[[str, Array], Blobs]:
    def encode(name: str, w: Array) -> Blobs:
        scale = rounded(np.full((1, 1), np.abs(w).max() / np.float32(448), "<f4"))
        made = fp8(name, w, scale, *w.shape, leaf, dtype, shape)
        measured = np.full(shape, 0.004 + bits(f"{shared(name)}.in", 1)[0] / 65536)
        return made | ({f"{name}.{inputs}": blob(dtype, measured)} if inputs else {})

    return encode


def channel_fp8(dtype: str = "F32", flat: bool = False, bound: bool = False) -> Callable[[str, Array], Blobs]:
    def encode(name: str, w: Array) -> Blobs:
        scale = rounded(np.abs(w).max(1, keepdims=True) / np.float32(448))
        made = fp8(name, w, scale, 1, w.shape[1], "weight_scale", dtype, (w.shape[0],) if flat else None)
        return made | ({f"{name}.input_scale_ub": blob("F32", np.array([1200.0]))} if bound else {})

    return encode


def mxfp8(dtype: str) -> Callable[[str, Array], Blobs]:
    def encode(name: str, w: Array) -> Blobs:
        return fp8(name, w, np.exp2(power_above(blocks(w, 1, 32) / 448)), 1, 32, "weight_scale", dtype)

    return encode


def _mx4(w: Array) -> tuple[Array, Array]:
    exponents = np.floor(np.log2(blocks(w, 1, 32).astype(np.float64))) - 2
    return nearest_e2m1(np.clip(w / spread(np.exp2(exponents), 1, 32, w.shape), -6, 6)), exponents + 127


def mxfp4(weight: str, weight_dtype: str, leaf: str, dtype: str) -> Callable[[str, Array], Blobs]:
    def encode(name: str, w: Array) -> Blobs:
        codes, scales = _mx4(w)
        stored = Blob(weight_dtype, codes.shape, codes.tobytes())
        return {f"{name}.{weight}": stored, f"{name}.{leaf}": blob(dtype, scales)}

    return encode


def gpt_oss(name: str, w: Array) -> Blobs:
    """A bank of two experts."""
    pairs = [_mx4(w), _mx4(w[::-1])]
    rows, cols = w.shape
    return {
        f"{name}_blocks": blob("U8", np.stack([codes.reshape(rows, cols // 32, 16) for codes, _ in pairs])),
        f"{name}_scales": blob("U8", np.stack([scales for _, scales in pairs])),
        f"{name}_bias": blob("BF16", np.zeros((2, rows))),
    }


def shared(name: str) -> str:
    """Members of a fused module under one name."""
    for member in ("k_proj", "v_proj"):
        name = name.replace(member, "q_proj")
    return name.replace("up_proj", "gate_proj")


def nvfp4(divides: bool, inputs: bool) -> Callable[[str, Array], Blobs]:
    """One global scale for all, as fused members need it."""

    def encode(name: str, w: Array) -> Blobs:
        total = np.float32(0.125 / (6 * 448))
        codes = nearest_e4m3(blocks(w, 1, 16) / np.float32(6) / total)
        values = _e4m3_values()[codes] * total
        packed = nearest_e2m1(np.clip(w / spread(values, 1, 16, w.shape), -6, 6))
        x = np.float32(0.004 + bits(f"{shared(name)}.in", 1)[0] / 65536)
        if divides:
            made = {
                "weight_packed": blob("U8", packed),
                "weight_global_scale": blob("F32", np.array([1 / total])),
            }
            made |= {"input_global_scale": blob("F32", np.array([1 / x]))} if inputs else {}
        else:
            made = {"weight": blob("U8", packed), "weight_scale_2": blob("F32", np.array(total))}
            made |= {"input_scale": blob("F32", np.array(x))} if inputs else {}
        made["weight_scale"] = blob("F8_E4M3", codes)
        return {f"{name}.{leaf}": value for leaf, value in made.items()}

    return encode


def _e4m3_values() -> Array:
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    return np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(float) - 10)
    ).astype("<f4")


def int8(shape: str = "channel") -> Callable[[str, Array], Blobs]:
    def encode(name: str, w: Array) -> Blobs:
        largest = np.abs(w).max(1, keepdims=True) if shape == "channel" else np.abs(w).max()
        scale = np.asarray(rounded(np.asarray(largest, "<f4") / np.float32(127.5)))
        codes = np.clip(np.rint(w / scale), -128, 127)
        return {f"{name}.weight": blob("I8", codes), f"{name}.weight_scale": blob("BF16", scale)}

    return encode


def packed(group: int, width: int = 4) -> Callable[[str, Array], Blobs]:
    def encode(name: str, w: Array) -> Blobs:
        g, half = group or w.shape[1], 1 << (width - 1)
        scale = rounded(blocks(w, 1, g) / np.float32(half - 0.5))
        codes = (np.clip(np.rint(w / spread(scale, 1, g, w.shape)), -half, half - 1) + half).astype("<u4")
        return {
            f"{name}.weight_packed": Blob(
                "I32", (w.shape[0], w.shape[1] * width // 32), _words(codes, width).tobytes()
            ),
            f"{name}.weight_scale": blob("BF16", scale),
            f"{name}.weight_shape": blob("I64", np.array(w.shape)),
        }

    return encode


def _words(codes: Array, width: int) -> Array:
    """u4 [R, C] -> [R, C * width / 32], the lowest bits first."""
    lanes = codes.reshape(codes.shape[0], -1, 32 // width)
    words: Array = sum(
        (lanes[:, :, i] << np.uint32(width * i) for i in range(32 // width)), np.zeros(lanes.shape[:2], "<u4")
    )
    return words.astype("<u4")


def gptq(
    group: int = 64,
    width: int = 4,
    shuffled: bool = False,
    negative: bool = False,
    less: int = 1,
    indexed: bool = True,
) -> Callable[[str, Array], Blobs]:
    """Stored [inputs, outputs]; the first layout's zero is stored less one, and a scale may be any group's."""

    def encode(name: str, w: Array) -> Blobs:
        x, half = w.T, 1 << (width - 1)
        index = np.arange(x.shape[0]) // group
        if shuffled:  # the inputs stay in their places
            index = index[np.argsort(bits(f"{name}.order", x.shape[0]), kind="stable")]
        largest = np.stack([np.abs(x[index == one]).max(0) for one in range(index.max() + 1)])
        scale = (largest / (half - 0.5)).astype("<f2").astype("<f4") * (-1 if negative else 1)
        codes = np.clip(np.rint(x / scale[index]) + half, 0, 2 * half - 1).astype("<u4")
        words = np.ascontiguousarray(_words(np.ascontiguousarray(codes.T), width).T)
        zeros = _words(np.full(scale.shape, half - less, "<u4"), width)
        made = {
            f"{name}.qweight": Blob("I32", words.shape, words.tobytes()),
            f"{name}.qzeros": Blob("I32", zeros.shape, zeros.tobytes()),
            f"{name}.scales": blob("F16", scale),
        }
        return made | ({f"{name}.g_idx": blob("I32", index)} if indexed else {})

    return encode


def awq(name: str, w: Array) -> Blobs:
    """Stored [inputs, outputs], eight outputs a word in AutoAWQ's order."""
    x, group = w.T, 64
    scale = (blocks(x, group, 1) / 7.5).astype("<f2").astype("<f4")
    codes = np.clip(np.rint(x / spread(scale, group, 1, x.shape)) + 8, 0, 15).astype("<u4")

    def words(values: Array) -> Array:
        return _words(
            values.reshape(values.shape[0], -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(values.shape), 4
        )

    weight, zeros = words(codes), words(np.full(scale.shape, 8, "<u4"))
    return {
        f"{name}.qweight": Blob("I32", weight.shape, weight.tobytes()),
        f"{name}.qzeros": Blob("I32", zeros.shape, zeros.tobytes()),
        f"{name}.scales": blob("F16", scale),
    }


NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
     -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
     0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)  # fmt: skip
FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12


def bnb(kind: str = "nf4", nested: bool = True, block: int = 64) -> Callable[[str, Array], Blobs]:
    """Nearest entries of the table; absmax quantized again by a table of 256 numbers from -1 to 1."""

    def encode(name: str, w: Array) -> Blobs:
        table = NF4 if kind == "nf4" else FP4
        lanes = w.reshape(-1, block).astype(np.float64)
        largest = np.abs(lanes).max(1)
        parts: dict[str, Blob] = {"weight.quant_map": blob("F32", table)}
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": block,
            "dtype": "bfloat16",
            "shape": list(w.shape),
        }
        if nested:
            offset = np.float32(largest.mean())
            nested_table = np.linspace(-1, 1, 256).astype("<f4")
            seconds = [
                np.abs(part - offset).max() for part in np.split(largest, range(256, len(largest), 256))
            ]
            second = np.asarray(seconds, "<f4")
            of_blocks = np.repeat(second, 256)[: len(largest)]
            stored = np.abs(
                ((largest - offset) / np.maximum(of_blocks, 1e-30))[:, None] - nested_table
            ).argmin(1)
            parts |= {
                "weight.absmax": blob("U8", stored),
                "weight.nested_absmax": blob("F32", second),
                "weight.nested_quant_map": blob("F32", nested_table),
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        else:
            parts["weight.absmax"] = blob("F32", largest)
        codes = np.abs((lanes / largest[:, None])[..., None] - table).argmin(2).reshape(-1)
        said = json.dumps(state).encode()
        parts["weight"] = blob("U8", (codes[0::2] << 4 | codes[1::2]).reshape(-1, 1))
        parts[f"weight.quant_state.bitsandbytes__{kind}"] = Blob("U8", (len(said),), said)
        return {f"{name}.{leaf}": value for leaf, value in parts.items()}

    return encode


def plain(dtype: str = "BF16") -> Callable[[str, Array], Blobs]:
    return lambda name, w: {f"{name}.weight": blob(dtype, w)}
