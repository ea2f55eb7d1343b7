"""The planner's arithmetic against figures of the real vLLM 0.33.0, and the published fork's against its card."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.verify.fit.layers import block_tokens, plan_layers, state_bytes
from shardmill.verify.fit.planner import KvPlan, LayerCache, plan_blocks
from shardmill.verify.fit.preset import ROW_BYTES, Preset
from shardmill.verify.fit.published.boots import GLM_5_3_FLASH_SERVED
from shardmill.verify.fit.published.fork import plan_fork
from shardmill.verify.fit.shape import Linear, read_shape

SHAPE = read_shape(GLM_5_3_FLASH_SERVED)
LONG = 524_288
PIN = 3_390_000_000
PRESETS = Preset("512k", tensor_parallel=2, max_model_len=LONG, kv_dtype="fp8", draft_tokens=1)


def plan(**flags: object) -> KvPlan:
    return plan_blocks(plan_layers(SHAPE, replace(PRESETS, **flags)))


@pytest.mark.parametrize(
    ("rung", "block_bytes", "blocks", "need", "per_token"),
    [
        ("stock", 36_022_272, 134, 4_826_984_448, 9206.7),
        ("8888", 29_297_664, 134, 3_925_886_976, 7488.0),
        ("8666", 25_006_080, 138, 3_450_839_040, 6582.0),
        ("6666", 23_721_984, 138, 3_273_633_792, 6244.0),
    ],
)
def test_a_rung_with_prefix_caching_and_flashkda_costs_what_vllm_says(
    rung, block_bytes, blocks, need, per_token
):
    p = plan(rung=rung)
    assert (p.block_bytes, p.request_blocks(LONG), p.need_bytes(LONG)) == (block_bytes, blocks, need)
    assert round(p.bytes_per_token(LONG), 1) == per_token


@pytest.mark.parametrize(
    ("flags", "per_token"),
    [
        ({"rung": "8666", "prefix_caching": False}, 6200.4),
        ({"rung": "6666", "prefix_caching": False}, 5882.0),
        ({"rung": "8666", "draft_tokens": 0}, 5911.8),
        ({"rung": "6666", "draft_tokens": 0}, 5613.9),
        ({"rung": "8666", "kda_backend": "triton"}, 6391.2),
    ],
)
def test_flags_change_the_bytes_a_token_as_vllm_does(flags, per_token):
    assert round(plan(**flags).bytes_per_token(LONG), 1) == per_token


@pytest.mark.parametrize(("rung", "longest"), [("stock", 348_160), ("8888", 439_552), ("8666", 509_184)])
def test_the_published_pin_admits_these_lengths_at_most(rung, longest):
    assert plan(rung=rung).max_context(PIN, 1 << 20) == longest


def test_the_logged_pool_counts_the_null_block():
    assert plan(rung="6666").pool_tokens(PIN, LONG) == 539_484
    assert plan(rung="8666", prefix_caching=False).pool_tokens(PIN, LONG) == 544_452


def test_the_published_pin_holds_the_long_context_without_flashkdas_checkpoint_only():
    assert plan(rung="8666", kda_backend="triton").pin_bytes(LONG) == 135 * 25_006_080 <= PIN
    assert plan(rung="8666").pin_bytes(LONG) == 3_475_845_120 > PIN


def test_a_block_holds_4352_tokens_and_a_state_of_2195456_bytes():
    linear = next(layer for layer in SHAPE.layers if isinstance(layer, Linear))
    assert block_tokens(SHAPE, PRESETS) == 4352
    assert state_bytes(linear, PRESETS) == 2_195_456
    assert state_bytes(linear, replace(PRESETS, draft_tokens=0)) == 2_170_880


@pytest.mark.parametrize(
    ("rung", "draft", "per_token"),
    [("8666", 1, 6352), ("6666", 1, 6016), ("stock", 0, 8060), ("stock", 1, 8901)],
)
def test_the_forks_formula_gives_the_published_bytes_a_token(rung, draft, per_token):
    preset = replace(PRESETS, rung=rung, draft_tokens=draft)
    assert int(plan_fork(SHAPE, preset).bytes_per_token(LONG)) == per_token


def test_the_forks_measured_8050_bytes_a_token_lie_within_two_permille():
    preset = replace(PRESETS, draft_tokens=0)
    assert plan_fork(SHAPE, preset).bytes_per_token(LONG) == pytest.approx(4_241_026_048 / 526_825, rel=2e-3)


@given(
    rung=st.sampled_from(sorted(ROW_BYTES)),
    pool=st.integers(0, 20_000_000_000),
    caching=st.booleans(),
    draft=st.integers(0, 3),
)
def test_the_longest_context_is_admitted_and_one_token_more_is_not(rung, pool, caching, draft):
    p = plan(rung=rung, prefix_caching=caching, draft_tokens=draft)
    usable = p.pool_blocks(pool) - 1
    longest = p.max_context(pool, 1 << 22)
    assert longest == 0 or p.request_blocks(longest) <= usable
    assert p.request_blocks(longest + 1) > usable


@given(length=st.integers(1, 1 << 20), sequences=st.integers(1, 4))
def test_the_pin_admits_exactly_the_sequences_asked_for(length, sequences):
    p = plan(rung="8666")
    pin = p.pin_bytes(length, sequences)
    assert p.sequences(pin, length) == sequences
    assert p.sequences(pin - 1, length) == sequences - 1


def test_layers_of_equal_pages_are_cut_to_the_smallest_buckets_columns():
    paged = [LayerCache("paged", 1024, 16)] * 10
    states = [LayerCache("state", 1024, 16, fixed_blocks=2)] * 30
    p = plan_blocks([*paged, *states])
    assert [len(group) for group in p.groups] == [10, 10, 10, 10]
    assert p.request_blocks(160) == 10 + 3 * 2


def test_nearly_equal_buckets_are_padded_up_instead():
    p = plan_blocks(
        [*[LayerCache("paged", 64, 16)] * 13, *[LayerCache("paged", 64, 16, tokens_max=128)] * 12]
    )
    assert [len(group) for group in p.groups] == [13, 12]
    assert p.block_bytes == 13 * 64


def test_a_window_stops_taking_blocks_and_keeps_one_for_its_unaligned_start():
    layer = LayerCache("paged", 64, 16, tokens_max=127 + 1024)
    assert layer.blocks(64) == 4 + 1
    assert layer.blocks(1 << 20) == 72 + 1


def test_states_are_cut_by_the_pattern_even_where_more_would_fit_beside_it():
    paged = [
        layer for _ in range(12) for layer in (LayerCache("paged", 640, 16), LayerCache("paged", 64, 16))
    ]
    p = plan_blocks([*paged, *[LayerCache("state", 512, 16, fixed_blocks=2)] * 34])
    assert [len(group) for group in p.groups] == [24, 12, 11, 11]
    assert p.block_bytes == 12 * (640 + 64)


def test_states_never_widen_the_block():
    paged = [
        layer for _ in range(12) for layer in (LayerCache("paged", 640, 16), LayerCache("paged", 64, 16))
    ]
    p = plan_blocks([*paged, *[LayerCache("state", 2048, 16, fixed_blocks=2)] * 34])
    assert len(p.groups) == 1 + 9
    assert p.block_bytes == 12 * (640 + 64)


def test_blocks_start_at_whole_rows_of_every_layer():
    layers = [LayerCache("paged", 6400, 16, stride_bytes=640), LayerCache("paged", 96, 16, stride_bytes=96)]
    p = plan_blocks([*layers, LayerCache("ring", 64, 4, fixed_blocks=1)])
    assert p.block_bytes == 7680 == 4 * 1920
