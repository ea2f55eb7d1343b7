"""Our checkpoints under the real vLLM 0.33.0: what loads, what it holds, which kernel runs it."""

import pytest

from tests.runtime_patch.vllm.conftest import Case

BLOCK_128 = {"fused_qkv_a_proj", "q_b_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head", "qkv", "proj"}
# What stock vLLM says to one converted family at a time. MLA's and every o_proj it dequantizes to BF16 instead.
STOCK = {
    "kda": "KeyError: 'layers.0.self_attn.in_proj_qkvbfg_a.weight_scale_inv'",
    "mlp": "KeyError: 'layers.0.mlp.",
    "lm_head": "ValueError: There is no module or parameter named 'lm_head.weight_scale_inv'",
    "vision": "ValueError: There is no module or parameter named 'blocks.0.attn",
    "mla": None,
    "o_proj": None,
}


def kernels_by_leaf(part):
    found = {}
    for module, kernel in part["kernels"].items():
        if kernel != "UnquantizedLinearMethod":
            found.setdefault(module.rsplit(".", 1)[-1], set()).add(kernel)
    return found


def assert_whole(report, parts):
    assert "error" not in report, report["error"]
    for part in parts:
        # The draft shares the target's embedding, so it loads none of its own.
        assert report[part]["missing"] == (["model.embed_tokens.weight"] if part == "draft" else [])
        assert report[part]["wrong"] == {}
        assert report[part]["loaded"]


def test_stock_fails_family_by_family(parent, child, look):
    """Without the plugin vLLM refuses four of the six families, each with the error that users report."""
    report = look({"checkpoint": str(child), "parent": str(parent)}, module="families_probe", plugin=False)
    assert set(report) == set(STOCK), report
    for family, expected in STOCK.items():
        got = report[family]
        assert got is None if expected is None else got.startswith(expected), f"{family}: {got}"


@pytest.mark.parametrize(
    ("card", "e8m0", "expected"),
    [
        ("12,0", "1", "DeepGemmFp8BlockScaledMMKernel"),
        ("12,0", "0", "CutlassFp8BlockScaledMMKernel"),
        ("9,0", "0", "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"),
    ],
)
def test_loads_bit_for_bit(child, look, card, e8m0, expected):
    """Every parameter of model, vision and draft is loaded with the checkpoint's bits, and has the right kernel."""
    engine = {"attention_backend": "FLASHMLA_SPARSE", "kv_cache_dtype": "fp8_ds_mla"} if card == "9,0" else {}
    environment = {"VLLM_USE_DEEP_GEMM_E8M0": e8m0, "VLLM_KVQ_TILES": "8666"}
    job = {"checkpoint": str(child), "draft": True, "parts": ["main", "draft"], "engine": engine}
    report = look(job, card=card, environment=environment)
    assert_whole(report, ["main", "draft"])
    card_name = "Sm90" if card == "9,0" else "Sm120"
    rows = f"Compact{card_name}Backend Compact{card_name}Impl 8666-fine"
    assert report["main"]["seams"] == report["draft"]["seams"] == ["BoundedIndexer bounded=True", rows]
    kernels = kernels_by_leaf(report["main"])
    assert kernels.pop("embed_tokens") == {"UnquantizedEmbeddingMethod"}
    assert kernels.pop("in_proj_qkvbfg_a") == {"BlockGemmKernel"}
    assert kernels.pop("routed_experts") == {"ModelOptNvFp4FusedMoE"}
    assert kernels == {leaf: {expected} for leaf in BLOCK_128}


def test_two_ranks_hold_their_shares(child, tmp_path):
    """At tensor-parallel size 2 each rank holds exactly its share of every tensor."""
    job = {"checkpoint": str(child), "draft": True, "parts": ["main", "draft"], "ranks": 2}
    job["meeting"] = str(tmp_path / "meeting")
    running = []
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        running.append(Case(job | {"rank": rank}).start(tmp_path / str(rank)))
    reports = [one.report() for one in running]
    for report in reports:
        assert_whole(report, ["main", "draft"])
    assert reports[0]["main"]["digest"] != reports[1]["main"]["digest"]


@pytest.mark.parametrize("view", ["stored", "unquantized"])
def test_neutral_elsewhere(parent, look, view):
    """An NVFP4 and an unquantized checkpoint get the same classes and bits with and without the plugin."""
    job = {"checkpoint": str(parent), "view": view}
    with_plugin, without = look(job), look(job, plugin=False)
    assert_whole(with_plugin, ["main"])
    assert with_plugin["plugin"] == {}  # it was called, and applied nothing
    assert without["plugin"] is None
    assert with_plugin["main"] == without["main"]


def test_a_layout_that_would_be_ignored_stops_the_start(child, look):
    """On SM90 vLLM's default backend stores its own rows: asking for a KV layout there is an error."""
    job = {"checkpoint": str(child), "parts": ["main"]}
    report = look(job, card="9,0", environment={"VLLM_KVQ_TILES": "8666"})
    assert "PatchError: VLLM_KVQ_TILES is set, but the attention backend" in report["error"]


def test_a_layout_needs_its_dtype(child, look):
    """On SM90 FlashMLA with the default KV dtype would read our rows as BF16: an error at start."""
    job = {"checkpoint": str(child), "parts": ["main"]}
    job["engine"] = {"attention_backend": "FLASHMLA_SPARSE", "kv_cache_dtype": "auto"}
    report = look(job, card="9,0", environment={"VLLM_KVQ_TILES": "8666"})
    assert "compact rows need --kv-cache-dtype fp8_ds_mla" in report["error"]


def test_an_unknown_layout_stops_the_start(child, look):
    """A KV layout that does not exist is an error before anything is built."""
    report = look({"checkpoint": str(child)}, environment={"VLLM_KVQ_TILES": "7777"})
    assert report["error"].startswith("PatchError: VLLM_KVQ_TILES='7777' is unknown")
