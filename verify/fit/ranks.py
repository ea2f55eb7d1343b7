"""Which numbers of ranks vLLM 0.33.0 builds a model for: heads that every rank can share or hold.

Source: the assertions of `distributed/utils.py` (`divide`) and of each attention class in `model_executor/models`; a
rank that holds fewer than one KV head holds a copy of one.
"""

from __future__ import annotations

from shardmill.verify.fit.preset import Preset
from shardmill.verify.fit.shape import ConfigError, Gqa, Shape

# Their class divides KV heads by ranks and knows no copies.
WITHOUT_COPIES = ("gpt_oss",)


def check_ranks(shape: Shape, preset: Preset) -> None:
    """Raises ConfigError where vLLM does not build the model on so many ranks."""
    ranks = preset.tensor_parallel
    for what, heads in (("attention heads", shape.heads), ("heads of the vision tower", shape.vision_heads)):
        if heads % ranks:
            raise _refused(heads, what, ranks, "each rank must have as many")
    for layer in shape.layers:
        if not isinstance(layer, Gqa):
            continue
        if max(layer.kv_heads, ranks) % min(layer.kv_heads, ranks):
            raise _refused(layer.kv_heads, "KV heads", ranks, "one number must divide the other")
        if layer.kv_heads < ranks and shape.model_type in WITHOUT_COPIES:
            raise _refused(layer.kv_heads, "KV heads", ranks, f"the class of {shape.model_type} copies none")


def _refused(heads: int, what: str, ranks: int, why: str) -> ConfigError:
    return ConfigError(
        f"config.json: {heads} {what} on {ranks} ranks are not planned, because vLLM fails: {why}"
    )
