"""The config's quantization_config against the tensors, in both directions, without a model's code.

A `Declaration` is what the config says: modules listed one by one (MIXED_PRECISION), or one kind for all Linears but
the excluded ones. Config names may be a loader's rather than the checkpoint's; `MAPPINGS` are the known ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verify.checkpoint import Checkpoint
from verify.excludes import Excludes
from verify.findings import Finding
from verify.schemes import PACKED, Linear, grid_of

CONFIG = "config.json"

# (a loader's prefix, the checkpoint's prefix): names of one module in vLLM's and transformers' model classes, and
# of the MTP draft, which vLLM builds as a model of its own.
MAPPINGS = (
    ("model.layers.", "model.language_model.layers."),
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head", "lm_head"),
    ("language_model.", ""),
    ("visual.", "model.visual."),
    ("model.visual.", "visual."),
    ("model.language_model.", "language_model.model."),
    ("model.", "language_model.model."),
)

# quant_algo -> the kinds of verify.schemes that its loader reads.
ALGO_KINDS: Mapping[str, tuple[str, ...]] = {
    "NVFP4": ("nvfp4",),
    "W4A16_NVFP4": ("nvfp4",),
    "FP8_BLOCK": ("fp8-block",),
    "FP8_BLOCK_SCALES": ("fp8-block", "fp8-grid"),
    "FP8_PB_WO": ("fp8-pbwo", "fp8-grid"),
    "FP8": ("fp8-tensor",),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8-channel",),
    "MXFP8": ("mxfp8",),
}
FIXED_GROUP = {"FP8_PB_WO": 128, "FP8_BLOCK_SCALES": 128}


@dataclass(frozen=True, slots=True)
class Entry:
    """What the config claims for one module: the algorithm and, where it has one, the side of a block or a group."""

    algo: str
    group: int | None


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a quantization_config says."""

    method: str
    algo: str
    entries: Mapping[str, Entry] | None  # module -> claim, where modules are listed one by one
    block: tuple[int, int] | None  # of weight_block_size
    excludes: Excludes


def declaration(quantisation: Mapping[str, Any]) -> tuple[Declaration, list[Finding]]:
    """Reads a quantization_config; what it can't use is a finding."""
    findings: list[Finding] = []
    listed = quantisation.get("quantized_layers")
    entries = None
    if isinstance(listed, dict):
        entries = {}
        for module, row in listed.items():
            algo = row.get("quant_algo") if isinstance(row, dict) else None
            group = row.get("group_size") if isinstance(row, dict) else None
            if not isinstance(algo, str) or not (group is None or (type(group) is int and group > 0)):
                findings.append(
                    Finding("config-json", CONFIG, module, "quant_algo and group_size", repr(row)[:80])
                )
                continue
            entries[module] = Entry(algo.upper(), group)
    elif listed is not None:
        findings.append(Finding("config-json", CONFIG, "quantized_layers", "an object", repr(listed)[:80]))
    excludes, bad = Excludes.read(quantisation)
    findings += bad
    method, algo = quantisation.get("quant_method"), quantisation.get("quant_algo")
    return Declaration(
        method if isinstance(method, str) else "",
        algo.upper() if isinstance(algo, str) else "",
        entries,
        _block(quantisation.get("weight_block_size")),
        excludes,
    ), findings


def _block(value: Any) -> tuple[int, int] | None:
    if isinstance(value, list) and len(value) == 2 and all(type(side) is int and side > 0 for side in value):
        return value[0], value[1]
    return None


def entry_faults(checkpoint: Checkpoint, linears: Mapping[str, Linear]) -> Iterator[Finding]:
    """Faults of the quantization_config against the quantised modules found by name and dtype."""
    whole = {module: linear for module, linear in linears.items() if linear.weight is not None}
    codes = {module: linear for module, linear in whole.items() if linear.kind not in ("bare", "comfy-fp8")}
    if not checkpoint.quantisation:
        if codes and checkpoint.config:
            yield Finding(
                "config-silent",
                CONFIG,
                "",
                "a quantization_config",
                f"none, {len(codes):,} quantised modules",
            )
        elif codes and checkpoint.index is not None and not checkpoint.config:
            yield Finding("no-config", CONFIG, "", "config.json", f"none, {len(codes):,} quantised modules")
        return
    declared, findings = declaration(checkpoint.quantisation)
    yield from findings
    if not whole and not _packed_otherwise(checkpoint):
        yield Finding(
            "nothing-quantised", CONFIG, "", declared.algo or declared.method, "no quantised tensor"
        )
        return
    if declared.entries is not None:
        yield from _listed(checkpoint, declared, declared.entries, whole)
    elif declared.algo in ALGO_KINDS:
        yield from _one_kind(declared, whole)
    elif declared.method == "fp8" and declared.block is not None:
        yield from _blocks(declared.block, whole)
    for module in declared.excludes.matched(codes):
        yield Finding("entry-excluded", CONFIG, module, "quantised or excluded", "both")


def _packed_otherwise(checkpoint: Checkpoint) -> bool:
    """Whether there are codes of a format that verify.schemes does not know (GPTQ, AWQ, bitsandbytes ...)."""
    return any(tensor.dtype in ("I8", "U8", "I32", "F4") for tensor in checkpoint.tensors.values())


def names_of(module: str) -> Iterator[str]:
    """The names that a config may use for an entry's module, the checkpoint's own first."""
    yield module
    for loader, own in MAPPINGS:
        if module.startswith(loader):
            yield own + module.removeprefix(loader)


def _listed(
    checkpoint: Checkpoint, declared: Declaration, entries: Mapping[str, Entry], linears: Mapping[str, Linear]
) -> Iterator[Finding]:
    parents = {parent for module in linears for parent in _parents(module)}
    claimed: set[str] = set()
    banks: set[str] = set()
    for name, entry in entries.items():
        module = next((known for known in names_of(name) if known in linears), None)
        if module is not None:
            claimed.add(module)
            yield from _claim_faults(name, entry, linears[module])
            continue
        bank = next((known for known in names_of(name) if known in parents), None)
        if bank is None:
            got = _what_is_there(checkpoint, name)
            yield Finding("entry-without-tensors", CONFIG, name, f"tensors of {entry.algo}", got)
        else:
            banks.add(bank)
    for module, linear in linears.items():
        if module not in claimed and banks.isdisjoint(_parents(module)) and linear.weight is not None:
            got = f"{linear.weight} ({linear.kind})"
            yield Finding(
                "tensors-without-entry", linear.weight.file, module, "an entry in quantized_layers", got
            )


def _parents(module: str) -> Iterator[str]:
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def _what_is_there(checkpoint: Checkpoint, module: str) -> str:
    for known in names_of(module):
        weight = checkpoint.tensors.get(f"{known}.weight")
        if weight is not None:
            return f"an unquantised {weight}"
    return "none of that name"


def _claim_faults(name: str, entry: Entry, linear: Linear) -> Iterator[Finding]:
    kinds = ALGO_KINDS.get(entry.algo)
    if kinds is None:
        yield Finding("entry-kind", CONFIG, name, f"one of {', '.join(ALGO_KINDS)}", entry.algo)
    elif linear.kind not in kinds:
        yield Finding(
            "entry-kind", CONFIG, name, f"{entry.algo}: {' or '.join(kinds)}", f"{linear.kind} tensors"
        )
    else:
        yield from _group_faults(name, entry, linear)


def _group_faults(name: str, entry: Entry, linear: Linear) -> Iterator[Finding]:
    group = entry.group or FIXED_GROUP.get(entry.algo)
    grid = linear.grid
    if group is None or grid is None or len(linear.shape) < 2:
        return
    if linear.kind in PACKED:
        expected: tuple[int, ...] = (*linear.shape[:-1], -(-linear.shape[-1] // group))
    elif linear.kind in ("fp8-block", "fp8-grid"):
        expected = grid_of(linear.shape, (group, group))
    else:
        return
    if grid.shape != expected:
        got = f"{list(grid.shape)}"
        yield Finding("entry-block", CONFIG, name, f"group_size {group} gives {list(expected)}", got)


def _one_kind(declared: Declaration, linears: Mapping[str, Linear]) -> Iterator[Finding]:
    for module, linear in linears.items():
        if linear.kind not in ALGO_KINDS[declared.algo]:
            yield Finding("entry-kind", CONFIG, module, f"{declared.algo} for all", f"{linear.kind} tensors")


def _blocks(block: tuple[int, int], linears: Mapping[str, Linear]) -> Iterator[Finding]:
    for module, linear in linears.items():
        if linear.kind == "fp8-block" and linear.grid is not None and len(linear.shape) >= 2:
            expected = grid_of(linear.shape, block)
            if linear.grid.shape != expected:
                said = f"weight_block_size {list(block)} gives {list(expected)}"
                yield Finding("entry-block", CONFIG, module, said, str(list(linear.grid.shape)))
