"""Bytes of weights on a rank, by vLLM's cutting rules."""

from __future__ import annotations

import pytest

from shardmill.verify.fit.published.attempts import DRAFT_FP8_VISION_GIB, DRAFT_VISION_GIB, TEXT_GIB
from shardmill.verify.fit.weights import WeightsError, rank_bytes, weights_per_rank
from tests.verify.fit.glm import converted, parent

GIB = 1 << 30
L = "model.language_model.layers.4."


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "expected"),
    [
        (L + "self_attn.q_proj.weight", "F8_E4M3", (8192, 4096), 4096 * 4096),
        (L + "self_attn.q_proj.weight_scale_inv", "F32", (256, 128), 128 * 128 * 4),
        (L + "self_attn.o_proj.weight", "F8_E4M3", (4096, 8192), 4096 * 4096),
        (L + "self_attn.o_proj.weight_scale_inv", "F32", (32, 64), 32 * 32 * 4),
        (L + "self_attn.f_a_proj.weight", "BF16", (128, 4096), 128 * 4096 * 2),
        (L + "self_attn.b_proj.weight", "BF16", (64, 4096), 32 * 4096 * 2),
        (L + "self_attn.q_conv1d.weight", "BF16", (8192, 1, 4), 4096 * 4 * 4),
        (L + "self_attn.A_log", "F32", (64,), 32 * 4),
        (L + "self_attn.o_norm.weight", "BF16", (128,), 128 * 2),
        (L + "self_attn.q_a_proj.weight", "BF16", (1536, 4096), 1536 * 4096 * 2),
        (L + "self_attn.indexer.wq_b.weight", "BF16", (4096, 1536), 4096 * 1536 * 2),
        (L + "self_attn.indexer.k_norm.weight", "BF16", (128,), 128 * 4),
        (L + "hc_attn_fn", "BF16", (24, 16384), 24 * 16384 * 4),
        (L + "mlp.gate.weight", "BF16", (288, 4096), 288 * 4096 * 2),
        (L + "mlp.experts.7.down_proj.weight", "U8", (4096, 1024), 4096 * 512),
        (L + "mlp.experts.7.down_proj.weight_scale", "F8_E4M3", (4096, 128), 4096 * 64),
        (L + "mlp.experts.7.gate_proj.weight_scale_2", "F32", (), 4),
        (L + "mlp.shared_experts.up_proj.weight", "BF16", (2048, 4096), 1024 * 4096 * 2),
        ("lm_head.weight", "F8_E4M3", (154_880, 4096), 77_440 * 4096),
        ("model.language_model.embed_tokens.weight", "BF16", (1000, 64), 512 * 64 * 2),
        ("model.visual.blocks.0.attn.qkv.bias", "BF16", (3072,), 1536 * 2),
        ("model.visual.blocks.0.attn.proj.bias", "BF16", (1024,), 1024 * 2),
        ("model.layers.0.mlp.down_proj.weight_scale", "BF16", (4096, 1), 4096 * 2),
        ("model.layers.0.mlp.up_proj.weight_scale", "F32", (1,), 4),
        ("model.layers.0.linear_attn.in_proj_qkvz.weight", "BF16", (512, 64), 256 * 64 * 2),
        ("model.layers.0.linear_attn.conv1d.weight", "BF16", (512, 1, 4), 256 * 4 * 2),
        ("model.visual.downsample.weight", "BF16", (4096, 1024, 2, 2), 4096 * 1024 * 4 * 2),
    ],
)
def test_a_tensor_is_cut_as_vllm_cuts_it_over_two_ranks(name, dtype, shape, expected):
    assert rank_bytes(name, dtype, shape, 2) == expected


def test_keys_and_values_are_repeated_where_ranks_outnumber_their_heads():
    assert (
        rank_bytes("model.layers.0.self_attn.k_proj.weight", "BF16", (256, 64), 8, kv_heads=2) == 128 * 64 * 2
    )


def test_the_published_checkpoints_weigh_what_the_ladder_assumes():
    older, newer = converted(vision=False), converted(vision=True)
    text = weights_per_rank(older, 2, layers=45, draft=False, vision=False).total
    everything = weights_per_rank(older, 2, layers=45, draft=True, vision=True).total
    fp8_vision = weights_per_rank(newer, 2, layers=45, draft=True, vision=True).total
    assert [round(size / GIB, 3) for size in (text, everything, fp8_vision)] == [
        TEXT_GIB,
        DRAFT_VISION_GIB,
        DRAFT_FP8_VISION_GIB,
    ]


def test_published_ledger_differences_come_out_within_their_rounding():
    """Published: draft off -2.01, vision off -0.53, FP8 lm_head -0.29 GiB a rank."""
    older = converted(vision=False)
    with_all = weights_per_rank(older, 2, layers=45, draft=True, vision=True)
    assert with_all.families["draft layer"] / GIB == pytest.approx(2.01, abs=0.05)
    assert with_all.families["vision"] / GIB == pytest.approx(0.53, abs=0.015)
    head = weights_per_rank(parent(), 2, layers=45, draft=True, vision=True).families["lm_head"]
    assert (head - with_all.families["lm_head"]) / GIB == pytest.approx(0.29, abs=0.01)


def test_one_rank_holds_every_byte_of_the_files_but_the_widened_tensors():
    headers = {L + "mlp.down_proj.weight": ("BF16", (64, 32)), L + "hc_ffn_fn": ("BF16", (24, 16))}
    assert weights_per_rank(headers, 1, layers=45, draft=True, vision=True).total == 64 * 32 * 2 + 24 * 16 * 4


def test_rows_that_do_not_divide_name_the_tensor():
    with pytest.raises(WeightsError, match=r"b_proj.*66 does not divide over 4 ranks"):
        rank_bytes(L + "self_attn.b_proj.weight", "BF16", (66, 64), 4)


def test_an_unknown_dtype_names_the_tensor():
    with pytest.raises(WeightsError, match=r"A_log.*'F12'"):
        rank_bytes(L + "self_attn.A_log", "F12", (64,), 2)
