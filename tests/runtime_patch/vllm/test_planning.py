"""The KV planner, the indexer's chunks and the command line of the real vLLM 0.33.0 against what we say of them."""

import json
from pathlib import Path

import pytest

from shardmill.runtime_patch import presets
from shardmill.runtime_patch.kv_budget import budget

TOKENS = 524_288
ROWS = {"stock": 656, "8888": 528, "8666": 444, "6666f": 432, "6666": 416}
CHECKPOINTS = {"flashkda": 1, "triton": 0}
# Measured bytes a block and bytes that one request needs with a draft and FlashKDA, from earlier runs of the planner.
KNOWN = {
    "stock": (36_022_272, 4_826_984_448),
    "8888": (29_297_664, 3_925_886_976),
    "8666": (25_006_080, 3_450_839_040),
    "6666": (23_721_984, 3_273_633_792),
}


@pytest.fixture(scope="session")
def rank_of_two(tmp_path_factory) -> Path:
    """config.json of the full model with the heads that a rank of two has, and small experts, which cost no rows."""
    from shardmill.pipeline.toy.config import config as toy_config
    from shardmill.pipeline.toy.glm53 import REAL

    config = toy_config(REAL)
    text = config["text_config"]
    text["linear_attn_config"]["num_heads"] = text["num_attention_heads"] = text["num_key_value_heads"] = 32
    text |= {
        "n_routed_experts": 8,
        "moe_intermediate_size": 128,
        "intermediate_size": 256,
        "vocab_size": 1024,
    }
    config.pop("quantization_config", None)
    folder = tmp_path_factory.mktemp("rank_of_two")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("draft", "pool"), [(True, 3_390_000_000), (False, 4_290_000_000)])
def test_budget_is_the_planner(rank_of_two, look, draft, pool):
    """Bytes a block, blocks a request and blocks of the pool are the planner's, for every rung and KDA backend."""
    job = {"checkpoint": str(rank_of_two), "draft": draft, "pin": pool, "rungs": list(ROWS)}
    report = look(job, module="plan_probe", environment={"VLLM_KVQ_TILES": "8888", "FAKE_DEVICE": "meta"})
    assert "error" not in report, report["error"]
    for rung, row_bytes in ROWS.items():
        for backend, checkpoints in CHECKPOINTS.items():
            ours = budget(
                tokens=TOKENS,
                row_bytes=row_bytes,
                pool_bytes=pool,
                ranks=2,
                speculated=int(draft),
                checkpoints=checkpoints,
            )
            theirs = report[f"{rung} {backend}"]
            assert theirs == {
                "block_bytes": ours.block_bytes,
                "need": ours.request_blocks * ours.block_bytes,
                "pool_blocks": ours.pool_blocks if ours.holds else None,
            }, f"{rung} {backend}"
            assert report["block_tokens"] == ours.block_tokens
    if draft:
        assert {r: tuple(report[f"{r} flashkda"][k] for k in ("block_bytes", "need")) for r in KNOWN} == KNOWN


def test_lanes_parse_and_the_indexer_is_cut(child, look):
    """vLLM's own parser takes every preset's command, and its chunker's numbers are those that the presets rest on."""
    commands = {name: presets.command(presets.load(name), str(child))[2:] for name in presets.names()}
    report = look({"checkpoint": str(child), "commands": commands}, module="flags_probe")
    assert "error" not in report, report["error"]
    for name in presets.names():
        serve = presets.load(name).serve
        got = report[name]
        assert got["max_model_len"] == serve["max_model_len"]
        assert got["kv_cache_memory_bytes"] == serve["kv_cache_memory_bytes"]
        assert got["cudagraph_capture_sizes"] == serve["cudagraph_capture_sizes"]
        assert got["kda_prefill_backend"] == serve["kda_prefill_backend"]
        assert got["speculative"] == serve.get("speculative")
    # MiB of logits cap: (chunks, rows a chunk) for 1,024 query tokens over 524,288 of context.
    assert report["chunks"] == {"512": [1, 1024], "128": [4, 256], "64": [8, 128]}
    assert report["stock_gather_bytes"] == 2_097_152 * 132


def test_preflight_accepts_what_it_was_made_for(child, look):
    """In this vLLM preflight applies the ledger, warns of re-rounded scales, and finds no error."""
    report = look({"model": str(child)}, module="preflight_probe")
    states = {state["patch"]["name"]: state["state"] for state in report["states"]}
    assert states["kda-passthrough"] == "applied"
    assert states["rows-sm120"] == "not needed: VLLM_KVQ_TILES is unset"
    assert report["ok"], report["findings"]
    assert {f["subject"] for f in report["findings"] if f["level"] == "warning"} == {
        "VLLM_USE_DEEP_GEMM_E8M0"
    }
