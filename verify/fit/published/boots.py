"""Figures that others have published from vLLM's boot logs, and what this model says to them.

Each row holds the few config keys that decide the cache, the flags, and one logged figure. A log rounds the pool to
0.01 GiB, so a prediction is a range; the residual is zero where the logged figure lies in it. Sources are public
issue threads; where a thread does not print the config, its model's published one was taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardmill.verify.fit.layers import block_tokens, plan_layers
from shardmill.verify.fit.planner import KvPlan, plan_blocks
from shardmill.verify.fit.preset import Preset
from shardmill.verify.fit.shape import Shape, read_shape

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Boot:
    """One published figure. `predict` gives the least and the greatest value that the model allows."""

    model: str
    kind: str
    figure: str
    logged: float
    source: str
    config: Mapping[str, Any]
    preset: Preset
    predict: Callable[[Shape, Preset, KvPlan], tuple[float, float]]

    def residual(self) -> tuple[float, float, float]:
        """(least, greatest, relative distance of the logged figure from that range; 0 inside it)."""
        shape = read_shape(self.config)
        low, high = self.predict(shape, self.preset, plan_blocks(plan_layers(shape, self.preset)))
        nearest = min(max(self.logged, low), high)
        return low, high, (self.logged - nearest) / nearest


def pool_tokens(gib: float) -> Callable[[Shape, Preset, KvPlan], tuple[float, float]]:
    """Logged cache size for a pool printed as `gib`, to two digits."""

    def predict(_: Shape, preset: Preset, plan: KvPlan) -> tuple[float, float]:
        pools = (int((gib - 0.005) * GIB), int((gib + 0.005) * GIB))
        low, high = (plan.pool_tokens(pool, preset.max_model_len) for pool in pools)
        return low, high

    return predict


def need_gib(_: Shape, preset: Preset, plan: KvPlan) -> tuple[float, float]:
    """GiB that one request of the full length needs."""
    need = plan.need_bytes(preset.max_model_len) / GIB
    return need, need


def tokens_a_block(shape: Shape, preset: Preset, _: KvPlan) -> tuple[float, float]:
    tokens = block_tokens(shape, preset)
    return tokens, tokens


def bytes_a_token(_: Shape, preset: Preset, plan: KvPlan) -> tuple[float, float]:
    exact = plan.bytes_per_token(preset.max_model_len)
    return exact, exact


def _gqa(layers: int, kv_heads: int, head_dim: int = 128, kind: str = "qwen3", **more: Any) -> dict[str, Any]:
    base = {
        "model_type": kind,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    return {**base, "num_attention_heads": 64, "hidden_size": 4096, "vocab_size": 151_936, **more}


def _delta_net(layers: int, kv_heads: int, value_heads: int) -> dict[str, Any]:
    linear = {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    interval = {"full_attention_interval": 4, "linear_num_value_heads": value_heads}
    return _gqa(layers, kv_heads, 256, "qwen3_next", **interval, **linear)


KIMI_LINEAR = _gqa(
    27,
    32,
    kind="kimi_linear",
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    linear_attn_config={
        "num_heads": 32,
        "head_dim": 128,
        "kda_layers": [i for i in range(1, 28) if i % 4 and i != 27],
    },
)
GLM_5_2 = _gqa(
    78,
    64,
    kind="glm_moe_dsa",
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    index_topk=2048,
    index_head_dim=128,
    index_topk_freq=4,
    num_nextn_predict_layers=1,
)
GLM_5_3_FLASH = _gqa(
    45,
    64,
    kind="glm5_next_text",
    kv_lora_rank=512,
    qk_rope_head_dim=0,
    index_topk=2048,
    index_head_dim=128,
    index_kpool=4,
    linear_attn_config={"num_heads": 64, "head_dim": 128},
    layer_types=["deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(45)],
)

GLM_5_3_FLASH_SERVED = {
    **GLM_5_3_FLASH,
    "vocab_size": 154_880,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "num_nextn_predict_layers": 1,
    "mhc": True,
    "max_position_embeddings": 1 << 20,
}


# The Qwen3.5 line's config.json asks for f32 states, and vLLM's releases of that time kept no prefill checkpoint.
OLDER_DELTA_NET: Mapping[str, Any] = {"state_dtype": "float32", "gdn_backend": "triton"}


def _old_columns(_: Shape, preset: Preset, plan: KvPlan) -> tuple[float, float]:
    """Until early 2026 vLLM logged (blocks // groups) x tokens a block, here for a pool printed as 2.30 GiB."""
    tokens = plan.groups[0][0].block_tokens
    low, high = (plan.pool_blocks(int(gib * GIB)) // len(plan.groups) * tokens for gib in (2.295, 2.305))
    return low, high


BOOTS: tuple[Boot, ...] = (
    Boot(
        "Qwen3-1.7B",
        "GQA",
        "tokens in 18.78 GiB",
        175_856,
        "vllm-project/vllm#33263",
        _gqa(28, 8),
        Preset("bf16", max_model_len=1024),
        pool_tokens(18.78),
    ),
    Boot(
        "Qwen3-Coder-30B-A3B",
        "GQA",
        "GiB for 262,144 tokens",
        24.0,
        "vllm-project/vllm#34076",
        _gqa(48, 4),
        Preset("bf16", max_model_len=262_144),
        need_gib,
    ),
    Boot(
        "Qwen3-235B-A22B",
        "GQA",
        "tokens in 8.11 GiB, TP 4",
        178_880,
        "vllm-project/vllm#21348",
        _gqa(94, 4),
        Preset("bf16", tensor_parallel=4, max_model_len=40_960),
        pool_tokens(8.11),
    ),
    Boot(
        "Qwen3.6-35B-A3B",
        "gated delta net hybrid",
        "tokens in 5.98 GiB, FP8 cache",
        567_978,
        "noonghunna/club-3090#612",
        _delta_net(40, 2, 32),
        Preset("fp8", max_model_len=131_072, kv_dtype="fp8", **OLDER_DELTA_NET),
        pool_tokens(5.98),
    ),
    Boot(
        "Qwen3.8-27B",
        "gated delta net hybrid",
        "tokens in 4.99 GiB, FP8 cache, TP 2",
        302_921,
        "mitchross/talos-argocd-proxmox#1995",
        _delta_net(64, 4, 48),
        Preset("fp8", tensor_parallel=2, max_model_len=131_072, kv_dtype="fp8", **OLDER_DELTA_NET),
        pool_tokens(4.99),
    ),
    Boot(
        "Qwen3.8-27B",
        "gated delta net hybrid",
        "tokens a block, FP8 cache, TP 2",
        1568,
        "mitchross/talos-argocd-proxmox#1995",
        _delta_net(64, 4, 48),
        Preset("fp8", tensor_parallel=2, max_model_len=131_072, kv_dtype="fp8", **OLDER_DELTA_NET),
        tokens_a_block,
    ),
    Boot(
        "Kimi-Linear-48B-A3B",
        "MLA and KDA hybrid",
        "tokens in 2.30 GiB, TP 2, old log line",
        75_840,
        "vllm-project/vllm#28228",
        KIMI_LINEAR,
        Preset("bf16", tensor_parallel=2, max_model_len=120_000, prefix_caching=False),
        _old_columns,
    ),
    Boot(
        "GLM-5.3-Flash",
        "sparse MLA and KDA hybrid",
        "tokens a block, BF16 cache, TP 4",
        1152,
        "LMCache/LMCache#5042",
        GLM_5_3_FLASH,
        Preset("bf16", tensor_parallel=4, max_model_len=131_072, sm=90),
        tokens_a_block,
    ),
    Boot(
        "GLM-5.2",
        "sparse MLA",
        "bytes a token with its draft layer",
        54_728,
        "local-inference-lab/vllm#82",
        GLM_5_2,
        Preset("fp8", max_model_len=65_536, kv_dtype="fp8", draft_tokens=1),
        bytes_a_token,
    ),
)
