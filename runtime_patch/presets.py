"""Serving presets: data files of flags that are known to belong together, checked before they start.

A preset is a TOML file (runtime_patch/presets). `[serve]` holds vLLM's flags with underscores for dashes, `[kv]` the
row, `[env]` the environment, `[explain]` one sentence for each flag. Anything unknown is refused.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.runtime_patch import settings
from shardmill.runtime_patch.errors import PresetError
from shardmill.runtime_patch.kv_budget import STOCK_ROW_BYTES, Budget, budget

FOLDER = Path(__file__).parent / "presets"
STOCK = "stock"
RANKS = (
    1,
    2,
)  # at four ranks b_proj has 16 rows, less than its block of 32, and lm_head's rows are no whole blocks
KDA_CHECKPOINTS = {"flashkda": 1, "triton": 0}
_TABLES = {"name", "summary", "serve", "kv", "env", "explain"}
_NEEDED = (
    "tensor_parallel_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "kv_cache_dtype",
    "enable_prefix_caching",
    "kda_prefill_backend",
    "cudagraph_capture_sizes",
)


@dataclass(frozen=True, slots=True)
class Preset:
    """A preset as its file says. `serve` maps flag names to values; `speculated` is 0 without a draft."""

    name: str
    summary: str
    serve: Mapping[str, Any]
    rung: str
    scales: str
    env: Mapping[str, str]
    explain: Mapping[str, str]

    @property
    def speculated(self) -> int:
        return int(self.serve.get("speculative", {}).get("num_speculative_tokens", 0))

    @property
    def row_bytes(self) -> int:
        if self.rung == STOCK:
            return STOCK_ROW_BYTES
        from shardmill.kernels.kv_row import RowLayout

        return RowLayout.parse(self.rung).row_bytes

    @property
    def budget(self) -> Budget:
        """What the planner makes of the preset's pin."""
        return budget(
            tokens=self.serve["max_model_len"],
            row_bytes=self.row_bytes,
            pool_bytes=self.serve["kv_cache_memory_bytes"],
            ranks=self.serve["tensor_parallel_size"],
            speculated=self.speculated,
            checkpoints=KDA_CHECKPOINTS[self.serve["kda_prefill_backend"]],
        )

    @property
    def environment(self) -> dict[str, str]:
        """The preset's variables, the rung's among them."""
        rows = {} if self.rung == STOCK else {settings.TILES: self.rung, settings.SCALES: self.scales}
        return rows | dict(self.env)


def names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def load(name_or_path: str) -> Preset:
    """A preset by name or by the path of its file, checked. Raises PresetError with every problem found."""
    path = Path(name_or_path) if name_or_path.endswith(".toml") else FOLDER / f"{name_or_path}.toml"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PresetError(
            f"no preset {name_or_path!r}; known presets: {', '.join(names())}, or a path to a .toml"
        ) from error
    try:
        preset = _preset(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise PresetError(f"{path}: not a preset file: {error}") from error
    if problems := check(preset):
        raise PresetError("\n".join(f"{path}: {problem}" for problem in problems))
    return preset


def _preset(table: Mapping[str, Any]) -> Preset:
    if unknown := set(table) - _TABLES:
        raise KeyError(f"unknown table {', '.join(sorted(unknown))}")
    if missing := [key for key in _NEEDED if key not in table["serve"]]:
        raise KeyError(f"[serve] lacks {', '.join(missing)}")
    return Preset(
        name=table["name"],
        summary=table["summary"],
        serve=table["serve"],
        rung=table["kv"]["rung"],
        scales=table["kv"]["scales"],
        env=table.get("env", {}),
        explain=table["explain"],
    )


def check(preset: Preset) -> list[str]:
    """Every reason why the preset would not start, or not keep its promise; empty where there is none."""
    problems = []
    serve = preset.serve
    if preset.rung not in (STOCK, *settings.RUNGS) or preset.scales not in settings.SCALE_POLICIES:
        return [f"[kv] {preset.rung}/{preset.scales} is unknown; rungs: stock, {', '.join(settings.RUNGS)}"]
    if serve["kda_prefill_backend"] not in KDA_CHECKPOINTS:
        return [f"kda_prefill_backend {serve['kda_prefill_backend']!r} is unknown; flashkda or triton"]
    if serve["tensor_parallel_size"] not in RANKS:
        return [f"tensor_parallel_size {serve['tensor_parallel_size']}: this format loads at 1 or 2 ranks"]
    step = (1 + preset.speculated) * serve["max_num_seqs"]
    if max(serve["cudagraph_capture_sizes"]) < step:
        problems.append(
            f"cudagraph_capture_sizes {serve['cudagraph_capture_sizes']} do not reach {step}, the tokens of a decode "
            f"step of {serve['max_num_seqs']} sequences with {preset.speculated} speculated: it would run eager"
        )
    if not serve["enable_prefix_caching"]:
        problems.append("enable_prefix_caching is off: the pool's check below holds with it on alone")
    if serve["kv_cache_dtype"] not in ("fp8", "fp8_ds_mla"):
        problems.append(f"kv_cache_dtype {serve['kv_cache_dtype']!r}: compact rows need fp8 or fp8_ds_mla")
    if not (found := preset.budget).holds:
        problems.append(
            f"kv_cache_memory_bytes {serve['kv_cache_memory_bytes']:,} hold {found.pool_blocks} blocks of "
            f"{found.block_bytes:,} B; {serve['max_model_len']:,} tokens need {found.request_blocks + 1}, so at least "
            f"{found.least_bytes:,}"
        )
    told = set(preset.explain)
    wanted = set(serve) | set(preset.env) | ({"rung"} if preset.rung != STOCK else set())
    problems += [f"[explain] lacks {name}" for name in sorted(wanted - told)]
    problems += [
        f"[explain] speaks of {name}, which the preset does not set" for name in sorted(told - wanted)
    ]
    return problems


def command(preset: Preset, model: str, extra: tuple[str, ...] = ()) -> list[str]:
    """vLLM's command line for a checkpoint; `extra` arguments come last and so win."""
    words = ["vllm", "serve", model]
    for name, value in preset.serve.items():
        words += _flag(name, value)
    return words + list(extra)


def _flag(name: str, value: Any) -> list[str]:
    dashed = name.replace("_", "-")
    if name == "cudagraph_capture_sizes":
        return ["--compilation-config", _json({name: value})]
    if name == "speculative":
        return ["--speculative-config", _json(value)]
    if isinstance(value, Mapping):
        return [f"--{dashed}", _json(value)]
    if isinstance(value, bool):
        return [f"--{dashed}" if value else f"--no-{dashed}"]
    return [f"--{dashed}", str(value)]


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def explanation(preset: Preset) -> list[str]:
    """One line a setting: what and why; then what the pool holds."""
    found = preset.budget
    lines = [f"{name} = {_shown(value)}: {preset.explain[name]}" for name, value in preset.serve.items()]
    if preset.rung != STOCK:
        lines.append(
            f"{settings.TILES} = {preset.rung}, {settings.SCALES} = {preset.scales}: {preset.explain['rung']}"
        )
    lines += [f"{name} = {value}: {preset.explain[name]}" for name, value in preset.env.items()]
    lines.append(
        f"pool: {found.pool_blocks} blocks of {found.block_bytes:,} B ({found.block_tokens:,} tokens each); "
        f"{preset.serve['max_model_len']:,} tokens need {found.request_blocks} and the null block, "
        f"{found.requests:.2f} requests of full length"
    )
    return lines


def _shown(value: Any) -> str:
    return _json(value) if isinstance(value, Mapping | list) else str(value)
