"""A model whose head is its embedding: what the config says of that, and the pair of tensors where both are stored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardmill.verify.formats.linear import FLOATS
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.header import Tensor

EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|embeddings?|shared|embed)\.weight$"
)
TOWER = re.compile(
    r"(^|\.)(vision|visual|audio|vpm|apm|tts|talker|code2wav|tower|encoder|image|speech|siglip|draft|mtp|dflash|eagle)"
)


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that is of the text model; the whole config where there is no such part."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def tied(config: Mapping[str, Any]) -> bool | None:
    """What the config says of tied embeddings, None where it says nothing or two things."""
    said = {
        place["tie_word_embeddings"]
        for place in (config, text_of(config))
        if isinstance(place.get("tie_word_embeddings"), bool)
    }
    return said.pop() if len(said) == 1 else None


def tied_pair(checkpoint: Checkpoint) -> tuple[Tensor, Tensor] | None:
    """(head, embedding) that a tied model stores twice, of one dtype and shape: they must be equal."""
    if tied(checkpoint.config) is not True:
        return None
    tensors = checkpoint.tensors
    head = next((t for n, t in tensors.items() if n.endswith("lm_head.weight")), None)
    embedding = next((t for n, t in tensors.items() if EMBEDDING.search(n) and not TOWER.search(n)), None)
    if head is None or embedding is None or (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return None
    return (head, embedding) if head.dtype in FLOATS else None
