"""The sparse MLA backend that vLLM 0.33.0 prefers for a layer, a cache dtype and a card: the rows that it reads.

Source: vLLM 0.33.0, `platforms/cuda.py` (`_get_backend_priorities`) and `v1/attention/backends/mla/*_sparse*.py`
(supported dtypes, `customize_spec`); compared with the real planner by `make vllm-test`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardmill.verify.fit.preset import Preset
from shardmill.verify.fit.shape import ConfigError, SparseMla

FLOATS = ("auto", "bfloat16")
FA4_HEADS = (8, 16)  # of a rank, where vLLM prefers FlashAttention 4 on SM10x
FA4_TOPK_UNIT = 128
SM120_TOPK = 2048
ROW_VALUES = (512, 576)  # latent and rotary part together, as the kernels know them
FLASHINFER_NOPE = (128, 192)  # head sizes without RoPE that FlashInfer's kernel of SM10x takes


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a backend. packed: of FP8 tiles with their scales, not of plain values.

    page: blocks start at multiples of so many rows; 0: anywhere.
    """

    packed: bool
    page: int


def sparse_rows(layer: SparseMla, preset: Preset) -> Rows:
    """The rows of a layer under a preset whose cache dtype is what vLLM serves.

    Raises ConfigError where vLLM has no kernel.
    """
    rows = {90: _sm90, 100: _sm100, 120: _sm120}[preset.sm](layer, preset)
    if rows is None or layer.rank + layer.rope not in ROW_VALUES:
        raise ConfigError(
            f"kv_cache_dtype {preset.kv_dtype} is not planned for sparse layers of {layer.rank} + {layer.rope} values "
            f"and index_topk {layer.topk} on SM{preset.sm}: vLLM 0.33.0 has no attention backend for it"
        )
    return rows


def _sm90(layer: SparseMla, preset: Preset) -> Rows | None:
    if preset.kv_dtype in (
        "fp8",
        "fp8_ds_mla",
    ):  # FlashMLA; pages of 64 rows are whole blocks, unless those are longer
        return Rows(packed=True, page=64 if layer.pool > 1 else 0)
    # FlashAttention, or FlashInfer where the FP8 values are plain.
    return Rows(packed=False, page=1) if preset.kv_dtype in (*FLOATS, "fp8_e4m3") else None


def _sm100(layer: SparseMla, preset: Preset) -> Rows | None:
    if layer.pool > 1:
        return None
    flashinfer = Rows(packed=False, page=32) if layer.nope in FLASHINFER_NOPE else None
    if preset.kv_dtype in FLOATS:
        heads = layer.heads // preset.tensor_parallel
        if heads > max(FA4_HEADS):
            return Rows(packed=False, page=1)  # FlashMLA
        fa4 = heads in FA4_HEADS and layer.topk % FA4_TOPK_UNIT == 0 and (layer.rank, layer.rope) == (512, 64)
        return Rows(packed=False, page=64) if fa4 and flashinfer else flashinfer or Rows(False, 1)
    if preset.kv_dtype == "fp8_ds_mla" or (preset.kv_dtype == "fp8" and flashinfer is None):
        return Rows(packed=True, page=1)  # FlashMLA
    return flashinfer if preset.kv_dtype in ("fp8", "fp8_e4m3") else None


def _sm120(layer: SparseMla, preset: Preset) -> Rows | None:
    """FlashInfer's kernel reads packed rows of 2,048 chosen tokens alone; vLLM makes FP8 of `auto`."""
    if layer.topk != SM120_TOPK:
        return None
    return (
        Rows(packed=True, page=64) if preset.kv_dtype in ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla") else None
    )
