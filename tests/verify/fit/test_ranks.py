"""`fit` refuses by name a number of ranks on which vLLM 0.33.0 does not build the model."""

from __future__ import annotations

import pytest

from shardmill.verify.fit.layers import block_tokens, check_planned, plan_layers
from shardmill.verify.fit.preset import Preset
from shardmill.verify.fit.shape import ConfigError, read_shape

GQA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "vocab_size": 1024,
}


@pytest.mark.parametrize(
    ("changes", "ranks", "why"),
    [
        ({}, 16, "24 attention heads on 16 ranks"),
        ({"num_key_value_heads": 6}, 4, "6 KV heads on 4 ranks"),
        ({"model_type": "gpt_oss"}, 8, "the class of gpt_oss copies none"),
        ({"vision_config": {"num_heads": 12}}, 8, "12 heads of the vision tower on 8 ranks"),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused(changes: dict[str, object], ranks: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_planned(read_shape(GQA | changes), Preset("several", tensor_parallel=ranks))


@pytest.mark.parametrize(("ranks", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_a_rank_holds_its_share_of_kv_heads_or_a_copy_of_one(ranks: int, heads: int) -> None:
    preset = Preset("several", tensor_parallel=ranks, kv_dtype="bfloat16")
    shape = read_shape(GQA)
    check_planned(shape, preset)
    pages = {cache.page_bytes for cache in plan_layers(shape, preset)}
    assert pages == {block_tokens(shape, preset) * heads * 64 * 2 * 2}
