"""The parent that every tool is given: a tiny Llama of seeded weights, the same on every machine.

Weights are sums of the generator's integers, so that no library's idea of a normal distribution enters; rows and
columns differ in size, as trained ones do. Needs numpy alone, for a tool's environment has nothing of ours.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, INNER, HEAD, HEADS, LAYERS, WORDS = 128, 256, 64, 2, 1, 128
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD,
    "vocab_size": WORDS, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DTYPES = {"BF16": "bfloat16", "F32": "float32"}
Bits = np.ndarray[Any, Any]


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (WORDS, HIDDEN)
    for layer in range(LAYERS):
        front = f"model.layers.{layer}."
        yield f"{front}input_layernorm.weight", (HIDDEN,)
        for name, rows in (("q", HEAD * HEADS), ("k", HEAD), ("v", HEAD)):
            yield f"{front}self_attn.{name}_proj.weight", (rows, HIDDEN)
        yield f"{front}self_attn.o_proj.weight", (HIDDEN, HEAD * HEADS)
        yield f"{front}post_attention_layernorm.weight", (HIDDEN,)
        yield f"{front}mlp.gate_proj.weight", (INNER, HIDDEN)
        yield f"{front}mlp.up_proj.weight", (INNER, HIDDEN)
        yield f"{front}mlp.down_proj.weight", (HIDDEN, INNER)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (WORDS, HIDDEN)


def weights() -> dict[str, Bits]:
    """name -> f32, each a BF16 value: so the BF16 and the F32 parent are one model."""
    return {name: _rounded(_drawn(place, shape)) for place, (name, shape) in enumerate(shapes())}


def _drawn(place: int, shape: tuple[int, ...]) -> Bits:
    random = np.random.Generator(np.random.PCG64(1000 + place))
    if len(shape) == 1:
        return np.float32(1) + random.integers(-64, 65, shape).astype(np.float32) / np.float32(1024)
    bell = random.integers(-8192, 8193, (12, *shape)).sum(0).astype(np.float32) / np.float32(1 << 20)
    rows = random.integers(96, 161, (shape[0], 1)).astype(np.float32) / np.float32(128)
    columns = random.integers(96, 161, (1, shape[1])).astype(np.float32) / np.float32(128)
    return bell * rows * columns


def _rounded(values: Bits) -> Bits:
    """f32 to the nearest BF16, ties to even, as f32."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def write(folder: Path, dtype: str) -> None:
    """The parent as a folder that transformers opens; `dtype` is BF16 or F32."""
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in weights().items():
        one = (values.view(np.uint32) >> 16).astype("<u2") if dtype == "BF16" else values.astype("<f4")
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + one.nbytes],
        }
        data += one.tobytes()
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "dtype": DTYPES[dtype]}, indent=2))
