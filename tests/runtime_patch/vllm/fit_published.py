"""Cases of published models, their config.json as published: keys left out, null, or of another family's habit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardmill.verify.fit.preset import Preset

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published_configs.json").read_text()
)
LONGEST = 100_000


def published_cases(cards: tuple[int, ...], first: int) -> Iterator[dict[str, Any]]:
    """Cases from index `first` on: each model at its longest context, at most LONGEST, on a card in turn."""
    for place, config in enumerate(CONFIGS.values()):
        text = config.get("text_config", config)
        preset = Preset(
            "published",
            max_model_len=min(text.get("max_position_embeddings", LONGEST), LONGEST),
            batched_tokens=2048,
            sm=cards[place % len(cards)],
        )
        yield {
            "index": first + place,
            "family": text["model_type"],
            "config": config,
            "preset": asdict(preset),
            "row_bytes": 656,
            "pin": 30 * 10**9,
        }
