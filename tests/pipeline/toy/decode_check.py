"""What each converted family lost: decodes a built toy and compares it with its parent. Shares no code with either.

python tests/toy/decode_check.py PARENT CHILD [bf16]     bf16: round what is decoded, as a parent's BF16 was
"""

import json
import re
import sys
from pathlib import Path

import numpy as np

# The first that matches a weight's name is its family.
FAMILIES = {
    "vision": "visual",
    "lm_head": "lm_head",
    "o_proj": "o_proj",
    "mlp": "mlp",
    "mla": r"q_[ab]_|kv_a",
    "kda": "",
}
MAGNITUDES = [(m + 8 * (e > 0)) * 2.0 ** (max(e, 1) - 10) for e in range(16) for m in range(8)]
E4M3 = np.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], np.float32)
E4M3[[0x7F, 0xFF]] = np.nan


def tensors(folder):
    """name -> (shape, bytes) of every tensor in a folder."""
    found = {}
    for path in Path(folder).glob("*.safetensors"):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            low, high = entry["data_offsets"]
            found[name] = entry["shape"], data[begin + low : begin + high]
    return found


def to_bf16(values):
    """The nearest BF16, ties to even, as f32."""
    bits = values.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).view(np.float32)


def losses(parent, child, rounded=""):
    """Family -> [weights, squared error, squared size], over every weight that the child holds a scale grid of."""
    old, new = tensors(parent), tensors(child)
    sums = {family: [0, 0.0, 0.0] for family in FAMILIES}
    for name in (scale[: -len("_scale_inv")] for scale in new if scale.endswith(".weight_scale_inv")):
        (R, C), codes = new[name]
        (rows, cols), scales = new[f"{name}_scale_inv"]
        scales = np.frombuffer(scales, "<f4").reshape(rows, 1, cols, 1)
        decoded = E4M3[np.frombuffer(codes, np.uint8)].reshape(rows, R // rows, cols, C // cols) * scales
        decoded = to_bf16(decoded) if rounded == "bf16" else decoded
        source = (
            (np.frombuffer(old[name][1], "<u2").astype(np.uint32) << 16)
            .view(np.float32)
            .reshape(decoded.shape)
        )
        family = next(family for family, part in FAMILIES.items() if re.search(part, name))
        terms = 1, np.square(decoded - source).sum(dtype=float), np.square(source).sum(dtype=float)
        sums[family] = [total + term for total, term in zip(sums[family], terms, strict=True)]
    return sums


if __name__ == "__main__":
    for family, (count, lost, whole) in losses(*sys.argv[1:]).items():
        print(f"{family:8} {count:4} weights  {100 * (lost / whole) ** 0.5:.3f} %")
