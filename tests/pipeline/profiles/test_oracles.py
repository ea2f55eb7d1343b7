"""What is built from BF16 weights has the bits of two quantizers that others wrote, read from the published file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.parents import bf16, build, write_parent
from tests.pipeline.profiles.models import FILES, LINEAR, recipe

torch = pytest.importorskip("torch", reason="the oracles are written in torch")
pytest.importorskip("safetensors.torch")


def blocks_of(weight: Any, side: int) -> Any:
    """[R, C] -> [rows of blocks, side, columns of blocks, side], zeros at the ragged edges."""
    R, C = weight.shape
    wide = torch.zeros(-(-R // side) * side, -(-C // side) * side, dtype=weight.dtype)
    wide[:R, :C] = weight
    return wide.view(wide.shape[0] // side, side, wide.shape[1] // side, side)


def slime(weight: Any, side: int) -> tuple[Any, Any]:
    """tools/convert_hf_to_fp8.py, strategy block: amax in BF16 with a floor, then f32."""
    blocks = blocks_of(weight, side)
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=1e-12).float() / 448
    codes = (blocks.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return cropped(codes, weight), scales[:, 0, :, 0]


def modelopt(weight: Any, side: int) -> tuple[Any, Any]:
    """FP8_2D_BLOCKWISE_WEIGHT_ONLY: amax in f32, no clamp."""
    blocks = blocks_of(weight, side)
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True).float() / 448
    return cropped((blocks.float() / scales).to(torch.float8_e4m3fn), weight), scales[:, 0, :, 0]


def cropped(codes: Any, weight: Any) -> Any:
    flat = codes.view(torch.uint8).reshape(codes.shape[0] * codes.shape[1], -1)
    return flat[: weight.shape[0], : weight.shape[1]]


@pytest.mark.parametrize("oracle", [slime, modelopt])
@pytest.mark.parametrize("side", [128, 32])
def test_codes_and_scales_are_those_of_the_oracle(tmp_path: Path, oracle: Any, side: int) -> None:
    from safetensors.torch import load_file

    shapes = {"self_attn.q_proj": (256, 256), "self_attn.k_proj": (200, 130), "mlp.down_proj": (64, 384)}
    weights = {f"model.layers.0.{module}.weight": bf16(module, *shape) for module, shape in shapes.items()}
    rest = {
        "model.norm.weight": bf16("n", 8),
        "model.embed_tokens.weight": bf16("e", 8, 8),
        "lm_head.weight": bf16("h", 8, 8),
    }
    parent = write_parent(tmp_path / "parent", {FILES[0]: {**weights, **rest}}, config={})
    linears = LINEAR.replace("expect = 6", "expect = 3").replace("128, 128", f"{side}, {side}")
    build(parent, tmp_path / "out", recipe("fp8", linears))
    before, after = load_file(parent / FILES[0]), load_file(tmp_path / "out" / FILES[0])
    for name in weights:
        codes, scales = oracle(before[name], side)
        assert torch.equal(after[name].view(torch.uint8), codes)
        assert torch.equal(after[f"{name}_scale_inv"], scales)
