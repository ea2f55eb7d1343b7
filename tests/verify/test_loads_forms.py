"""Forms of vLLM's tables: towers by their sizes, names of lists, renamed scales, dropped and conditional tensors.

Each was seen with the real vLLM 0.33.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardmill.verify.questions.loads_vllm import homeless, modules
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.source import Folder

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
Shapes = dict[str, tuple[str, tuple[int, ...]]]


def checkpoint(kind: str, tensors: Shapes, listed: list[str] | None = None, **more: Any) -> Checkpoint:
    """Opened without a file. listed: modules_to_not_convert under block FP8."""
    quantization = {**FP8, "modules_to_not_convert": listed or []}
    config = {"model_type": kind, "quantization_config": quantization, **more}
    made = Checkpoint(Folder(Path("none")), {}, config=config, quantization=quantization)
    for name, (dtype, shape) in tensors.items():
        made.tensors[name] = Tensor(name, dtype, shape, 0, 0, "model.safetensors")
    return made


@pytest.mark.parametrize(("width", "word"), [(4304, "float"), (256, "garbage")])
def test_a_siglip_mlp_is_quantized_only_where_its_sides_are_multiples_of_64(width, word):
    """Gemma 3's 4,304 is none: vLLM builds it without a config, so BF16 that no list names loads."""
    module = "vision_tower.vision_model.encoder.layers.0.mlp.fc1"
    assert modules(checkpoint("gemma3", {f"{module}.weight": ("BF16", (width, 1152))})) == {module: word}


def test_a_pooling_head_that_vllm_does_not_build_is_passed_over():
    tensors: Shapes = {"vision_tower.vision_model.head.mlp.fc1.weight": ("BF16", (64, 64))}
    assert homeless(checkpoint("gemma3", tensors)) == []


@pytest.mark.parametrize(("bank", "word"), [("block_sparse_moe", "garbage"), ("mlp", "float")])
def test_minimax_experts_are_listed_as_those_of_an_mlp(bank, word):
    tensors: Shapes = {"model.layers.0.block_sparse_moe.experts.0.w2.weight": ("BF16", (256, 128))}
    found = modules(checkpoint("minimax_m2", tensors, [f"model.layers.0.{bank}.experts"]))
    assert found == {"model.layers.0.block_sparse_moe.experts.0.w2": word}


@pytest.mark.parametrize("biased", [False, True])
def test_minimax_has_a_routing_bias_only_where_its_config_says_so(biased):
    name = "model.layers.0.block_sparse_moe.e_score_correction_bias"
    made = checkpoint("minimax_m2", {name: ("F32", (8,))}, use_routing_bias=biased)
    assert homeless(made) == ([] if biased else [name])


def test_the_block_scales_of_mistral_3_are_renamed_away_and_refused():
    module = "language_model.model.layers.0.mlp.down_proj"
    tensors: Shapes = {
        f"{module}.weight": ("F8_E4M3", (256, 512)),
        f"{module}.weight_scale_inv": ("F32", (2, 4)),
    }
    assert modules(checkpoint("mistral3", tensors)) == {module: "refused"}
    llama = {name.removeprefix("language_model."): tensor for name, tensor in tensors.items()}
    assert modules(checkpoint("llama", llama)) == {"model.layers.0.mlp.down_proj": "FP8 [128,128]"}


def test_experts_with_biases_are_refused_under_compressed_tensors():
    bank = "model.layers.0.mlp.experts.down_proj"
    made = checkpoint("gpt_oss", {bank: ("BF16", (4, 256, 128))})
    assert modules(made) == {"model.layers.0.mlp.experts.w2": "garbage"}
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    made.quantization = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": [],
    }
    assert modules(made) == {"model.layers.0.mlp.experts.w2": "refused"}
