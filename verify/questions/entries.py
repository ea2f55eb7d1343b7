"""The config's quantization_config against the tensors, in both directions, without a model's code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from shardmill.verify.formats.declared import (
    ALGO_KINDS,
    CONFIG,
    FIXED_GROUP,
    Declaration,
    Entry,
    declaration,
    names_of,
)
from shardmill.verify.formats.forms.kv_cache import cache_scales
from shardmill.verify.formats.schemes import PACKED, Linear, also, grid_of
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.rules.findings import Finding


def entry_faults(checkpoint: Checkpoint, linears: Mapping[str, Linear]) -> Iterator[Finding]:
    """Faults of the quantization_config against the quantized modules found by name and dtype."""
    whole = {module: linear for module, linear in linears.items() if linear.weight is not None}
    codes = {module: linear for module, linear in whole.items() if linear.kind not in ("bare", "comfy-fp8")}
    if not checkpoint.quantization:
        if codes and checkpoint.config:
            yield Finding(
                "config-silent",
                CONFIG,
                "",
                "a quantization_config",
                f"none, {len(codes):,} quantized modules",
            )
        elif codes and checkpoint.index is not None and CONFIG not in checkpoint.files:
            yield Finding("no-config", CONFIG, "", "config.json", f"none, {len(codes):,} quantized modules")
        return
    declared, findings = declaration(checkpoint.quantization)
    yield from findings
    if not whole and not _packed_otherwise(checkpoint):
        yield Finding(
            "nothing-quantized", CONFIG, "", declared.algo or declared.method, "no quantized tensor"
        )
        return
    if declared.entries is not None:
        yield from _listed(checkpoint, declared, declared.entries, whole)
    else:
        yield from _one_kind(declared, whole)
        if declared.block is not None:
            yield from _blocks(declared.block, whole)
    for module in declared.excludes.matched(codes):
        yield Finding("entry-excluded", CONFIG, module, "quantized or excluded", "both")


def _packed_otherwise(checkpoint: Checkpoint) -> bool:
    """Whether there are codes of a format that verify.formats.schemes does not know (GPTQ, AWQ, bitsandbytes ...)."""
    if cache_scales(checkpoint.tensors):
        return True
    return any(tensor.dtype in ("I8", "U8", "I32", "F4") for tensor in checkpoint.tensors.values())


def _listed(
    checkpoint: Checkpoint, declared: Declaration, entries: Mapping[str, Entry], linears: Mapping[str, Linear]
) -> Iterator[Finding]:
    parents = _all_parents(linears)
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


PARTS_MAX = 64  # of a name; what has more is no module's


def _parents(module: str) -> Iterator[str]:
    while "." in module and module.count(".") < PARTS_MAX:
        module = module.rpartition(".")[0]
        yield module


def _all_parents(modules: Iterable[str]) -> set[str]:
    """Of a module whose parent is known already, all that is above is known too."""
    found: set[str] = set()
    for module in modules:
        for parent in _parents(module):
            if parent in found:
                break
            found.add(parent)
    return found


def _what_is_there(checkpoint: Checkpoint, module: str) -> str:
    for known in names_of(module):
        weight = checkpoint.tensors.get(f"{known}.weight")
        if weight is not None:
            return f"an unquantized {weight}"
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
        if declared.kinds and also(linear).isdisjoint((*declared.kinds, "other")):
            expected = f"{' or '.join(declared.kinds)} for all that is not excluded"
            yield Finding("entry-kind", CONFIG, module, expected, f"{linear.kind} tensors")


def _blocks(block: tuple[int, int], linears: Mapping[str, Linear]) -> Iterator[Finding]:
    for module, linear in linears.items():
        if linear.kind in ("fp8-block", "fp8-grid") and linear.grid is not None and len(linear.shape) >= 2:
            expected = grid_of(linear.shape, block)
            if linear.grid.shape != expected:
                said = f"blocks of {list(block)} give {list(expected)}"
                yield Finding("entry-block", CONFIG, module, said, str(list(linear.grid.shape)))
