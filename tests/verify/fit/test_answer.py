"""The verdict, its reasons, and the published ladder and boots as the model tells them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.verify.fit.answer import GUARD_BYTES, judge, ladder
from shardmill.verify.fit.cards import CARDS, Card
from shardmill.verify.fit.layers import plan_layers
from shardmill.verify.fit.planner import plan_blocks
from shardmill.verify.fit.preset import Preset
from shardmill.verify.fit.published.attempts import mlp_alone, tell
from shardmill.verify.fit.published.boots import BOOTS, GLM_5_3_FLASH_SERVED
from shardmill.verify.fit.scratch import scratch_terms
from shardmill.verify.fit.shape import ConfigError, read_shape
from shardmill.verify.fit.weights import WeightBytes, weights_per_rank
from tests.verify.fit.glm import converted, parent

GIB = 1 << 30
MIB = 1 << 20
SHAPE = read_shape(GLM_5_3_FLASH_SERVED)
CARD = CARDS["rtx-pro-6000"]
PRESETS = Preset(
    "everything",
    tensor_parallel=2,
    max_model_len=524_288,
    utilization=0.95,
    pin=3_390_000_000,
    kv_dtype="fp8",
    kda_backend="triton",
    draft_tokens=1,
    images=1,
    captures=(1, 2),
    rung="8666",
    indexer_mib=64,
)


def weights(headers, preset=PRESETS):
    return weights_per_rank(headers, 2, layers=45, draft=preset.draft_tokens > 0, vision=preset.images > 0)


def card_with_free(free: int, answer_free: int) -> Card:
    more = free - answer_free
    return replace(CARD, total_bytes=CARD.total_bytes + more, free_at_boot=CARD.free_at_boot + more)


def test_the_published_lane_is_too_close_to_call_and_a_lower_rung_fits():
    answer = judge(SHAPE, PRESETS, weights(converted(vision=True)), CARD)
    assert answer.verdict == "too close to call"
    assert 0 < answer.free_low < GUARD_BYTES < answer.free_high
    assert answer.best_rung == "6666f"


def test_the_parent_with_bf16_attention_does_not_fit_even_at_its_best():
    answer = judge(SHAPE, PRESETS, weights(parent()), CARD, block_fp8=False)
    assert answer.verdict == "does not fit"
    assert "even with every term at its low end" in answer.reasons[0]


def test_a_pin_one_byte_too_small_does_not_fit_and_names_the_pin():
    needed = judge(SHAPE, PRESETS, weights(converted(vision=True)), CARD).pin_needed
    roomy = replace(CARD, total_bytes=120 * GIB, free_at_boot=119 * GIB)
    small = judge(SHAPE, replace(PRESETS, pin=needed - 1), weights(converted(vision=True)), roomy)
    exact = judge(SHAPE, replace(PRESETS, pin=needed), weights(converted(vision=True)), roomy)
    assert (small.verdict, exact.verdict) == ("does not fit", "fits")
    assert f"{needed:,} B are needed" in small.reasons[0]
    assert (exact.sequences, exact.max_context) == (1, 526_592)


def test_the_verdict_turns_at_the_guard_and_at_an_empty_card():
    own = weights(converted(vision=True))
    base = judge(SHAPE, PRESETS, own, CARD)
    at = {
        "fits": card_with_free(GUARD_BYTES, base.free_low),
        "too close to call": card_with_free(GUARD_BYTES - 1, base.free_low),
        "does not fit": card_with_free(-1, base.free_high),
    }
    assert {verdict: judge(SHAPE, PRESETS, own, card).verdict for verdict, card in at.items()} == {
        v: v for v in at
    }


@pytest.mark.parametrize(("utilization", "boots"), [(0.988, True), (0.989, False)])
def test_utilisation_from_0989_on_never_boots_pinned_or_not(utilization, boots):
    answer = judge(SHAPE, replace(PRESETS, utilization=utilization), weights(converted(vision=True)), CARD)
    assert CARD.boots(utilization) is boots
    assert any("never boots" in reason for reason in answer.reasons) is not boots


def test_without_a_pin_the_pool_is_a_range_that_utilisation_and_scratch_leave():
    card = replace(CARD, total_bytes=100 * GIB, free_at_boot=99 * GIB)
    answer = judge(SHAPE, replace(PRESETS, pin=None), weights(converted(vision=True)), card)
    scratch = sum(term.high for term in answer.terms)
    assert answer.pool_low == 95 * GIB - answer.weights.total - scratch
    assert answer.pool_high > answer.pool_low


def test_every_scratch_term_says_where_it_comes_from():
    terms = scratch_terms(SHAPE, replace(PRESETS, kda_backend="flashkda"), block_fp8=True)
    assert all(term.source and 0 <= term.low <= term.high for term in terms)
    assert {term.standing for term in terms} == {"derived", "measured by others", "guess"}


def test_the_indexer_is_bounded_by_its_cap_and_not_by_context():
    def indexer(preset: Preset) -> int:
        return sum(
            t.high for t in scratch_terms(SHAPE, preset, block_fp8=True) if t.name.startswith("indexer")
        )

    stock = replace(PRESETS, indexer_mib=0)
    assert indexer(PRESETS) == indexer(replace(PRESETS, max_model_len=1 << 20)) == 64 * MIB
    assert indexer(stock) == (512 + 264) * MIB
    assert indexer(replace(stock, max_model_len=1 << 20)) == (512 + 528) * MIB


def test_only_packed_rows_below_528_bytes_are_restaged():
    def restaged(rung: str) -> bool:
        return any(
            t.name == "rows restaged"
            for t in scratch_terms(SHAPE, replace(PRESETS, rung=rung), block_fp8=True)
        )

    assert [restaged(rung) for rung in ("stock", "8888", "8666", "6666")] == [False, False, True, True]


def test_a_lower_rung_needs_a_smaller_pin_and_never_a_worse_verdict():
    rungs = ladder(SHAPE, PRESETS, weights(converted(vision=True)), CARD)
    assert [r.rung for r in rungs] == ["stock", "8888", "8666", "6666f", "6666"]
    assert [r.pin_needed for r in rungs] == sorted((r.pin_needed for r in rungs), reverse=True)
    order = {"does not fit": 0, "too close to call": 1, "fits": 2}
    assert [order[r.verdict] for r in rungs] == sorted(order[r.verdict] for r in rungs)


def test_every_published_attempt_is_told_as_it_happened():
    told = tell(SHAPE)
    assert [t.attempt.name for t in told] == ["A", "B", "B3", "C1", "C2", "D", "D2", "E2"]
    assert all(t.agrees for t in told)


def test_the_published_pools_come_out_within_two_permille():
    figures = [figure for t in tell(SHAPE) for figure in t.figures if figure[0] == "pool tokens"]
    assert len(figures) == 3
    assert all(predicted == pytest.approx(published, rel=2e-3) for _, predicted, published in figures)


def test_fp8_for_the_mlp_alone_costs_more_than_it_saves():
    """Published: 0.71 GiB saved, 0.80 spent, pool -2.8 %."""
    partial = mlp_alone(SHAPE)
    assert round(partial.saved_bytes / GIB, 2) == 0.71
    assert partial.pool_change == pytest.approx(-0.028, abs=0.002)


@pytest.mark.parametrize("boot", BOOTS, ids=lambda boot: f"{boot.model}: {boot.figure}")
def test_a_published_boot_figure_lies_within_its_known_residual(boot):
    known = {"Qwen3-235B-A22B": 0.0108, "Kimi-Linear-48B-A3B": 0.0009, "GLM-5.2": 0.0069}
    assert abs(boot.residual()[2]) <= known.get(boot.model, 0)


def test_boots_cover_at_least_five_models_of_four_kinds():
    assert len({boot.model for boot in BOOTS}) >= 5
    assert len({boot.kind for boot in BOOTS}) >= 4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8},
            "vocab_size must be a positive integer",
        ),
        ({**GLM_5_3_FLASH_SERVED, "layer_types": ["mystery"]}, "layer_types holds 'mystery'"),
        ({**GLM_5_3_FLASH_SERVED, "num_hidden_layers": 0}, "num_hidden_layers must be a positive"),
        ({**GLM_5_3_FLASH_SERVED, "num_hidden_layers": 10**9}, "at most 4,096"),
        ({**GLM_5_3_FLASH_SERVED, "num_nextn_predict_layers": 10**9}, "at most 4,096"),
        ({**GLM_5_3_FLASH_SERVED, "num_hidden_layers": 44}, "layer_types names 45 layers"),
        ({**GLM_5_3_FLASH_SERVED, "index_kpool": -4}, "pool of SparseMla layers is -4"),
        ({**GLM_5_3_FLASH_SERVED, "layer_types": ["linear_attention"] * 45}, "no attention layer"),
        ({**GLM_5_3_FLASH_SERVED, "linear_attn_config": [1]}, "value of the wrong kind"),
    ],
)
def test_a_config_without_the_cache_layout_is_refused_by_name(config, message):
    with pytest.raises(ConfigError, match=message):
        read_shape({"num_attention_heads": 4, **config})


KEYS = sorted(GLM_5_3_FLASH_SERVED)
NUMBERS = st.integers(-3, 10**6) | st.floats()
VALUES = st.none() | st.booleans() | NUMBERS | st.text(max_size=3) | st.just([]) | st.just({})


@given(
    changes=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3), ranks=st.sampled_from([1, 2, 3, 64])
)
def test_whatever_a_config_says_there_is_a_plan_or_a_sentence(changes, ranks):
    preset = replace(PRESETS, tensor_parallel=ranks)
    try:
        plan = plan_blocks(plan_layers(read_shape({**GLM_5_3_FLASH_SERVED, **changes}), preset))
    except ConfigError:
        return
    assert plan.block_bytes > 0


def test_weights_of_nothing_weigh_nothing():
    assert WeightBytes({}).total == 0
