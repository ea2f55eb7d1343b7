"""What is run, and what is compared with what: two tables.

A case is one process: a checkpoint, whether the plugin is there, the plugin's variables, and engine arguments beside
BASE. A pair names two cases and the law that holds between them (judge.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BASE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 16384,
    "max_num_seqs": 20,
    "max_num_batched_tokens": 512,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 6 << 30,
    "limit_mm_per_prompt": {"image": 0, "video": 0},
    "kda_prefill_backend": "triton",
    "enable_prefix_caching": True,
    "gpu_memory_utilization": 0.02,
    "seed": 0,
    "max_logprobs": 20,
    "enable_flashinfer_autotune": False,
    "kernel_config": {"enable_jit_warmup": False, "enable_cutedsl_warmup": False},
    "disable_log_stats": True,
    "attention_backend": "FLASHMLA_SPARSE",
    "kv_cache_dtype": "fp8_ds_mla",
}
GRAPH = {"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 24]}}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


def kvq(**variables: Any) -> dict[str, str]:
    return {f"VLLM_KVQ_{name}": str(value) for name, value in variables.items()}


@dataclass(frozen=True)
class Case:
    """`ordered`: the selected rows are sorted before attention reads them (drive.py says why)."""

    checkpoint: str
    plugin: bool = True
    environ: dict[str, str] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    ordered: bool = True
    trace: bool = False  # asks which module gives other bits for the same input (trace.py), and nothing else
    sleep: int = 0  # put to sleep at this level and woken before it is asked
    audit: int = 0  # MiB: the indexer's choice is compared with its choice at this budget (audit.py)
    latents: bool = False  # keeps latents and queries of its attention (latents.py)
    pictures: bool = False  # asked about drawn pictures too
    ranks: int = 1  # tensor-parallel ranks, a card each
    refused: str = ""  # what the start is refused with


WIDE = {"max_num_batched_tokens": 1024}
# vLLM's own torch attention in the tower, since FlashAttention's extensions are not packed.
SEES = {
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": {"image": 1, "video": 0},
    "mm_encoder_attn_backend": "TORCH_SDPA",
}
CASES: dict[str, Case] = {
    "parent": Case("parent", plugin=False),
    "child": Case("child"),
    "parent again": Case("parent", plugin=False),
    "parent, plugin": Case("parent"),
    "parent, one bit": Case("bit", plugin=False),
    "child V1, graphs": Case("child", environ=V1, engine=GRAPH),
    "child, graphs": Case("child", engine=GRAPH),
    "child 8666, graphs, MTP": Case("child", environ=kvq(TILES="8666"), engine=GRAPH | MTP),
    "child 8666": Case("child", environ=kvq(TILES="8666")),
    "child 6666": Case("child", environ=kvq(TILES="6666")),
    "child, stock indexer": Case("child", environ=kvq(INDEXER_MIB=0)),
    "child 8888": Case("child", environ=kvq(TILES="8888")),
    "decoded child": Case("decoded", plugin=False),
    "child again": Case("child"),
    "parent, traced": Case(
        "parent", plugin=False, engine=WIDE | {"enable_prefix_caching": False}, trace=True
    ),
    "8666, dtype auto": Case(
        "child", environ=kvq(TILES="8666"), engine={"kv_cache_dtype": "auto"}, refused="fp8_ds_mla"
    ),
    "a misspelt variable": Case("parent", environ=kvq(TILE="8666"), refused="VLLM_KVQ_TILE unknown"),
    "child, indexer 6 MiB": Case("child", environ=kvq(INDEXER_MIB=6)),
    "child, vLLM's GEMM": Case("child", environ=kvq(DECODE_GEMM=0)),
    "child V1": Case("child", environ=V1),
    "child 6666f": Case("child", environ=kvq(TILES="6666f")),
    "child 8888-fine": Case("child", environ=kvq(TILES="8888", SCALES="fine")),
    "child 8666-stock": Case("child", environ=kvq(TILES="8666", SCALES="stock")),
    "child 6666-stock": Case("child", environ=kvq(TILES="6666", SCALES="stock")),
    "child 6666f-stock": Case("child", environ=kvq(TILES="6666f", SCALES="stock")),
    "child 8666, graphs": Case("child", environ=kvq(TILES="8666"), engine=GRAPH),
    "child, graphs, MTP": Case("child", engine=GRAPH | MTP),
    "child 6666, sleep": Case(
        "child", environ=kvq(TILES="6666"), engine={"enable_sleep_mode": True}, sleep=1
    ),
    "child 6666, sleep 2": Case(
        "child", environ=kvq(TILES="6666"), engine={"enable_sleep_mode": True}, sleep=2
    ),
    "child, audited": Case("child", audit=6, latents=True),
    "parent, unordered": Case("parent", plugin=False, ordered=False),
    "parent again, unordered": Case("parent", plugin=False, ordered=False),
    "child, no prefix cache": Case("child", engine={"enable_prefix_caching": False}),
    "child, BF16 rows": Case("child", engine={"kv_cache_dtype": "auto"}),
    "child, chunks of 1024": Case("child", engine=WIDE),
    "child 8888, scratch 2 MiB": Case("child", environ=kvq(TILES="8888", STAGE_MIB=2)),
    "child, one bit": Case("child bit"),
    "parent 8888": Case("parent", environ=kvq(TILES="8888")),
    "parent 8666": Case("parent", environ=kvq(TILES="8666")),
    "parent 6666f": Case("parent", environ=kvq(TILES="6666f")),
    "parent 6666": Case("parent", environ=kvq(TILES="6666")),
    "parent, pictures": Case("parent", plugin=False, engine=SEES, pictures=True),
    "parent, one bit, pictures": Case("bit", plugin=False, engine=SEES, pictures=True),
    "decoded child, pictures": Case("decoded", plugin=False, engine=SEES, pictures=True),
    "child, pictures": Case("child", engine=SEES, pictures=True),
    "child, two ranks": Case("child", ranks=2),
    "child 6666, two ranks": Case("child", environ=kvq(TILES="6666"), ranks=2),
    "child again, two ranks": Case("child", ranks=2),
    "child, unordered": Case("child", ordered=False),
    "child again, unordered": Case("child", ordered=False),
    "child, FlashKDA": Case("child", engine={"kda_prefill_backend": "flashkda"}),
}


@dataclass(frozen=True)
class Pair:
    """`law`: "bits" (equal everywhere), "until" (equal before position `least`), "floor" (top-1 at least `least`), or
    "report"."""

    base: str
    test: str
    law: str
    why: str
    least: float = 0.0


PAIRS: tuple[Pair, ...] = (
    Pair("parent", "parent again", "bits", "stock repeats itself once its selected rows are in order"),
    Pair("parent, unordered", "parent again, unordered", "report", "stock as it comes: its own noise"),
    Pair("parent", "parent, plugin", "bits", "the plugin changes nothing for another checkpoint"),
    Pair("parent", "parent, one bit", "floor", "the toy does not amplify: one bit of noise", least=0.95),
    Pair("child", "child again", "bits", "the child repeats itself"),
    Pair("parent", "decoded child", "report", "weights alone: FP8 decoded to BF16, on stock vLLM"),
    Pair("decoded child", "child", "report", "FP8 activations and kernels beside"),
    Pair("parent", "child", "report", "both"),
    Pair("child", "child, one bit", "report", "FP8 activations amplify: the child's own floor"),
    Pair("parent", "parent 8666", "report", "KV layout on BF16 weights, where the floor is lower"),
    Pair("parent", "parent 6666f", "report", "KV layout on BF16 weights"),
    Pair("parent", "parent 6666", "report", "KV layout on BF16 weights"),
    Pair(
        "parent", "parent 8888", "report", "stock rows repacked: prefill is chunked, so FlashMLA splits anew"
    ),
    Pair("child", "child 8888", "report", "the same on the child"),
    Pair("child 8888", "child 8888, scratch 2 MiB", "report", "the scratch's chunks: FlashMLA splits anew"),
    Pair("child", "child 8888-fine", "report", "KV layout"),
    Pair("child", "child 8666", "report", "KV layout"),
    Pair("child", "child 8666-stock", "report", "KV layout"),
    Pair("child", "child 6666f", "report", "KV layout"),
    Pair("child", "child 6666f-stock", "report", "KV layout"),
    Pair("child", "child 6666", "report", "KV layout"),
    Pair("child", "child 6666-stock", "report", "KV layout"),
    Pair("child", "child, BF16 rows", "report", "what stock FP8 rows cost against BF16 rows"),
    Pair("child", "child, stock indexer", "bits", "the bounded indexer selects what vLLM's does"),
    Pair(
        "child",
        "child, indexer 6 MiB",
        "bits",
        "of equal scores the lower pools, whatever the tiles",
    ),
    Pair("child", "child, vLLM's GEMM", "report", "the decode GEMM's order of sums"),
    Pair("child", "child, graphs", "report", "CUDA graphs, V2 runner"),
    Pair("child 8666", "child 8666, graphs", "report", "CUDA graphs with compact rows"),
    Pair("child, graphs", "child, graphs, MTP", "report", "the draft layer: greedy tokens"),
    Pair("child 8666, graphs", "child 8666, graphs, MTP", "report", "the same with compact rows"),
    Pair("child", "child V1", "report", "the V1 runner"),
    Pair("child V1", "child V1, graphs", "report", "PIECEWISE graphs of the V1 runner index too"),
    Pair("child", "child, chunks of 1024", "report", "chunked prefill at another length"),
    Pair(
        "child",
        "child, no prefix cache",
        "until",
        "prefix caching off: no chunk then ends at the last block's end, so the last batches differ",
        least=8192,
    ),
    Pair(
        "child, unordered", "child again, unordered", "report", "without the sort: ours writes pools in order"
    ),
    Pair("child", "child, unordered", "report", "the sort itself: ours writes pools in order"),
    Pair("child 6666", "child 6666, sleep", "bits", "asleep at level 1 and awake again"),
    Pair("child 6666", "child 6666, sleep 2", "bits", "asleep at level 2, weights loaded again"),
    Pair("child", "child, audited", "bits", "watched, the child answers the same"),
    Pair("parent, pictures", "parent, one bit, pictures", "report", "the floor of prompts with a picture"),
    Pair(
        "parent, pictures",
        "decoded child, pictures",
        "report",
        "the vision tower's and the rest's weights alone",
    ),
    Pair("parent, pictures", "child, pictures", "report", "the vision tower in FP8 too"),
    Pair("child", "child, two ranks", "report", "sums are taken in two halves"),
    Pair("child, two ranks", "child again, two ranks", "bits", "two ranks repeat themselves"),
    Pair("child, two ranks", "child 6666, two ranks", "report", "KV layout at two ranks"),
    Pair("child", "child, FlashKDA", "report", "the other KDA prefill"),
)
