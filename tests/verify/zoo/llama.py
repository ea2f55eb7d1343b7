"""A whole Llama of four layers: a config that states every number, a tokenizer and its settings."""

from __future__ import annotations

import json
from typing import Any

from tests.verify.zoo.model import Model, bf16

HIDDEN, VOCAB = 128, 256
LAYERS = 4
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def whole() -> Model:
    """Four Llama layers with a config that states every number, a tokenizer and its settings."""
    tensors = {
        "model.embed_tokens.weight": bf16("embed", VOCAB, HIDDEN),
        "lm_head.weight": bf16("head", VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}input_layernorm.weight"] = bf16(f"{prefix}in", HIDDEN)
        for name in ("q", "k", "v", "o"):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = bf16(f"{prefix}{name}", HIDDEN, HIDDEN)
        for name in ("gate", "up", "down"):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = bf16(f"{prefix}{name}", HIDDEN, HIDDEN)
    tensors["model.norm.weight"] = bf16("norm", HIDDEN)
    words = {"model": {"type": "BPE", "vocab": {f"t{n}": n for n in range(VOCAB)}, "merges": []}}
    others = {
        "tokenizer.json": json.dumps(words).encode(),
        "tokenizer_config.json": b'{"chat_template": "{{ messages }}"}',
        "generation_config.json": b'{"eos_token_id": 2}',
    }
    return Model({"model.safetensors": tensors}, dict(LLAMA), others, indexed=False)
