"""Serving presets: data files of flags that are known to belong together, checked before they start.

A preset is a TOML file (runtime_patch/presets). `[serve]` holds vLLM's flags with underscores for dashes, `[kv]` the
KV layout, `[env]` the environment, `[card."9.0"]` what differs on cards of that compute capability, `[explain]` one
sentence for each flag. Anything unknown is refused.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
CARDS = {
    "9.0": "H100 and H200",
    "12.0": "RTX PRO 6000",
}  # capabilities whose sparse attention the plugin knows
_TABLES = {"name", "summary", "serve", "kv", "env", "card", "explain"}
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
    layout: str
    scales: str
    env: Mapping[str, str]
    cards: Mapping[str, Mapping[str, Any]]
    explain: Mapping[str, str]

    @property
    def speculated(self) -> int:
        return int(self.serve.get("speculative", {}).get("num_speculative_tokens", 0))

    @property
    def row_bytes(self) -> int:
        if self.layout == STOCK:
            return STOCK_ROW_BYTES
        from shardmill.kernels.kv_row import RowLayout

        return RowLayout.parse(self.layout).row_bytes

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
        """The preset's variables, the KV layout's among them."""
        rows = {} if self.layout == STOCK else {settings.TILES: self.layout, settings.SCALES: self.scales}
        return rows | dict(self.env)

    def environment_over(self, shell: Mapping[str, str]) -> dict[str, str]:
        """The shell's environment as the server gets it: the preset's KV layout and variables win."""
        kept = {name: value for name, value in shell.items() if name not in (settings.TILES, settings.SCALES)}
        return kept | self.environment

    def overruled(self, shell: Mapping[str, str]) -> dict[str, str]:
        """Variables of the shell that lose to the preset: name -> a sentence with both values."""
        ours = {settings.TILES: "", settings.SCALES: ""} | self.environment
        lost = {name: value for name, value in ours.items() if shell.get(name, "") not in ("", value)}
        return {name: _lost(name, shell[name], value) for name, value in lost.items()}


def _lost(name: str, shell: str, preset: str) -> str:
    instead = f"pass --kv-layout {shell}" if name == settings.TILES else "write a preset file of your own"
    if name == settings.SCALES:
        instead = f"pass --kv-layout LAYOUT-{shell}"
    return f"the environment's {shell} loses to the preset's {preset or 'vLLM rows'}; to have it, {instead}"


def names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def load(name_or_path: str) -> Preset:
    """A preset by name or by the path of its file, checked. Raises PresetError with every problem found."""
    path = Path(name_or_path) if name_or_path.endswith(".toml") else FOLDER / f"{name_or_path}.toml"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PresetError(
            f"no preset {name_or_path!r}; known presets: {', '.join(names())}, or a path to a .toml"
        ) from error
    try:
        preset = _preset(tomllib.loads(data.decode("utf-8-sig")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PresetError(f"{path}: not a preset file: {error}") from error
    if problems := check(preset):
        raise PresetError("\n".join(f"{path}: {problem}" for problem in problems))
    return preset


def _preset(table: Mapping[str, Any]) -> Preset:
    if unknown := set(table) - _TABLES:
        raise KeyError(f"unknown table {', '.join(sorted(unknown))}")
    if missing := [key for key in _NEEDED if key not in table["serve"]]:
        raise KeyError(f"[serve] lacks {', '.join(missing)}")
    if unknown := set(table.get("card", {})) - set(CARDS):
        raise KeyError(f"[card] {', '.join(sorted(unknown))} is unknown; known are {', '.join(CARDS)}")
    rows = table["kv"]
    return Preset(
        name=table["name"],
        summary=table["summary"],
        serve=table["serve"],
        layout=rows["layout"] if "layout" in rows else rows["rung"],
        scales=rows["scales"],
        env=table.get("env", {}),
        cards=table.get("card", {}),
        explain=table["explain"],
    )


def with_layout(preset: Preset, name: str | None) -> Preset:
    """The preset with another KV layout: "stock", "6666", or "6666-stock" for another scale policy than its own.

    Raises PresetError where there is no such layout, or where the preset's pin does not hold its context with it.
    """
    if name is None:
        return preset
    layout, _, scales = name.partition("-")
    known = layout in settings.RUNGS or (layout == STOCK and not scales)
    if not known or scales not in ("", *settings.SCALE_POLICIES):
        raise PresetError(
            f"--kv-layout {name!r} is unknown; expected stock, or one of {', '.join(settings.RUNGS)}, which may end "
            f"in {' or '.join('-' + policy for policy in settings.SCALE_POLICIES)}"
        )
    changed = replace(
        preset, layout=layout, scales=scales or _own_scales(layout), explain=_explained(preset, layout)
    )
    if problems := check(changed):
        raise PresetError(
            "\n".join(f"{preset.name} with --kv-layout {name}: {problem}" for problem in problems)
        )
    return changed


def _own_scales(layout: str) -> str:
    return "stock" if layout in (STOCK, "8888") else "fine"


def _explained(preset: Preset, layout: str) -> dict[str, str]:
    kept = {name: told for name, told in preset.explain.items() if name != "layout"}
    return kept if layout == STOCK else kept | {"layout": "chosen by --kv-layout"}


def on_card(preset: Preset, capability: str | None) -> Preset:
    """The preset as it is served on cards of a compute capability ("9.0"); None for the cards it was written for.

    Raises PresetError for a capability whose sparse attention the plugin does not know.
    """
    if capability is None:
        return preset
    if capability not in CARDS:
        known = ", ".join(f"{name} ({cards})" for name, cards in CARDS.items())
        raise PresetError(
            f"compute capability {capability}: no preset was made for it, and the plugin knows no sparse attention "
            f"there; known are {known}"
        )
    return replace(preset, serve=dict(preset.serve) | dict(preset.cards.get(capability, {})))


def check(preset: Preset) -> list[str]:
    """Every reason why the preset would not start, or not keep its promise; empty where there is none."""
    problems = []
    serve = preset.serve
    if preset.layout not in (STOCK, *settings.RUNGS) or preset.scales not in settings.SCALE_POLICIES:
        known = f"stock, {', '.join(settings.RUNGS)}"
        return [f"[kv] {preset.layout}/{preset.scales} is unknown; KV layouts: {known}"]
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
    on_cards = {name for flags in preset.cards.values() for name in flags}
    wanted = set(serve) | set(preset.env) | on_cards | ({"layout"} if preset.layout != STOCK else set())
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
    if preset.layout != STOCK:
        lines.append(
            f"{settings.TILES} = {preset.layout}, {settings.SCALES} = {preset.scales}: {preset.explain['layout']}"
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
