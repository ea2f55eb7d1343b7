"""Cases of one rank among several: KV heads divided or held by more than one rank, latent rows, shares of a state."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from shardmill.verify.fit.preset import ROW_BYTES, Preset

Config = dict[str, Any]
Families = dict[str, Callable[[random.Random], Config]]

RANKS = (2, 4, 8)
OF_ONE_KIND = (
    *("llama", "qwen3", "glm4_moe", "mixtral", "gemma2", "gemma3_text", "gpt_oss", "cohere2", "qwen2_5_vl"),
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"),
)
HYBRIDS = ("qwen3_next", "kimi_linear", "glm5_next")


def rank_cases(families: Families, cards: tuple[int, ...], first: int) -> Iterator[dict[str, Any]]:
    """Cases from index `first` on: every family on each number of ranks, KV heads fewer and more than ranks in turn."""
    asked = [
        (family, ranks, twice) for ranks in RANKS for family in (*OF_ONE_KIND, *HYBRIDS) for twice in range(2)
    ]
    for index, (family, ranks, twice) in enumerate(asked, first):
        rng = random.Random(f"ranks {family} {ranks} {twice}")
        config = copy.deepcopy(families[family](rng))
        _heads(config.get("text_config", config), ranks, twice)
        if "num_heads" in config.get("vision_config", {}):
            config["vision_config"]["num_heads"] = 8
        preset = Preset(
            "ranks",
            tensor_parallel=ranks,
            max_model_len=rng.choice([8_192, 100_000]),
            batched_tokens=rng.choice([1024, 8192]),
            kv_dtype=rng.choice(["fp8", "auto"]),
            prefix_caching=rng.random() < 0.6,
            kda_backend=rng.choice(["flashkda", "triton"]),
            state_dtype=rng.choice(["auto", "float32"]) if family in HYBRIDS else "auto",
            sm=120 if family == "glm5_next" else cards[index % len(cards)],
        )
        yield {
            "index": index,
            "family": family,
            "config": config,
            "preset": asdict(preset),
            "row_bytes": ROW_BYTES["stock"],
            "pin": 30 * 10**9,
        }


def _heads(text: Config, ranks: int, twice: int) -> None:
    """KV heads at or above the ranks, or fewer; query heads that every rank can share. Latent layers keep theirs."""
    if "kv_lora_rank" in text or "head_dim" not in text:
        return
    heads = ranks // 2 if twice else ranks * 2
    text["num_key_value_heads"] = heads
    text["num_attention_heads"] = max(ranks, heads) * 2
    if "mrope_section" in text.get("rope_scaling", {}):
        text["hidden_size"] = text["num_attention_heads"] * text["head_dim"]
