"""A tiny random Llama with a byte tokenizer, and a block-FP8 checkpoint as the F32 numbers that it stores."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

VOCABULARY, HIDDEN, WIDTH, LAYERS, HEADS, KV_HEADS = 256, 256, 512, 4, 4, 2
SUFFIX = "_scale_inv"
DTYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F8_E4M3": ml_dtypes.float8_e4m3fn}
NAMES = {np.dtype(ml_dtypes.bfloat16): "BF16", np.dtype(np.float32): "F32"}


def make_parent(folder: Path) -> None:
    """Weights from integers of PCG64, in BF16; the same bytes everywhere."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.Generator(np.random.PCG64(8))
    tensors = {name: _weight(rng, shape) for name, shape in shapes().items()}
    _write(folder, tensors)
    (folder / "config.json").write_text(json.dumps(config("bfloat16"), indent=1))
    write_tokenizer(folder)


def shapes() -> dict[str, tuple[int, ...]]:
    head = HIDDEN // HEADS
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        found |= {
            p + "input_layernorm.weight": (HIDDEN,),
            p + "post_attention_layernorm.weight": (HIDDEN,),
            p + "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            p + "self_attn.k_proj.weight": (KV_HEADS * head, HIDDEN),
            p + "self_attn.v_proj.weight": (KV_HEADS * head, HIDDEN),
            p + "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            p + "mlp.gate_proj.weight": (WIDTH, HIDDEN),
            p + "mlp.up_proj.weight": (WIDTH, HIDDEN),
            p + "mlp.down_proj.weight": (HIDDEN, WIDTH),
        }
    return found


def _weight(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Norms are one; a matrix is a sum of four integers in [-128, 127], scaled: close to a normal, exact everywhere."""
    if len(shape) == 1:
        return np.ones(shape, ml_dtypes.bfloat16)
    whole = rng.integers(-128, 128, (4, *shape)).sum(axis=0)
    return (whole / (148 * np.sqrt(shape[1])) * 1.6).astype(ml_dtypes.bfloat16)


def config(dtype: str) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": dtype,
    }


def write_tokenizer(folder: Path) -> None:
    """One token a byte: GPT-2's alphabet of 256 printable characters and no merges."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = [i for i in range(256) if i not in plain]
    letters = [chr(i) if i in plain else chr(256 + spare.index(i)) for i in range(256)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {letter: i for i, letter in enumerate(letters)}, "merges": []}
    value = {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(value))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def decode(source: Path, target: Path) -> int:
    """Write `source` as the F32 numbers that it stores; returns how many weights were block FP8.

    A server without FP8 kernels serves these exactly: codes times scales, no further rounding.
    """
    stored: dict[str, np.ndarray] = {}
    for file in sorted(source.glob("*.safetensors")):
        stored |= _read(file)
    target.mkdir(parents=True, exist_ok=True)
    scales = {name.removesuffix(SUFFIX): value for name, value in stored.items() if name.endswith(SUFFIX)}
    tensors = {}
    for name, value in stored.items():
        if not name.endswith(SUFFIX):
            tensors[name] = _decoded(value, scales.get(name))
    _write(target, tensors)
    (target / "config.json").write_text(json.dumps(config("float32"), indent=1))
    write_tokenizer(target)
    return len(scales)


def _decoded(value: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    plain = value.astype(np.float32)
    if scale is None:
        return plain
    rows, columns = (-(-side // count) for side, count in zip(plain.shape, scale.shape, strict=True))
    spread = np.repeat(np.repeat(scale, rows, axis=0), columns, axis=1)
    return plain * spread[: plain.shape[0], : plain.shape[1]]


def _read(file: Path) -> dict[str, np.ndarray]:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = data[8 + length + begin : 8 + length + end]
        found[name] = np.frombuffer(raw, DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


def _write(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, value in tensors.items():
        end = offset + value.nbytes
        header[name] = {
            "dtype": NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(np.ascontiguousarray(value).tobytes() for value in tensors.values())
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
