"""Cases of the cache's dtype: each that a flag can name, and those that a checkpoint declares for itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from shardmill.verify.fit.preset import Preset

Config = dict[str, Any]
Families = dict[str, Callable[[random.Random], Config]]

SPARSE = ("glm_moe_dsa", "deepseek_v32")
OTHERS = ("llama", "gpt_oss", "deepseek_v3", "kimi_linear")
FP8 = {"num_bits": 8, "type": "float", "dynamic": False}
GROUP = {**FP8, "strategy": "tensor", "symmetric": True}
DECLARED: dict[str, Config] = {
    "modelopt, a scheme": {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": ["lm_head"],
        "kv_cache_scheme": FP8,
    },
    "modelopt, an algorithm": {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
        "kv_cache_quant_algo": "FP8",
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP, "input_activations": GROUP}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": GROUP,
    },
}


def dtype_cases(families: Families, cards: tuple[int, ...], first: int) -> Iterator[dict[str, Any]]:
    """Cases from index `first` on, the same ones every time."""
    asked = [
        *((family, sm, dtype, None) for sm in cards for family in SPARSE for dtype in _sparse_dtypes()),
        *(
            (family, sm, dtype, None)
            for sm in cards
            for family in OTHERS
            for dtype in ("bfloat16", "fp8_e5m2")
        ),
        *(
            (family, sm, "auto", of)
            for sm in cards
            for family in ("llama", "gemma2", "deepseek_v3")
            for of in DECLARED
        ),
        *(("qwen3", sm, "bfloat16", "compressed-tensors") for sm in cards),
    ]
    for index, (family, sm, dtype, declared) in enumerate(asked, first):
        yield _case(index, families[family], family, sm, dtype, declared)


def _sparse_dtypes() -> tuple[str, ...]:
    return ("auto", "auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla")


def _case(
    index: int,
    config_of: Callable[[random.Random], Config],
    family: str,
    sm: int,
    dtype: str,
    declared: str | None,
) -> dict[str, Any]:
    rng = random.Random(f"fit dtypes {index}")
    config = config_of(rng)
    if family in SPARSE:
        heads = rng.choice([8, 16, 32, 64])
        config |= {
            "num_hidden_layers": rng.randint(2, 20),
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "qk_nope_head_dim": rng.choice([128, 192]),
        }
    if declared is not None:
        config["quantization_config"] = DECLARED[declared]
    preset = Preset(
        "random",
        max_model_len=rng.randint(2_000, 400_000),
        batched_tokens=rng.choice([512, 1000, 4096, 8192]),
        kv_dtype=dtype,
        prefix_caching=rng.random() < 0.6,
        kda_backend=rng.choice(["flashkda", "triton"]),
        draft_tokens=rng.choice([0, 1, 3]) if family in SPARSE else 0,
        state_dtype=rng.choice(["auto", "float32"]),
        sm=sm,
    )
    pin = rng.randint(2, 60) * 10**9
    return {
        "index": index,
        "family": family,
        "config": config,
        "preset": asdict(preset),
        "row_bytes": 656,
        "pin": pin,
    }
