"""A preset: the flags of one way to serve, read from plain TOML. Presets of this project lie in runtime_patch/presets.

Only the flags that decide memory are read here; the launcher knows the others.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PRESETS_DIR = Path(__file__).resolve().parents[2] / "runtime_patch" / "presets"

# Bytes of one token's latent row in one layer. Stock is vLLM's fp8_ds_mla; the others are named by their four tiles.
ROW_BYTES: Mapping[str, int] = {"stock": 656, "8888": 528, "8666": 444, "6666f": 432, "6666": 416}
COUNT_MAX = 1 << 40
KV_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")
KDA_BACKENDS = ("flashkda", "triton")
GDN_BACKENDS = ("flashinfer", "triton")
STATE_BYTES: Mapping[str, int] = {"auto": 4, "float32": 4, "bfloat16": 2}


class PresetError(ValueError):
    """A preset cannot be used. The message names the file, the key, what was expected and what was found."""


@dataclass(frozen=True, slots=True)
class Preset:
    """The flags that decide memory. `pin` None leaves the pool's size to vLLM's profiler and `utilization`."""

    name: str
    tensor_parallel: int = 1
    max_model_len: int = 131_072
    max_sequences: int = 1
    batched_tokens: int = 1024
    utilization: float = 0.9
    pin: int | None = None
    kv_dtype: str = "auto"
    prefix_caching: bool = True
    kda_backend: str = "flashkda"
    gdn_backend: str = "flashinfer"
    draft_tokens: int = 0
    captures: tuple[int, ...] = (1,)
    images: int = 0
    rung: str = "stock"
    state_dtype: str = "auto"
    indexer_mib: int = 0  # scratch of the plugin's bounded indexer; 0 is vLLM's own, which grows with context
    logits_mib: int = 512  # vLLM's cap on the logits of its own indexer
    stage_mib: int = 64  # scratch into which packed rows are restaged
    sm: int = 120
    async_scheduling: bool = True

    def __post_init__(self) -> None:
        for field, value in (
            ("tensor_parallel_size", self.tensor_parallel),
            ("max_model_len", self.max_model_len),
            ("max_num_seqs", self.max_sequences),
            ("max_num_batched_tokens", self.batched_tokens),
        ):
            if not 1 <= value <= COUNT_MAX:
                raise PresetError(
                    f"{self.name}: {field} must be at least 1 and at most {COUNT_MAX:,}, got {value}"
                )
        for field, value in (("num_speculative_tokens", self.draft_tokens), ("image", self.images)):
            if not 0 <= value <= COUNT_MAX:
                raise PresetError(f"{self.name}: {field} must be 0 to {COUNT_MAX:,}, got {value}")
        if not 0 < self.utilization <= 1:
            raise PresetError(
                f"{self.name}: gpu_memory_utilization must be above 0 and at most 1, got {self.utilization}"
            )
        _one_of(self.name, "kv_cache_dtype", self.kv_dtype, KV_DTYPES)
        _one_of(self.name, "rung", self.rung, ROW_BYTES)
        _one_of(self.name, "kda_prefill_backend", self.kda_backend, KDA_BACKENDS)
        _one_of(self.name, "gdn_prefill_backend", self.gdn_backend, GDN_BACKENDS)
        _one_of(self.name, "mamba_ssm_cache_dtype", self.state_dtype, STATE_BYTES)

    @property
    def in_flight_tokens(self) -> int:
        """Tokens scheduled and not yet settled: two batches under asynchronous scheduling, vLLM's default."""
        return self.batched_tokens * (2 if self.async_scheduling else 1)

    @property
    def decode_tokens(self) -> int:
        """Tokens of a full decode step, the size that CUDA graphs must reach."""
        return self.max_sequences * (1 + self.draft_tokens)


def find_preset(name: str) -> Path:
    """The file of a preset given by name or by path. Raises PresetError naming the presets there are."""
    path = Path(name)
    if path.suffix == ".toml" or "/" in name:
        if path.is_file():
            return path
        raise PresetError(f"{name}: no such preset file")
    path = PRESETS_DIR / f"{name}.toml"
    if path.is_file():
        return path
    known = ", ".join(sorted(p.stem for p in PRESETS_DIR.glob("*.toml"))) or "none"
    raise PresetError(
        f"{name}: no such preset; presets in {PRESETS_DIR}: {known}; or give the path of a .toml file"
    )


def read_preset(path: Path) -> Preset:
    """The preset in a TOML file. Raises PresetError for what is not TOML or of a wrong type."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PresetError(f"{path}: cannot be read as TOML: {error}") from None
    serve, kv, env = _table(path, data, "serve"), _table(path, data, "kv"), _table(path, data, "env")
    rung = str(kv.get("layout", kv.get("rung", "stock")))  # `rung` is the former word
    return Preset(
        name=str(data.get("name", path.stem)),
        tensor_parallel=_integer(path, serve, "tensor_parallel_size", 1),
        max_model_len=_integer(path, serve, "max_model_len", 131_072),
        max_sequences=_integer(path, serve, "max_num_seqs", 1),
        batched_tokens=_integer(path, serve, "max_num_batched_tokens", 1024),
        utilization=_number(path, serve, "gpu_memory_utilization", 0.9),
        pin=_integer(path, serve, "kv_cache_memory_bytes", None)
        if "kv_cache_memory_bytes" in serve
        else None,
        kv_dtype=str(serve.get("kv_cache_dtype", "auto")),
        prefix_caching=bool(serve.get("enable_prefix_caching", True)),
        kda_backend=str(serve.get("kda_prefill_backend", "flashkda")),
        gdn_backend=str(serve.get("gdn_prefill_backend", "flashinfer")),
        draft_tokens=_integer(path, _table(path, serve, "speculative"), "num_speculative_tokens", 0),
        captures=_captures(path, serve),
        images=_integer(path, _table(path, serve, "limit_mm_per_prompt"), "image", 0),
        rung=rung,
        state_dtype=str(serve.get("mamba_ssm_cache_dtype", "auto")),
        indexer_mib=_setting(path, env, "VLLM_KVQ_INDEXER_MIB", 64),
        logits_mib=_setting(path, env, "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", 512),
        stage_mib=_setting(path, env, "VLLM_KVQ_STAGE_MIB", 64),
        async_scheduling=serve.get("async_scheduling", True) is not False,
    )


def override(preset: Preset, **changes: Any) -> Preset:
    """The preset with those flags changed that are not None."""
    return replace(preset, **{name: value for name, value in changes.items() if value is not None})


def _one_of(preset: str, key: str, value: str, known: Mapping[str, Any] | tuple[str, ...]) -> None:
    if value not in known:
        raise PresetError(f"{preset}: {key} must be one of {', '.join(known)}, got {value!r}")


def _table(path: Path, data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise PresetError(f"{path}: [{key}] must be a table, got {value!r}")
    return value


def _setting(path: Path, env: Mapping[str, Any], name: str, default: int) -> int:
    """An integer of the preset's environment, where numbers are written as text."""
    value = str(env.get(name, default))
    if not value.isdigit():
        raise PresetError(f"{path}: env.{name} must be a whole number of MiB, got {value!r}")
    return int(value)


def _number(path: Path, table: Mapping[str, Any], key: str, default: float) -> float:
    value = table.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
        raise PresetError(f"{path}: {key} must be a number, got {value!r}")
    return float(value)


def _captures(path: Path, serve: Mapping[str, Any]) -> tuple[int, ...]:
    value = serve.get("cudagraph_capture_sizes", [1])
    if not isinstance(value, list) or not all(type(size) is int and size > 0 for size in value):
        raise PresetError(
            f"{path}: cudagraph_capture_sizes must be a list of positive numbers, got {value!r}"
        )
    return tuple(value)


def _integer(path: Path, table: Mapping[str, Any], key: str, default: int | None) -> int:
    value = table.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise PresetError(f"{path}: {key} must be an integer, got {value!r}")
    return value
