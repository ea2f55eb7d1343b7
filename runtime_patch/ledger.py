"""Every place where the plugin meets vLLM, as rows of one table.

A *hook* is an extension point that vLLM offers; a *wrap* replaces a function by one that calls it. Each row
names the definitions it leans on with the fingerprint they had in the release that was read and tried. Another
fingerprint is a refusal: vLLM changed there, so somebody has to read it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardmill.runtime_patch.fingerprint import fingerprint

VLLM = "0.33.0"

Kind = Literal["hook", "wrap"]


@dataclass(frozen=True, slots=True)
class Patch:
    """One seam. `expects` maps "file:definition" below vLLM's folder to its fingerprint."""

    name: str
    kind: Kind
    target: str
    why: str
    upstream: str
    remove_when: str
    expects: dict[str, str]


_ISSUE = "https://github.com/vllm-project/vllm/issues/53906"
_NONE = "none yet"
_GLM = "models/glm5next/common"
_QUANT = "model_executor/layers/quantization"
_LAYERS = "model_executor/layers"
_MLA = "v1/attention/backends/mla"

LEDGER: tuple[Patch, ...] = (
    Patch(
        name="mixed-precision",
        kind="hook",
        target="register_quantization_config('modelopt_mixed')",
        why="FP8_BLOCK entries are unknown to vLLM, which then builds the layer unquantized",
        upstream=_NONE,
        remove_when="MIXED_PRECISION dispatches block FP8 with a block per layer",
        expects={
            f"{_QUANT}/__init__.py:register_quantization_config": "e4605fc9acf3d466",
            f"{_QUANT}/modelopt.py:ModelOptMixedPrecisionConfig": "6dc5fb38287fb6fb",
            f"{_QUANT}/modelopt.py:ModelOptQuantConfigBase": "8227385df210498c",
            "model_executor/model_loader/weight_utils.py:get_quant_config": "26c9efd336aaa53c",
        },
    ),
    Patch(
        name="block-linear",
        kind="hook",
        target="register_weight_loader_v2_supported_method, init_fp8_linear_kernel(force_kernel=)",
        why="[32,32] weights go to Marlin or Humming, which cannot run them; lm_head's scales have no loader",
        upstream=_NONE,
        remove_when="vLLM picks a kernel that runs [32,32] and ParallelLMHead loads block scales",
        expects={
            f"{_QUANT}/fp8.py:Fp8LinearMethod.create_weights": "97e3b90bf255f5c1",
            f"{_QUANT}/utils/fp8_utils.py:create_fp8_scale_parameter": "f53911730ef512b1",
            f"{_QUANT}/fp8.py:Fp8LinearMethod.process_weights_after_loading": "7d1780ab4d1f36cc",
            "model_executor/kernels/linear/__init__.py:init_fp8_linear_kernel": "24a079babfc7287d",
            "model_executor/kernels/linear/scaled_mm/triton.py:TritonFp8BlockScaledMMKernel": "bbb22bf19d2931f3",
            f"{_LAYERS}/vocab_parallel_embedding.py:VocabParallelEmbedding.weight_loader": "2babf1ee778337f6",
        },
    ),
    Patch(
        name="mla-passthrough",
        kind="wrap",
        target="Glm5NextMLAAttention.__init__",
        why="its caller passes quant_config=None, so q_a, kv_a, q_b and o_proj are held as BF16",
        upstream=_ISSUE,
        remove_when="the model passes its quant_config on",
        expects={f"{_GLM}/attention.py:Glm5NextMLAAttention.__init__": "810f4a35aa3a8124"},
    ),
    Patch(
        name="kda-passthrough",
        kind="wrap",
        target="Glm5NextLinearAttention.__init__",
        why="it hides quant_config while it is built, so the scales of q,k,v,b,f_a,g_a have no parameter",
        upstream=_ISSUE,
        remove_when="the model passes its quant_config on",
        expects={f"{_GLM}/kda.py:Glm5NextLinearAttention.__init__": "937011920a71a9c6"},
    ),
    Patch(
        name="vision-passthrough",
        kind="wrap",
        target="Glm5NextVisionTransformer.__init__",
        why="its caller passes quant_config=None, so the tower's scales have no parameter",
        upstream=_ISSUE,
        remove_when="the model passes its quant_config on",
        expects={f"{_GLM}/multimodal.py:Glm5NextVisionTransformer.__init__": "d34e72e07622f2fe"},
    ),
    Patch(
        name="tuned-configs",
        kind="wrap",
        target="get_w8a8_block_fp8_configs",
        why="vLLM looks for tuned block-FP8 configs in its own folder alone and ships none for [32,32]",
        upstream=_NONE,
        remove_when="VLLM_TUNED_CONFIG_FOLDER holds for block FP8",
        expects={
            f"{_QUANT}/utils/fp8_utils.py:get_w8a8_block_fp8_configs": "38c52374b858b08a",
            f"{_QUANT}/utils/fp8_utils.py:w8a8_triton_block_scaled_mm": "09685c8d69ec2daf",
        },
    ),
    Patch(
        name="rows-sm120",
        kind="hook",
        target="register_backend(FLASHINFER_MLA_SPARSE_SM120)",
        why="rows of 528, 444, 432 or 416 B in the KV cache, restaged for the untouched attention kernel",
        upstream=_NONE,
        remove_when="FlashInfer reads compact rows itself",
        expects={
            f"{_MLA}/flashinfer_mla_sparse_sm120.py:FlashInferMLASparseSM120Impl": "7c1c0571fb495d49",
            f"{_MLA}/flashinfer_mla_sparse.py:FlashInferMLASparseSM120Backend": "187cbd7dde73e215",
            f"{_MLA}/sparse_utils.py:flat_kv_row_view": "dcfee44c5158d9c2",
            "v1/attention/backend.py:MLAAttentionImpl.do_kv_cache_update": "785150a3f6e88b8c",
        },
    ),
    Patch(
        name="rows-sm90",
        kind="hook",
        target="register_backend(FLASHMLA_SPARSE)",
        why="the same rows under FlashMLA, with decode and prefill on one path",
        upstream=_NONE,
        remove_when="FlashMLA reads compact rows itself",
        expects={
            f"{_MLA}/flashmla_sparse.py:FlashMLASparseImpl": "92d4ee89667dc88a",
            f"{_MLA}/flashmla_sparse.py:FlashMLASparseMetadataBuilder": "9c14c409aa0a1b4c",
            f"{_MLA}/flashmla_sparse.py:FlashMLASparseBackend": "27ba3f0939739372",
            f"{_MLA}/flashmla_sparse.py:get_prefill_workspace_size": "9b8b7740262dc67a",
            "v1/worker/workspace.py:WorkspaceManager": "045910b9b749d30a",
        },
    ),
    Patch(
        name="bounded-indexer",
        kind="hook",
        target="CustomOp.register_oot('SparseAttnIndexerKpool')",
        why="logits and gathered keys of a prefill grow with the context",
        upstream=_NONE,
        remove_when="the indexer tiles the context itself",
        expects={
            "models/glm5next/nvidia/sparse_indexer.py:sparse_attn_indexer_kpool": "b81a06793754d45a",
            "models/glm5next/nvidia/sparse_indexer.py:SparseAttnIndexerKpool": "ec0182e900fd1096",
            f"{_MLA}/indexer.py:DeepseekV32IndexerPrefillChunkMetadata": "553b01faff2365a5",
            f"{_LAYERS}/sparse_attn_indexer.py:_reserve_row_shard_exchange_transient": "88f9d793a52fdb6f",
            "compilation/breakable_cudagraph.py:eager_break_during_capture": "e44cabf6e2878d0b",
        },
    ),
    Patch(
        name="environment",
        kind="hook",
        target="vllm.envs.environment_variables",
        why="VLLM_KVQ_* must be known names, and part of the key of compiled graphs",
        upstream=_NONE,
        remove_when="never; it is this plugin's own",
        expects={"envs.py:compile_factors": "b12b8aa4922f892a"},
    ),
)


def mismatches(root: Path, patches: tuple[Patch, ...] = LEDGER) -> list[str]:
    """A sentence for each definition below vLLM's folder `root` that is not the one that was read."""
    found = []
    for patch in patches:
        for target, expected in patch.expects.items():
            got = fingerprint(root, target)
            if got != expected:
                found.append(f"{patch.name}: {target} is {got or 'gone'}, expected {expected}")
    return found
