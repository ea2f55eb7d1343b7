"""Parents for the profiles: a small dense model, and one that is block FP8 already, with the recipes that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shardmill.kernels.block_fp8 import encoder
from shardmill.kernels.formats import bf16_to_f32
from tests.pipeline.parents import Tensor, bf16, write_parent

FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
DENSE = {"architectures": ["Dense"], "hidden_size": 256}
NATIVE = {
    **DENSE,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
LINEARS = {"self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "mlp.down_proj": (256, 384)}

HEAD = """\
format = 1
name = "small"
[output]
profile = "{profile}"
[[family]]
name = "rest"
match = ["model.norm.weight", "model.embed_tokens.weight"]
action = "keep"
reason = "no Linear"
"""
LINEAR = """
[[family]]
name = "linears"
match = "model.layers.*.{self_attn,mlp}.*.weight"
action = "quantize"
block = [128, 128]
expect = 6
"""
LM_HEAD = """
[[family]]
name = "head"
match = "lm_head.weight"
action = "keep"
reason = "loaders want floats"
"""


def recipe(profile: str, linears: str = LINEAR, head: str = LM_HEAD) -> str:
    return HEAD.format(profile=profile) + linears + head


def weights() -> dict[str, Tensor]:
    """Two layers of three Linears, an embedding, a norm and a head, all BF16."""
    tensors = {
        f"model.layers.{layer}.{module}.weight": bf16(f"{layer}{module}", *shape)
        for layer in range(2)
        for module, shape in LINEARS.items()
    }
    tensors["model.embed_tokens.weight"] = bf16("embed", 64, 256)
    tensors["model.norm.weight"] = bf16("norm", 256)
    tensors["lm_head.weight"] = bf16("head", 128, 256)
    return tensors


def dense_parent(folder: Path, config: dict[str, Any] = DENSE) -> Path:
    return write_parent(folder, {FILES[0]: weights()}, config=config)


def native_parent(folder: Path, block: int = 128, scale_dtype: str = "F32") -> Path:
    """The same model as block FP8. The scales of layer 1 lie in the other file, beside the head."""
    files: dict[str, dict[str, Tensor]] = {file: {} for file in FILES}
    for name, tensor in weights().items():
        if ".layers." not in name:
            files[FILES[name == "lm_head.weight"]][name] = tensor
            continue
        codes, scales = encoded(tensor, block)
        files[FILES[0]][name] = ("F8_E4M3", tensor[1], codes.tobytes())
        data = (
            scales.tobytes()
            if scale_dtype == "F32"
            else (scales.view(np.uint32) >> 16).astype("<u2").tobytes()
        )
        files[FILES[".layers.1." in name]][f"{name}_scale_inv"] = (scale_dtype, scales.shape, data)
    return write_parent(
        folder,
        files,
        config={
            **NATIVE,
            "quantization_config": {**NATIVE["quantization_config"], "weight_block_size": [block, block]},
        },
    )  # type: ignore[dict-item]


def encoded(tensor: Tensor, block: int, numerics: str = "amax/1") -> tuple[Any, Any]:
    """Codes u8 [R, C] and scales f32 [ceil(R/b), ceil(C/b)] of a BF16 tensor."""
    source = np.frombuffer(tensor[2], np.uint16).reshape(tensor[1])
    codes = np.empty(source.shape, np.uint8)
    scales = np.empty(tuple(-(-side // block) for side in source.shape), np.float32)
    encoder(numerics, (block, block), kernel="numpy").encode(source, codes, scales)
    return codes, scales


def floats(tensor: Tensor) -> Any:
    return bf16_to_f32(np.frombuffer(tensor[2], np.uint16)).reshape(tensor[1])
