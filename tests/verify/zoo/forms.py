"""Faults of every form's scales, codes and parts, and of floats: what the files alone show."""

from __future__ import annotations

import numpy as np

from tests.verify.zoo.case import Case, changed
from tests.verify.zoo.model import Model, patch
from tests.verify.zoo.published import KV_SCHEME, _cache_scales

DOWN = "model.layers.1.mlp.down_proj"
EXPERT = "model.layers.1.mlp.experts.1."


def _zero(model: Model, *names: str) -> None:
    for name in names:
        model[name].data = bytes(len(model[name].data))


def _dead_expert(model: Model) -> None:
    _zero(model, *(f"{EXPERT}{name}_proj.weight" for name in ("gate", "up", "down")))


def _twin(model: Model) -> None:
    model[f"{DOWN}.weight"].data = model["model.layers.0.mlp.down_proj.weight"].data


def _scaled(model: Model, factor: float, front: str = DOWN) -> None:
    for name in model.names:
        if name.startswith(front) and name.endswith("weight_scale_inv"):
            values = np.frombuffer(model[name].data, "<f4")
            model[name].data = (values * np.float32(factor)).astype("<f4").tobytes()


def _one_scale(model: Model) -> None:
    patch(model[f"{DOWN}.weight_scale_inv"], 4, np.float32(3e38).tobytes())


def _other_state(model: Model) -> None:
    blob = model[f"{DOWN}.weight.quant_state.bitsandbytes__fp4"]
    blob.data = blob.data.replace(b'"shape": [128,', b'"shape": [999,')


def _zero_scale(model: Model) -> None:
    patch(model[f"{DOWN}.weight_scale"], 77, b"\0")


def _zero_block(model: Model) -> None:
    patch(model[f"{DOWN}.weight"], 80, bytes(8))


def _foreign_index(model: Model) -> None:
    blob = model[f"{DOWN}.g_idx"]
    blob.data = (np.frombuffer(blob.data, "<i4") + 1_000).astype("<i4").tobytes()


def _no_cache_scale(model: Model) -> None:
    model.drop("model.layers.1.self_attn.k_proj.k_scale")


def _cache_declared(model: Model) -> None:
    model.quantization["kv_cache_scheme"] = KV_SCHEME


CASES: tuple[Case, ...] = (
    *changed(
        "integrity",
        ("NaN in a norm", "bf16", "nan-value", lambda m: patch(m["model.norm.weight"], 6, b"\xc0\x7f")),
        ("infinity in the head", "bf16", "infinite-value", lambda m: patch(m["lm_head.weight"], 400, b"\x80\xff")),
        ("a matrix of zeros", "bf16", "zero-weight", lambda m: _zero(m, f"{DOWN}.weight")),
        ("codes of zeros", "block fp8", "zero-weight", lambda m: _zero(m, f"{DOWN}.weight")),
        ("a hole of a download", "bf16", "zero-hole",
         lambda m: patch(m["model.embed_tokens.weight"], 1000, bytes(9000))),
        ("a hole in codes", "block fp8", "zero-hole", lambda m: patch(m[f"{DOWN}.weight"], 1000, bytes(9000))),
        ("an expert of zeros", "bf16 moe", "dead-expert", _dead_expert),
        ("an expert of zero codes", "block fp8 moe", "dead-expert", _dead_expert),
        ("a zero block scale over live codes", "nvfp4", "zero-scale", _zero_scale),
        ("a live block scale over zero codes", "nvfp4", "zero-codes", _zero_block),
        ("another table under NF4's codes", "nf4", "table-foreign",
         lambda m: patch(m[f"{DOWN}.weight.quant_map"], 0, np.float32(-0.9).tobytes())),
        ("a state of another shape", "bnb fp4", "table-foreign", _other_state),
        ("a group beyond the last", "gptq", "index-range", lambda m: patch(m[f"{DOWN}.g_idx"], 28, b"\x63\0\0\0")),
        ("group indices of another kind", "gptq", "index-foreign", _foreign_index),
        ("a shape that the packed codes have not", "int4 of 32", "index-range",
         lambda m: patch(m[f"{DOWN}.weight_shape"], 0, b"\7")),
        ("a layer written twice", "block fp8", "twin-weight", _twin),
    ),
    *changed(
        "lint",
        ("a layer without its k_scale", "nvfp4 kv", "kv-scale-missing", _no_cache_scale),
        ("a static cache without scales", "fp8 channel", "kv-scheme-unscaled", _cache_declared),
        ("cache scales that nobody declares", "bf16", "kv-undeclared", _cache_scales("")),
        ("scales times 64 in one weight", "block fp8", "size-outlier", lambda m: _scaled(m, 64)),
        ("scales over 10,000 in one weight", "block fp8", "size-outlier", lambda m: _scaled(m, 1e-4)),
        ("scales over 10,000 in all weights", "block fp8", "size-of-all", lambda m: _scaled(m, 1e-4, "model.")),
        ("one scale of 3e38", "block fp8", "scale-range", _one_scale),
    ),
)  # fmt: skip
