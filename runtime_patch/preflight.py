"""Is this machine, this vLLM and this checkpoint what the plugin was made for? Asked before a server starts.

Each finding is a sentence about one subject. An error means that something would be served wrong, or not at all;
a warning that it would be served slower or less exactly than it could be.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path
from typing import Literal

from shardmill.runtime_patch import checkpoint, plugin, presets, settings, tuned_configs
from shardmill.runtime_patch.errors import PatchError, PresetError
from shardmill.runtime_patch.ledger import LEDGER, Patch

Level = Literal["error", "warning", "note"]

# Mean relative error of a weight over 200 blocks: (fresh BF16 weights, copies of native block FP8).
STORED_ERROR = ("2.65 %", "0.15 %, or 0 with the recipe recover")
ROUNDED_ERROR = ("3.74 %", "2.64 %")
DISTRIBUTIONS = ("shardmill", "shardmill-serving")
OLD_PACKAGES = ("kernels", "runtime_patch")
FUSED_SHAPES = {1: (24896, 4096), 2: (12576, 4096)}  # the KDA projection's weight on a rank, by ranks


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    subject: str
    told: str


@dataclass(frozen=True, slots=True)
class State:
    """A ledger row as it stands here: "applied", "not needed: why" or "refused: why"."""

    patch: Patch
    state: str


@dataclass(frozen=True, slots=True)
class Report:
    states: tuple[State, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)


def run(model: Path | None, preset: presets.Preset | None, environ: Mapping[str, str]) -> Report:
    """Looks at everything that can be seen before a start. Applies the plugin in this process to see whether it can."""
    refused = _apply()
    states = tuple(_state(patch, refused) for patch in LEDGER)
    findings = [Finding("error", "plugin", refused)] if refused else []
    findings += _plugin_found(environ)
    findings += _old_packages()
    findings += _environment(environ)
    findings += _card_problems(preset)
    findings += _model(model, environ) if model else []
    findings += _tuned(preset.serve["tensor_parallel_size"] if preset else 2)
    return Report(states, tuple(findings))


def _apply() -> str | None:
    """Why the plugin cannot be applied here, or None."""
    logging.getLogger("vllm.shardmill").addHandler(
        logging.NullHandler()
    )  # the findings say what it would warn of
    try:
        plugin.register()
        plugin.activate()
    except PatchError as error:
        return str(error)
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        return f"vLLM cannot be imported here: {type(error).__name__}: {error}"
    return None


def _state(patch: Patch, refused: str | None) -> State:
    why = (refused or "").split(". ")[0]  # its first sentence; what to do about it stands in the finding
    return State(patch, plugin.applied().get(patch.name, f"refused: {why}"))


def _plugin_found(environ: Mapping[str, str]) -> Iterator[Finding]:
    """vLLM must find the entry point, and VLLM_PLUGINS must let it."""
    if not [
        e
        for e in entry_points(group="vllm.general_plugins")
        if e.value == "shardmill.runtime_patch.plugin:register"
    ]:
        yield Finding(
            "error",
            "plugin",
            "no installed distribution offers it to vLLM; install shardmill-serving, the wheel of `make serving-wheel`",
        )
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and "shardmill" not in allowed.split(","):
        yield Finding(
            "error", "VLLM_PLUGINS", f"{allowed!r} leaves the plugin out; add shardmill or unset it"
        )


def _old_packages() -> Iterator[Finding]:
    """Distributions of this project that put packages at the top level, from before they were folded into one name.

    Their `kernels` is also the name of a package that transformers uses: whichever was installed last wins the folder,
    and every model that transformers loads can break.
    """
    owners = packages_distributions()
    for package in OLD_PACKAGES:
        ours = sorted({name for name in owners.get(package, ()) if name in DISTRIBUTIONS})
        if not ours:
            continue
        others = sorted(set(owners[package]) - set(ours))
        beside = f" and shares that folder with {', '.join(others)}" if others else ""
        again = f", then reinstall {' '.join(others)}" if others else ""
        yield Finding(
            "error",
            package,
            f"{', '.join(ours)} still installs a package `{package}` at the top level{beside}; run "
            f"`pip uninstall {' '.join(ours)}`{again}, and install this version, which is shardmill.{package} alone",
        )


def _card_problems(preset: presets.Preset | None) -> Iterator[Finding]:
    """A preset on a card that it has no flags for."""
    try:
        if preset:
            presets.on_card(preset, capability())
    except PresetError as error:
        yield Finding("error", "card", str(error))


def _environment(environ: Mapping[str, str]) -> Iterator[Finding]:
    try:
        chosen = settings.read(environ)
        settings.refuse_unknown(environ)
    except PatchError as error:
        yield Finding("error", "environment", str(error))
        return
    if chosen.unchecked:
        yield Finding("warning", settings.UNCHECKED, "fingerprints are not enforced")
    if "TritonFp8BlockScaledMMKernel" in environ.get("VLLM_DISABLED_KERNELS", ""):
        yield Finding(
            "warning", "VLLM_DISABLED_KERNELS", "names vLLM's Triton kernel; [32,32] weights use it still"
        )


def _model(folder: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    if not folder.exists():
        yield Finding("warning", "checkpoint", f"{folder} is no folder here, so its config was not checked")
        return
    try:
        served = checkpoint.read(folder)
    except PatchError as error:
        yield from (Finding("error", "checkpoint", line) for line in str(error).splitlines())
        return
    if served.entries is None:
        yield Finding(
            "note", "checkpoint", f"{served.model_type} without FP8_BLOCK weights: served as stock vLLM does"
        )
        if environ.get(settings.TILES) and served.model_type != "glm5_next":
            yield Finding(
                "error", settings.TILES, f"set, but {served.model_type} has no rows that it could compact"
            )
        return
    if served.model_type != "glm5_next":
        yield Finding(
            "error", "checkpoint", f"model_type {served.model_type!r}; the patches are for glm5_next"
        )
    yield from _rounding(served, environ)


def _rounding(served: checkpoint.Served, environ: Mapping[str, str]) -> Iterator[Finding]:
    """[128,128] scales are re-rounded to powers of two at load unless that is switched off."""
    if served.entries is None or 128 not in served.entries.blocks():
        return
    rounded = served.rounded_at_load
    if environ.get("VLLM_USE_DEEP_GEMM_E8M0", "1") == "0" or (served.conversions and not rounded):
        return
    count = f"{len(rounded)} weights" if rounded else "[128,128] weights"
    yield Finding(
        "warning",
        "VLLM_USE_DEEP_GEMM_E8M0",
        f"{count} are re-rounded to UE8M0 at load: their mean relative error is {ROUNDED_ERROR[0]} as served, "
        f"{STORED_ERROR[0]} as stored, and for copies of native FP8 {ROUNDED_ERROR[1]} as served, {STORED_ERROR[1]} as "
        "stored; set VLLM_USE_DEEP_GEMM_E8M0=0 to serve the stored bits (DeepGEMM on SM90, CUTLASS on Blackwell)",
    )


def _tuned(ranks: int) -> Iterator[Finding]:
    """A card without a tuned configuration runs the fused KDA projection with vLLM's default tile."""
    device = _card()
    if device is None:
        yield Finding(
            "note", "card", "no CUDA card is visible: kernels and tuned configurations were not checked"
        )
        return
    rows, columns = FUSED_SHAPES[ranks]
    name = tuned_configs.file_name(rows, columns, device, 32)
    if tuned_configs.find(name) is None:
        yield Finding(
            "warning",
            "tuned configuration",
            f"none for {device} at {ranks} ranks ({name}); make one in minutes with `shardmill tune --shape "
            f"{rows},{columns} --block 32` and set VLLM_TUNED_CONFIG_FOLDER to its folder",
        )


def _card() -> str | None:
    """The card's name as it stands in file names, or None without torch or a card."""
    try:
        import torch

        if not torch.cuda.is_available():
            return None
        from shardmill.kernels.block_gemm import device_name

        return device_name(torch.device("cuda", 0))
    except (ImportError, RuntimeError):
        return None


def preset_of(name: str | None, layout: str | None = None) -> tuple[presets.Preset | None, list[Finding]]:
    """A preset by name with the KV layout asked for, or the errors of both as findings."""
    if name is None:
        return None, []
    try:
        return presets.with_layout(presets.load(name), layout), []
    except PresetError as error:
        return None, [Finding("error", "preset", line) for line in str(error).splitlines()]


def overruled(preset: presets.Preset | None, shell: Mapping[str, str]) -> list[Finding]:
    """Variables of the shell that the preset overrides: the published way of choosing a KV layout is one of them."""
    lost = preset.overruled(shell) if preset else {}
    return [Finding("warning", name, told) for name, told in lost.items()]


def environment_with(preset: presets.Preset | None) -> dict[str, str]:
    """This process's environment as the preset's server would see it."""
    return preset.environment_over(os.environ) if preset else dict(os.environ)


def capability() -> str | None:
    """The compute capability of the first visible card, "9.0", or None without torch or a card."""
    try:
        import torch

        if not torch.cuda.is_available():
            return None
        return "{}.{}".format(*torch.cuda.get_device_capability(0))
    except (ImportError, RuntimeError):
        return None
