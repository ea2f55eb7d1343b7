"""Small random models of six architectures as transformers saves them, and their children by init's recipe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.pipeline.init.draft import draft
from shardmill.pipeline.recipe import read as recipes
from shardmill.pipeline.run import build as run
from shardmill.pipeline.run.prepare import prepare
from shardmill.pipeline.stages.job import Checkpoint, Settings, Watch
from shardmill.pipeline.stages.scan import scan

_BASE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
_MOE = {"moe_intermediate_size": 128, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
# vLLM's attention backends fix the latent's size.
_MLA = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {**_MOE, "num_experts": 4},
    "deepseek_v3": {
        **_MOE,
        **_MLA,
        "topk_method": "noaux_tc",
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "q_lora_rank": 128,
    },
    "glm4_moe": {**_MOE, "n_routed_experts": 4, "first_k_dense_replace": 1, "attention_bias": True},
    "kimi_linear": {
        **_MOE,
        **_MLA,
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "mla_use_nope": True,
        "num_shared_experts": 1,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "head_dim": 128,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    },
}


def save(name: str, folder: Path) -> Path:
    """Writes a model of the architecture, its weights random, by save_pretrained."""
    import torch
    import transformers

    config = transformers.CONFIG_MAPPING[name](**{**_BASE, **MODELS[name]})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    randoms = np.random.Generator(np.random.PCG64(list(MODELS).index(name)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(randoms.standard_normal(tuple(parameter.shape)) / 16))
    model.save_pretrained(folder)
    if name == "kimi_linear":
        _published_names(folder / "model.safetensors")
    return folder


def _published_names(file: Path) -> None:
    """transformers 5.24 saves Kimi's dense MLP under block_sparse_moe; the published checkpoints say mlp."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    save_file({published(name): tensor.clone() for name, tensor in tensors.items()}, file, {"format": "pt"})


def published(name: str) -> str:
    """The published name of a tensor that transformers saved."""
    return re.sub(r"block_sparse_moe(?=\.(gate|up|down)_proj\.)", "mlp", name)


def child(parent: Path, out: Path, profile: str, numerics: str | None = None) -> Path:
    """The child of `parent` by the recipe that init drafts for the profile, read by vLLM at least.

    numerics: in place of the draft's `amax-bf16/1`.
    """
    made = draft(scan(Checkpoint(recipes.Recipe.model_construct(), parent)), "small", profile)
    assert made.unknown == ()
    text = made.text.replace("# loaders", "loaders").replace("amax-bf16/1", numerics or "amax-bf16/1")
    out.with_suffix(".toml").write_text(text)
    run.build(prepare(recipes.load(out.with_suffix(".toml")), parent), out, Settings(), Watch())
    return out
