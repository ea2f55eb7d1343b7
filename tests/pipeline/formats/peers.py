"""Our bits beside those of other tools' own code: `python -m tests.pipeline.formats.peers` prints the table.

Needs compressed-tensors, nvidia-modelopt, torchao and transformers (`make peers`). Every matrix of
tests.pipeline.formats.matrices, 256 x 1,024, as BF16, F16 and F32. A tool gets the numbers as F32, and once more in
their own dtype. Unequal: codes and scales that differ, zeros of either sign and scales of groups that hold nothing but
zeros apart. The ratio is that of our squared error to theirs, on the best and on the worst matrix: below 1 ours is
nearer.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shardmill.kernels.group_codes import unpack_nibbles, widened
from shardmill.pipeline.formats import formats
from tests.pipeline.formats.matrices import kinds, setting, source

ROWS, COLUMNS = 256, 1024
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
Group = tuple[int, int]


@dataclass(frozen=True)
class Made:
    """What an encoder made of a matrix [R, C]: codes as numbers f64 [R, C], scales f64 of their own grid."""

    codes: Any
    scales: Any
    group: Group

    @property
    def spread(self) -> Any:
        r, c = self.group
        return self.scales.repeat(r, 0).repeat(c, 1)

    @property
    def values(self) -> Any:
        return self.codes * self.spread


@dataclass(frozen=True)
class Peer:
    """One comparison: our format under a profile and law, and another tool's way to the same format."""

    form: str
    profile: str
    tool: str
    encode: Callable[[Any], Made]  # torch [R, C] of any dtype
    params: dict[str, Any] = field(default_factory=dict)
    law: str = ""
    halves: bool = True  # whether it takes F16 as it is


def e2m1(codes: Any) -> Any:
    return E2M1[codes & 7] * np.where(codes & 8, -1.0, 1.0)


def e4m3(codes: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(codes)).view(torch.float8_e4m3fn).double().numpy()


def power(codes: Any) -> Any:
    return np.exp2(codes.astype(np.float64) - 127)


def ours(peer: Peer, strip: Any) -> Made:
    from dataclasses import replace

    form = formats()[peer.form]
    made = setting(peer.form, peer.profile, strip, **peer.params)
    made = replace(made, law=peer.law or made.law)
    assert form.encode is not None
    parts = form.encode(strip, made)
    scales = np.asarray(parts["scales"])
    if peer.form == "mxfp4" or peer.form == "nvfp4":
        codes = e2m1(unpack_nibbles(parts["codes"]))
    elif peer.form == "int4-group":
        codes = unpack_nibbles(parts["codes"].view(np.uint8)).astype(np.float64) - 8
    elif peer.form == "int8-channel":
        codes = parts["codes"].astype(np.float64)
    else:
        codes = e4m3(parts["codes"])
    if peer.form in ("mxfp4", "mxfp8"):
        scales = power(scales)
    elif peer.form == "nvfp4":
        number, steps = parts["global"][0], e4m3(scales).astype(np.float32)
        scales = steps / number if peer.profile == "compressed-tensors" else steps * number
    elif scales.dtype == np.uint16:
        scales = (scales.astype(np.uint32) << 16).view(np.float32)
    scales = scales.astype(np.float64).reshape(-1, 1) if scales.ndim < 2 else scales.astype(np.float64)
    return Made(codes, scales, grid_of(codes, scales))


def grid_of(codes: Any, scales: Any) -> Group:
    return codes.shape[0] // scales.shape[0], codes.shape[1] // scales.shape[1]


def of_torch(codes: Any, scales: Any) -> Made:
    codes, scales = codes.double().numpy(), scales.double().numpy()
    scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    return Made(codes, scales, grid_of(codes, scales))


def compressed(**said: Any) -> Callable[[Any], Made]:
    """compressed-tensors' calculate_qparams and quantize with these QuantizationArgs."""

    def encode(weights: Any) -> Made:
        from compressed_tensors.quantization import QuantizationArgs
        from compressed_tensors.quantization.lifecycle.forward import quantize
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        args = QuantizationArgs(symmetric=True, **{k: v for k, v in said.items() if k != "rounded"})
        low, high = _extremes(weights, said)
        number = generate_gparam(weights.min(), weights.max()) if said["strategy"] == "tensor_group" else None
        scales, _ = calculate_qparams(low, high, args, global_scale=number)
        if said.get("rounded"):
            scales = scales.bfloat16().float()
        codes = quantize(weights, scales, None, args, dtype=None, global_scale=number)
        wide = scales.float() / number if number is not None else scales
        return of_torch(codes, wide)

    return encode


def _extremes(weights: Any, said: dict[str, Any]) -> tuple[Any, Any]:
    R, C = weights.shape
    match said["strategy"]:
        case "tensor":
            return weights.min().reshape(1), weights.max().reshape(1)
        case "channel":
            return weights.amin(1, keepdim=True), weights.amax(1, keepdim=True)
        case "block":
            r, c = said["block_structure"]
            blocks = weights.reshape(R // r, r, C // c, c)
            return blocks.amin((1, 3)), blocks.amax((1, 3))
        case _:
            groups = weights.reshape(R, -1, said["group_size"])
            return groups.amin(2), groups.amax(2)


def modelopt_fp8(**said: Any) -> Callable[[Any], Made]:
    def encode(weights: Any) -> Made:
        from modelopt.torch.quantization.qtensor import FP8QTensor

        made, scales = FP8QTensor.quantize(weights, **said)
        return of_torch(made._quantized_data.float(), scales.reshape(-1, 1) if scales.dim() < 2 else scales)

    return encode


def modelopt_nvfp4(weights: Any) -> Made:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    made, scales, number = NVFP4QTensor.quantize(weights, 16)
    codes = e2m1(unpack_nibbles(made._quantized_data.numpy()))
    wide = (scales.float() * number.float()).double().numpy()
    return Made(codes, wide, (1, 16))


def modelopt_mx(name: str) -> Callable[[Any], Made]:
    def encode(weights: Any) -> Made:
        from modelopt.torch.quantization import qtensor

        if name == "MXFP8QTensor":
            made, scales = qtensor.MXFP8QTensor.quantize(weights)
            codes = made._quantized_data.double().numpy()
        else:
            made, scales = qtensor.MXFP4QTensor.quantize(weights, 32)
            codes = e2m1(unpack_nibbles(made._quantized_data.numpy()))
        return Made(codes, power(scales.numpy().reshape(len(codes), -1)), (1, 32))

    return encode


def torchao_mx(elements: str, mode: str) -> Callable[[Any], Made]:
    def encode(weights: Any) -> Made:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx

        kind = torch.float8_e4m3fn if elements == "fp8" else torch.float4_e2m1fn_x2
        scales, codes = to_mx(weights, kind, 32, ScaleCalculationMode[mode])
        numbers = (
            codes.double().numpy()
            if elements == "fp8"
            else e2m1(unpack_nibbles(codes.view(torch.uint8).numpy()))
        )
        return Made(numbers.reshape(weights.shape), power(scales.view(torch.uint8).numpy()), (1, 32))

    return encode


def torchao_nvfp4(weights: Any) -> Made:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    number = per_tensor_amax_to_scale(weights.abs().max())
    scales, packed = nvfp4_quantize(weights, 16, number)
    codes = e2m1(unpack_nibbles(packed.view(torch.uint8).numpy().reshape(len(weights), -1)))
    return Made(codes, (scales.float() * number).double().numpy().reshape(len(codes), -1), (1, 16))


def transformers_fp8(weights: Any) -> Made:
    from types import SimpleNamespace

    from transformers.integrations.finegrained_fp8 import Fp8Quantize
    from transformers.utils.quantization_config import FineGrainedFP8Config

    quantizer = SimpleNamespace(quantization_config=FineGrainedFP8Config())
    made = Fp8Quantize(quantizer).convert({"x.weight": [weights]})
    codes = next(value for name, value in made.items() if name.endswith("weight"))
    scales = next(value for name, value in made.items() if "scale" in name)
    return of_torch(codes.float(), scales)


FP8 = {"num_bits": 8, "type": "float"}
BLOCK = {"block": (128, 128)}
NV = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
}
MX = {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8, "type": "float"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "rounded": True}
CT, BF = "compressed-tensors", "amax-bf16/1"
PEERS = (
    Peer("fp8-block", CT, CT, compressed(**FP8, strategy="block", block_structure=[128, 128]), BLOCK),
    Peer("fp8-block", CT, CT, compressed(**FP8, strategy="block", block_structure=[128, 128]), BLOCK, BF),
    Peer("fp8-block", "fp8", "ModelOpt", modelopt_fp8(block_sizes={-1: 128, -2: 128}), BLOCK, halves=False),
    Peer("fp8-block", "fp8", "transformers", transformers_fp8, BLOCK),
    Peer("fp8-channel", CT, CT, compressed(**FP8, strategy="channel")),
    Peer("fp8-channel", CT, CT, compressed(**FP8, strategy="channel"), law=BF),
    Peer("fp8-channel", CT, "ModelOpt", modelopt_fp8(axis=0), halves=False),
    Peer("fp8-tensor", CT, CT, compressed(**FP8, strategy="tensor")),
    Peer("fp8-tensor", CT, CT, compressed(**FP8, strategy="tensor"), law=BF),
    Peer("fp8-tensor", CT, "ModelOpt", modelopt_fp8(), halves=False),
    Peer("int8-channel", CT, CT, compressed(num_bits=8, type="int", strategy="channel")),
    Peer("int8-channel", CT, CT, compressed(num_bits=8, type="int", strategy="channel"), law="int8-bf16/1"),
    Peer("int4-group", CT, CT, compressed(**INT4), {"group": 128}),
    Peer("nvfp4", "modelopt", "ModelOpt", modelopt_nvfp4, halves=False),
    Peer("nvfp4", CT, CT, compressed(**NV)),
    Peer("nvfp4", "modelopt", "torchao", torchao_nvfp4, halves=False),
    Peer("mxfp8", "modelopt", "ModelOpt", modelopt_mx("MXFP8QTensor"), halves=False),
    Peer("mxfp8", CT, CT, compressed(num_bits=8, **MX)),
    Peer("mxfp8", CT, "torchao RCEIL", torchao_mx("fp8", "RCEIL"), halves=False),
    Peer("mxfp8", CT, "torchao FLOOR", torchao_mx("fp8", "FLOOR"), halves=False),
    Peer("mxfp4", CT, "ModelOpt", modelopt_mx("MXFP4QTensor"), halves=False),
    Peer("mxfp4", CT, CT, compressed(num_bits=4, **MX)),
    Peer("mxfp4", CT, "torchao FLOOR", torchao_mx("fp4", "FLOOR"), halves=False),
    Peer("mxfp4", CT, "torchao EVEN", torchao_mx("fp4", "EVEN"), halves=False),
    Peer("mxfp4", CT, "torchao RCEIL", torchao_mx("fp4", "RCEIL"), halves=False),
)


@dataclass
class Count:
    codes: int = 0
    scales: int = 0
    elements: int = 0
    least: float = np.inf
    most: float = 0.0
    where: str = ""

    def add(self, name: str, weights: Any, ours: Made, theirs: Made) -> None:
        nothing = ~weights.astype(bool).reshape(ours.scales.shape[0], ours.group[0], -1, ours.group[1]).any(
            (1, 3)
        )
        self.elements += weights.size
        self.codes += int((ours.codes != theirs.codes).sum())
        self.scales += int(((ours.scales != theirs.scales) & ~nothing).sum())
        our_error = float(((ours.values - weights) ** 2).sum())
        their_error = float(((np.nan_to_num(theirs.values) - weights) ** 2).sum())
        ratio = our_error / their_error if their_error else float(our_error > 0) + 1
        self.least = min(self.least, ratio)
        if ratio > self.most:
            self.most, self.where = ratio, name


def compared(peer: Peer, own: bool) -> Count:
    """own: the tool gets the numbers in their own dtype, BF16 or F16, in place of F32."""
    count = Count()
    for dtype, kind in DTYPES.items():
        if own and (dtype == "f32" or (dtype == "f16" and own_dtypes(peer) == "BF16")):
            continue
        for name, values in kinds(ROWS, COLUMNS):
            strip = source(values, dtype)
            wide = widened(strip)
            theirs = peer.encode(torch.from_numpy(wide.copy()).to(kind if own else torch.float32))
            count.add(f"{name}, {dtype}", wide.astype(np.float64), ours(peer, strip), theirs)
    return count


def rows() -> Iterator[tuple[str, ...]]:
    for peer in PEERS:
        law = f" (`{peer.law}`)" if peer.law else ""
        for own in (True,) if peer.law else (False, True):  # scales in BF16 are for weights in BF16
            count = compared(peer, own)
            yield (
                f"`{peer.form}`{law}",
                f"{peer.tool}{', ' + own_dtypes(peer) + ' as they are' if own else ''}",
                f"{count.codes:,} of {count.elements:,}",
                f"{count.scales:,}",
                f"{count.least:.4g} to {count.most:.6g} ({count.where})",
            )


def own_dtypes(peer: Peer) -> str:
    return "BF16" if peer.law or not peer.halves else "BF16 and F16"


def main() -> int:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print("| format | against | codes unequal | scales unequal | our squared error to theirs |")
    print("|---|---|---:|---:|---|")
    for row in rows():
        print("| " + " | ".join(row) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
