"""One clean checkpoint of each format that the judge knows. No question may find a fault in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import xxhash

from tests.verify.zoo.llama import whole
from tests.verify.zoo.model import Blob, Model, bf16, block_scales, codes, f32, packed, scales

HIDDEN, EXPERTS, VOCAB = 128, 4, 256
LM = "model.language_model."

IGNORE = [
    "lm_head", f"{LM}embed_tokens", "*.mlp.gate", "*.self_attn.*", "*.mlp.shared_experts.*", "*.mlp.gate_proj",
    "*.mlp.up_proj", "*.mlp.down_proj", "*.eh_proj", "model.visual.*",
]  # fmt: skip

Tensors = dict[str, Blob]


def _layer(prefix: str, norm: bool = True) -> Iterator[tuple[str, Blob]]:
    yield f"{prefix}input_layernorm.weight", bf16(f"{prefix}in", HIDDEN)
    for name in ("q", "k", "v"):
        yield f"{prefix}self_attn.{name}_proj.weight", bf16(f"{prefix}{name}", HIDDEN, HIDDEN)
    yield f"{prefix}self_attn.o_proj.weight", bf16(f"{prefix}o", HIDDEN, HIDDEN)


def _dense(prefix: str) -> Iterator[tuple[str, Blob]]:
    for name in ("gate", "up", "down"):
        yield f"{prefix}{name}_proj.weight", bf16(f"{prefix}{name}", HIDDEN, HIDDEN)


def _expert(prefix: str) -> Iterator[tuple[str, Blob]]:
    """gate and up share one global scale, as the fused kernel needs it."""
    for name in ("gate", "up", "down"):
        module = f"{prefix}{name}_proj"
        yield f"{module}.weight", packed(module, HIDDEN, HIDDEN // 2)
        yield f"{module}.weight_scale", block_scales(module, HIDDEN, HIDDEN // 16)
        yield f"{module}.weight_scale_2", scales(prefix + ("down" if name == "down" else "w13"), base=2e-5)


def _moe(prefix: str) -> Iterator[tuple[str, Blob]]:
    yield f"{prefix}gate.weight", bf16(f"{prefix}gate", EXPERTS, HIDDEN)
    yield f"{prefix}gate.e_score_correction_bias", f32(0.5, EXPERTS)
    yield from _dense(f"{prefix}shared_experts.")
    for expert in range(EXPERTS):
        yield from _expert(f"{prefix}experts.{expert}.")


def _vlm() -> Iterator[tuple[str, Blob]]:
    """Two trunk layers (dense, MoE), an MTP layer, one vision block."""
    yield "lm_head.weight", bf16("head", VOCAB, HIDDEN)
    yield f"{LM}embed_tokens.weight", bf16("embed", VOCAB, HIDDEN)
    for layer in range(3):
        prefix = f"{LM}layers.{layer}."
        yield from _layer(prefix)
        yield from _moe(f"{prefix}mlp.") if layer else _dense(f"{prefix}mlp.")
    yield f"{LM}layers.2.eh_proj.weight", bf16("eh", HIDDEN, 2 * HIDDEN)
    yield f"{LM}layers.2.enorm.weight", bf16("enorm", HIDDEN)
    yield f"{LM}layers.2.hnorm.weight", bf16("hnorm", HIDDEN)
    yield f"{LM}norm.weight", bf16("norm", HIDDEN)
    yield "model.visual.blocks.0.attn.qkv.weight", bf16("vqkv", 3 * HIDDEN, HIDDEN)
    yield "model.visual.blocks.0.attn.qkv.bias", bf16("vb", 3 * HIDDEN)
    yield "model.visual.patch_embed.proj.weight", bf16("patch", HIDDEN, 3, 2, 2, 2)


def _split(tensors: Tensors, files: int) -> dict[str, Tensors]:
    names = sorted(tensors)
    step = -(-len(names) // files)
    return {
        f"model-{i + 1:05d}-of-{files:05d}.safetensors": {
            n: tensors[n] for n in names[i * step : (i + 1) * step]
        }
        for i in range(files)
    }


def _config(quantization: dict[str, object] | None, **more: object) -> dict[str, object]:
    text = {
        "num_hidden_layers": 2,
        "hidden_size": HIDDEN,
        "n_routed_experts": EXPERTS,
        "num_nextn_predict_layers": 1,
    }
    config: dict[str, object] = {"model_type": "glm5_next", "text_config": text, **more}
    return config | ({"quantization_config": quantization} if quantization else {})


def nvfp4_parent() -> Model:
    """ModelOpt NVFP4 experts in two shards, their input scales in a third file of another name."""
    tensors = dict(_vlm())
    shards = _split(tensors, 2)
    modules = [name.removesuffix(".weight") for name, blob in tensors.items() if blob.dtype == "U8"]
    shards["model-input-scales.safetensors"] = {
        f"{module}.input_scale": scales(f"{module}.in", base=4e-3) for module in sorted(modules)
    }
    quantization: dict[str, object] = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_scheme": None,
        "ignore": list(IGNORE),
        "producer": {"name": "modelopt", "version": "0.45.0"},
    }
    return Model(shards, _config(quantization), {"tokenizer.json": b"{}"})


CONVERTED = tuple(f"{LM}layers.{layer}.self_attn.{x}_proj" for layer in range(3) for x in "qkvo")


def mixed_child() -> Model:
    """The same with attention in block FP8, MIXED_PRECISION entries, the draft's aliases, and a manifest."""
    model = nvfp4_parent()
    sources: dict[str, str] = {}
    conversions: dict[str, object] = {}
    for module in CONVERTED:
        name, side = f"{module}.weight", 128 if module.endswith("o_proj") else 32
        shard = model.find(name)
        sources[name] = xxhash.xxh3_128_hexdigest(shard[name].data)
        shard[name], shard[f"{name}_scale_inv"] = encoded(shard[name], side)
        conversions[name] = {"family": "attention", "numerics": "amax/1", "block": [side, side]}
    entries = {
        module: {"quant_algo": "FP8_BLOCK", "group_size": 128 if "o_proj" in module else 32}
        for module in CONVERTED
    }
    for name, blob in ((name, model[name]) for name in model.names):
        if blob.dtype == "U8":
            entries[name.removesuffix(".weight")] = {"quant_algo": "NVFP4", "group_size": 16}
    draft = f"{LM}layers.2."
    entries |= {
        f"model.layers.2.{m.removeprefix(draft)}": e for m, e in entries.items() if m.startswith(draft)
    }
    ignore = [pattern for pattern in IGNORE if pattern != "*.self_attn.*"]
    model.quantization.pop("group_size")
    model.quantization.update(quant_algo="MIXED_PRECISION", quantized_layers=entries, ignore=ignore)
    model.manifest = {"sources": sources, "conversions": conversions}
    return model


def encoded(weight: Blob, side: int) -> tuple[Blob, Blob]:
    """Block FP8 by amax/1, by a loop over blocks and a nearest-of-256 search: slow, obvious, for square multiples."""
    values = (np.frombuffer(weight.data, "<u2").astype("<u4") << 16).view("<f4").reshape(weight.shape)
    R, C = weight.shape
    grid = values.reshape(-(-R // side), side, -(-C // side), side)
    amax = np.abs(grid).max(axis=(1, 3))
    scale = np.where(amax == 0, np.float32(1), amax / np.float32(448)).astype("<f4")
    quotient = np.clip(grid / scale[:, None, :, None], -448, 448).reshape(R, C)
    return (
        Blob("F8_E4M3", weight.shape, nearest_e4m3(quotient).tobytes()),
        Blob("F32", scale.shape, scale.tobytes()),
    )


def nearest_e4m3(values: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """Codes of the nearest E4M3 value, ties to the even code, found by search."""
    code = np.arange(127, dtype=np.uint8)
    exponent, mantissa = code >> 3, code & 7
    table = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(float) - 10))
    magnitude = np.abs(values.astype(np.float64))
    upper = np.clip(np.searchsorted(table, magnitude), 1, 126)
    below, above = magnitude - table[upper - 1], table[upper] - magnitude
    take_lower = (below < above) | ((below == above) & ((upper - 1) % 2 == 0))
    found = np.where(take_lower, upper - 1, upper).astype(np.uint8)
    return found | (np.signbit(values).astype(np.uint8) << 7)


def _llama(convert: Callable[[str, Blob], Iterator[tuple[str, Blob]]]) -> Tensors:
    """A small dense decoder whose Linears `convert` turns into their stored tensors."""
    tensors: Tensors = {"model.embed_tokens.weight": bf16("embed", VOCAB, HIDDEN)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, blob in (*_layer(prefix), *_dense(f"{prefix}mlp.")):
            tensors |= dict(convert(name, blob)) if len(blob.shape) == 2 else {name: blob}
    tensors["model.norm.weight"] = bf16("norm", HIDDEN)
    tensors["lm_head.weight"] = bf16("head", VOCAB, HIDDEN)
    return tensors


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": HIDDEN}


def deepseek() -> Model:
    def convert(name: str, blob: Blob) -> Iterator[tuple[str, Blob]]:
        yield name, codes(name, *blob.shape)
        yield f"{name}_scale_inv", scales(name, 1, 1)

    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    return Model(_split(_llama(convert), 2), {**LLAMA, "quantization_config": quantization})


def modelopt_fp8() -> Model:
    def convert(name: str, blob: Blob) -> Iterator[tuple[str, Blob]]:
        module, shared = name.removesuffix(".weight"), name.replace("up_proj", "gate_proj")
        for member in "qkv":
            shared = shared.replace(f"{member}_proj", "q_proj")
        yield name, codes(name, *blob.shape)
        yield f"{module}.weight_scale", scales(name)
        yield f"{module}.input_scale", scales(shared + "in", base=4e-3)

    quantization = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    return Model(_split(_llama(convert), 2), {**LLAMA, "quantization_config": quantization})


def modelopt_pbwo() -> Model:
    def convert(name: str, blob: Blob) -> Iterator[tuple[str, Blob]]:
        yield name, codes(name, *blob.shape)
        yield f"{name}_scale", scales(name, 1, 1, 1, 1)

    quantization = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "ignore": ["lm_head"]}
    return Model(_split(_llama(convert), 1), {**LLAMA, "quantization_config": quantization})


def _compressed(form: str, **weights: object) -> dict[str, object]:
    group = {
        "targets": ["Linear"],
        "weights": {"type": "float", "symmetric": True, **weights},
        "format": form,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def compressed_channel() -> Model:
    def convert(name: str, blob: Blob) -> Iterator[tuple[str, Blob]]:
        yield name, codes(name, *blob.shape)
        yield f"{name}_scale", scales(name, blob.shape[0], 1)

    quantization = _compressed("float-quantized", num_bits=8, strategy="channel")
    return Model(_split(_llama(convert), 1), {**LLAMA, "quantization_config": quantization})


def compressed_block() -> Model:
    def convert(name: str, blob: Blob) -> Iterator[tuple[str, Blob]]:
        yield name, codes(name, *blob.shape)
        yield f"{name}_scale", scales(name, 1, 1)

    quantization = _compressed("float-quantized", num_bits=8, strategy="block", block_structure=[128, 128])
    return Model(_split(_llama(convert), 1), {**LLAMA, "quantization_config": quantization})


def compressed_nvfp4() -> Model:
    """The global scale divides here: 448 * 6 / amax."""

    def convert(name: str, blob: Blob) -> Iterator[tuple[str, Blob]]:
        module, shared = name.removesuffix(".weight"), name.replace("up_proj", "gate_proj")
        for member in "qkv":
            shared = shared.replace(f"{member}_proj", "q_proj")
        yield f"{module}.weight_packed", packed(name, blob.shape[0], blob.shape[1] // 2)
        yield f"{module}.weight_scale", block_scales(name, blob.shape[0], blob.shape[1] // 16)
        yield f"{module}.weight_global_scale", scales(shared, 1, base=6000.0)
        yield f"{module}.input_global_scale", scales(shared + "in", 1, base=300.0)

    quantization = _compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16)
    group = quantization["config_groups"]["group_0"]  # type: ignore[index]
    group["input_activations"] = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
    }
    return Model(_split(_llama(convert), 1), {**LLAMA, "quantization_config": quantization})


def comfy() -> Model:
    def convert(name: str, blob: Blob) -> Iterator[tuple[str, Blob]]:
        module = name.removesuffix(".weight")
        yield name, codes(name, *blob.shape)
        yield f"{module}.scale_weight", scales(name)

    tensors = _llama(convert)
    tensors["scaled_fp8"] = Blob("F8_E4M3", (2,), b"\0\0")
    return Model({"model.safetensors": tensors}, None, indexed=False)


def plain() -> Model:
    return Model(
        {"model.safetensors": _llama(lambda name, blob: iter([(name, blob)]))}, dict(LLAMA), indexed=False
    )


CLEAN: dict[str, Callable[[], Model]] = {
    maker.__name__: maker
    for maker in (
        nvfp4_parent, mixed_child, deepseek, modelopt_fp8, modelopt_pbwo, compressed_channel, compressed_block,
        compressed_nvfp4, comfy, plain, whole,
    )
}  # fmt: skip
