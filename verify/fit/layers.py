"""From a model's shape and a preset to the planner's input: page bytes, tokens a block, state pages, strides.

Source: vLLM 0.33.0, `platforms/interface.py` (`_align_hybrid_block_size`), `layers/attention/mla_attention.py` (row
bytes), `models/glm5next/common/attention.py` (pooled index, tail ring) and `mamba/mamba_utils.py` (state shapes).
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd, lcm

from shardmill.verify.fit.cache_dtype import AUTO, served_dtype
from shardmill.verify.fit.families import DRAFTED
from shardmill.verify.fit.planner import LayerCache, ceil_div
from shardmill.verify.fit.preset import KV_DTYPES, ROW_BYTES, STATE_BYTES, Preset
from shardmill.verify.fit.ranks import check_ranks
from shardmill.verify.fit.shape import ConfigError, Gqa, Layer, Linear, Mla, Shape, SparseMla
from shardmill.verify.fit.sparse import sparse_rows

MLA_HYBRID_BLOCK_TOKENS = 128  # FlashInfer's MLA kernels take physical blocks in multiples of 128 tokens
SPARSE_PAGE_ROWS = 64  # the sparse kernels view the pool as pages of 64 rows
INDEX_SCALE_TOKENS = 128  # one f32 scale for each 128 index values
CHECKPOINT_ALIGNMENT = {"kda": 16, "delta net": 64}  # prefill checkpoints lie at multiples of so many tokens
GQA_BLOCK_TOKENS = 16
INDEX_PAGE_STATES = {
    90: (32, 64),
    100: (32, 64),
    120: (64,),
}  # index entries a page of the paged logits kernel holds, by SM

FLOAT_STATES = (
    "kimi_linear",
)  # vLLM sizes their pages by F32 states, whatever the flag says, and then finds them too small


def row_bytes(layer: Mla | SparseMla, preset: Preset) -> int:
    """Bytes of one token's latent row. Packed rows are those of a rung."""
    if isinstance(layer, SparseMla) and sparse_rows(layer, preset).packed:
        return ROW_BYTES[preset.rung]
    return (layer.rank + layer.rope) * (1 if _is_fp8(layer, preset) else 2)


def _is_fp8(layer: Layer, preset: Preset) -> bool:
    """Whether the cache holds FP8. The sparse kernels of SM120 read nothing else: vLLM turns `auto` into FP8 there."""
    return preset.kv_dtype.startswith("fp8") or (isinstance(layer, SparseMla) and preset.sm == 120)


def state_bytes(layer: Linear, preset: Preset) -> int:
    """One recurrent state on a rank: the convolution's window in BF16 and the state matrix."""
    window = layer.conv_kernel - 1 + preset.draft_tokens
    conv = _share(layer.conv_channels, preset, "convolution channels") * window * 2
    heads = _share(layer.value_heads, preset, "linear attention heads")
    state_dtype = layer.state_dtype if preset.state_dtype == "auto" else preset.state_dtype
    return conv + heads * layer.value_dim * layer.key_dim * STATE_BYTES[state_dtype]


def _share(size: int, preset: Preset, what: str) -> int:
    if size % preset.tensor_parallel:
        raise ConfigError(f"{size} {what} do not divide over {preset.tensor_parallel} ranks")
    return size // preset.tensor_parallel


def keeps_checkpoint(layer: Linear, preset: Preset) -> bool:
    """Whether prefill writes states at block boundaries: FlashKDA does, and FlashInfer's kernel for a delta net."""
    if not preset.prefix_caching:
        return False
    if layer.kernel == "delta net":
        return preset.gdn_backend == "flashinfer"
    return layer.bounded_gate and preset.kda_backend == "flashkda"


def state_blocks(layer: Linear, preset: Preset) -> int:
    """State pages that a request holds. Prefix caching keeps one more, a checkpoint of the prefill another."""
    if not preset.prefix_caching:
        return 1 + preset.draft_tokens
    return 2 + preset.draft_tokens + keeps_checkpoint(layer, preset)


def served(shape: Shape, preset: Preset) -> Preset:
    """The preset with the cache dtype that vLLM serves: `auto` is what the checkpoint or its family asks for."""
    kv_dtype = served_dtype(preset.kv_dtype, shape.cache_dtype, shape.model_type, preset.sm)
    return preset if kv_dtype == preset.kv_dtype else replace(preset, kv_dtype=kv_dtype)


def check_planned(shape: Shape, preset: Preset) -> None:
    """Raises ConfigError for a model and card whose plan is not known to equal vLLM's."""
    if preset.kv_dtype == AUTO and shape.cache_dtype not in KV_DTYPES:
        raise ConfigError(
            f"config.json declares a KV cache of {shape.cache_dtype}, which is not planned; "
            "set kv_cache_dtype in the preset"
        )
    if shape.model_type in FLOAT_STATES and preset.state_dtype == "bfloat16":
        raise ConfigError(
            f"mamba_ssm_cache_dtype bfloat16 is not planned for {shape.model_type}: vLLM 0.33.0 does not start with it"
        )
    if preset.draft_tokens and not (shape.draft_layers and shape.model_type in DRAFTED):
        raise ConfigError(
            f"drafts of {shape.model_type} are not planned: config.json must name num_nextn_predict_layers, and the "
            f"family be one of {', '.join(DRAFTED)}; ask without the draft"
        )
    check_ranks(shape, preset)
    preset = served(shape, preset)
    if preset.kv_dtype == "fp8_ds_mla" and shape.sparse is None:
        raise ConfigError("kv_cache_dtype fp8_ds_mla is planned for sparse latent attention alone")
    if preset.kv_dtype == "fp8_e5m2" and any(isinstance(layer, Mla) for layer in shape.layers):
        raise ConfigError(
            "kv_cache_dtype fp8_e5m2 is not planned for latent attention: vLLM 0.33.0 has no backend for it"
        )
    sparse = shape.sparse
    if sparse is None:
        return
    if preset.rung != "stock" and not shape.has_rungs:
        raise ConfigError(
            f"kv layout {preset.rung} is not planned for {shape.model_type}: the runtime patch serves latent rows of "
            "512 values without a rotary part alone; take `stock`"
        )
    if sparse.pool > 1 and preset.sm != 120 and (preset.sm, preset.kv_dtype) != (90, "fp8_ds_mla"):
        raise ConfigError(
            "config.json: pooled sparse layers are planned on SM120, and on SM90 with kv_cache_dtype fp8_ds_mla, "
            f"which vLLM takes with --attention-backend FLASHMLA_SPARSE; here SM{preset.sm} and {preset.kv_dtype!r}"
        )
    sparse_rows(sparse, preset)


def plan_layers(shape: Shape, preset: Preset) -> list[LayerCache]:
    """The cache of every layer that a rank holds, draft layers included where the preset drafts."""
    preset = served(shape, preset)
    layers = [*shape.layers, *(shape.draft_layers if preset.draft_tokens else ())]
    tokens = block_tokens(shape, preset)
    page = state_page(shape, preset, tokens)
    return [cache for layer in layers for cache in _caches(layer, preset, tokens, page)]


def token_bytes(layer: Layer, preset: Preset) -> int:
    """Bytes a token that vLLM sizes blocks by. For latent layers it ignores the packed row: rank + rope values."""
    size = 1 if _is_fp8(layer, preset) else 2
    if isinstance(layer, Mla | SparseMla):
        return (layer.rank + layer.rope) * size
    assert isinstance(layer, Gqa)
    return 2 * max(1, layer.kv_heads // preset.tensor_parallel) * layer.head_dim * size


def block_tokens(shape: Shape, preset: Preset) -> int:
    """Tokens a block: vLLM's 16 or 64; in a hybrid, the least that makes an attention page hold a state."""
    preset = served(shape, preset)
    full = next(layer for layer in shape.layers if not isinstance(layer, Linear))
    latent = isinstance(full, Mla | SparseMla)
    sparse = shape.sparse
    if not shape.is_hybrid:
        return _latent_block(full, preset) if latent else GQA_BLOCK_TOKENS
    linear = next(layer for layer in shape.layers if isinstance(layer, Linear))
    align = MLA_HYBRID_BLOCK_TOKENS if latent else GQA_BLOCK_TOKENS
    if keeps_checkpoint(linear, preset):
        align = lcm(align, CHECKPOINT_ALIGNMENT[linear.kernel])
    tokens = align * ceil_div(state_bytes(linear, preset), align * token_bytes(full, preset))
    kernels = [SPARSE_PAGE_ROWS, sparse.pool * min(INDEX_PAGE_STATES[preset.sm])] if sparse else [1]
    unit = lcm(*kernels)
    return unit * ceil_div(tokens, unit)


def _latent_block(layer: Layer, preset: Preset) -> int:
    """Tokens a block of the MLA backend that vLLM prefers on the card: FlashMLA 64, FlashInfer 32, the others 16."""
    if isinstance(layer, SparseMla):
        return SPARSE_PAGE_ROWS
    return {90: 64 if _is_fp8(layer, preset) else 16, 100: 32, 120: 16}[preset.sm]


def state_page(shape: Shape, preset: Preset, tokens: int) -> int:
    """A state's page, padded to an attention page; 0 without linear layers."""
    if not shape.is_hybrid:
        return 0
    full = next(layer for layer in shape.layers if not isinstance(layer, Linear))
    return tokens * token_bytes(full, preset)


def _caches(layer: Layer, preset: Preset, tokens: int, page: int) -> list[LayerCache]:
    if isinstance(layer, Linear):
        return [LayerCache("state", page, tokens, fixed_blocks=state_blocks(layer, preset))]
    if isinstance(layer, SparseMla):
        return _sparse_caches(layer, preset, tokens)
    window = layer.window if isinstance(layer, Gqa) else None
    held = None if window is None else window - 1 + preset.in_flight_tokens
    size = row_bytes(layer, preset) if isinstance(layer, Mla) else token_bytes(layer, preset)
    return [LayerCache("paged", tokens * size, tokens, tokens_max=held)]


def _sparse_caches(layer: SparseMla, preset: Preset, tokens: int) -> list[LayerCache]:
    """Latent rows, pooled index and, with pooling, the ring of raw keys and gates of the open pool."""
    row = row_bytes(layer, preset)
    entry = layer.index_dim + layer.index_dim // INDEX_SCALE_TOKENS * 4
    page = sparse_rows(layer, preset).page
    caches = [LayerCache("paged", tokens * row, tokens, stride_bytes=page * row or 1)]
    if layer.has_index:
        stride = _index_stride(layer, preset, tokens, entry) if layer.pool > 1 else 1
        caches.append(LayerCache("paged", tokens // layer.pool * entry, tokens, stride_bytes=stride))
    if layer.pool > 1:
        caches.append(_ring(layer, preset))
    return caches


def _index_stride(layer: SparseMla, preset: Preset, tokens: int, entry: int) -> int:
    """Blocks of pooled entries lie whole pages of the kernel apart, unless a block is one such page."""
    page = gcd(layer.pool * max(INDEX_PAGE_STATES[preset.sm]), tokens)
    return 1 if page == tokens else page // layer.pool * entry


def _ring(layer: SparseMla, preset: Preset) -> LayerCache:
    """A ring that outlasts the drafts of one step: a power of two pools, keys and gates in BF16."""
    pools = 1 << (ceil_div(layer.pool + preset.draft_tokens, layer.pool) - 1).bit_length()
    slots = layer.pool * pools
    return LayerCache("ring", slots * 2 * layer.index_dim * 2, slots, fixed_blocks=1)
