"""What the config claims of a form, against the tensors: type and bits of codes, columns of a group, targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from shardmill.verify.formats.declared import CONFIG, MAPPINGS, Declaration
from shardmill.verify.formats.excludes import Pattern, pattern_of
from shardmill.verify.formats.fused import fused_names
from shardmill.verify.formats.linear import GROUP, Linear, bits_of
from shardmill.verify.rules.findings import Finding

CODE: Mapping[str, tuple[str, int]] = {  # kind -> type and bits of a code, as compressed-tensors writes them
    **dict.fromkeys(
        ("fp8-block", "fp8-grid", "fp8-tensor", "fp8-channel", "fp8-parts", "mxfp8"), ("float", 8)
    ),
    **dict.fromkeys(("nvfp4", "ct-nvfp4", "mxfp4"), ("float", 4)),
    "int8": ("int", 8),
}


def claim_faults(
    quantization: Mapping[str, Any], declared: Declaration | None, linears: Mapping[str, Linear]
) -> Iterator[Finding]:
    """One finding a kind of module and claim, with the number of modules."""
    if declared is None:
        return
    whole = {module: linear for module, linear in linears.items() if linear.weight is not None}
    groups = [
        group
        for group in _objects(quantization.get("config_groups"))
        if isinstance(group.get("weights"), dict)
    ]
    if groups:
        yield from _codes(groups, whole)
        yield from _targets(groups, whole)
    if declared.entries is None and not quantization.get("dynamic"):
        yield from _groups(quantization, groups, declared, whole)
        yield from _words(declared, whole)


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value.values() if isinstance(item, dict)] if isinstance(value, dict) else []


def _codes(groups: list[Mapping[str, Any]], linears: Mapping[str, Linear]) -> Iterator[Finding]:
    """Every group says type and bits, and some kind of codes is of neither."""
    said_of = [(group["weights"].get("type"), group["weights"].get("num_bits")) for group in groups]
    if any(kind not in ("float", "int") or type(bits) is not int for kind, bits in said_of):
        return
    claims = set(said_of)
    wrong = Counter(
        linear.kind
        for linear in linears.values()
        if linear.kind in CODE and CODE[linear.kind] not in claims and not _roomy(linear, claims)
    )
    said = " or ".join(sorted(f"{kind} of {bits} bits" for kind, bits in claims))
    for kind, count in sorted(wrong.items()):
        yield Finding("entry-kind", CONFIG, "config_groups", said, f"{count:,} modules of {kind} tensors")


def _roomy(linear: Linear, claims: set[tuple[Any, Any]]) -> bool:
    """int-quantized (W4AFP8): codes of fewer bits, a byte each, by groups. Their range is judged with the codes."""
    grid = linear.grid
    grouped = grid is not None and len(grid.shape) == 2 and grid.shape[1] > 1
    return linear.kind == "int8" and grouped and any(kind == "int" and bits < 8 for kind, bits in claims)


def _targets(groups: list[Mapping[str, Any]], linears: Mapping[str, Linear]) -> Iterator[Finding]:
    """Targets are names or patterns, and a quantized module is hit by none of them."""
    lists = [listed for group in groups if isinstance(listed := group.get("targets"), list)]
    targets = [target for listed in lists for target in listed if isinstance(target, str)]
    if not targets or not all(target.startswith("re:") or "." in target for target in targets):
        return  # a class such as Linear: every module may be of it
    patterns = [pattern_of(target) for target in targets]
    if not all(patterns):
        return
    missed = [module for module in linears if not any(_hit(p, module) for p in patterns if p is not None)]
    if missed:
        got = f"{len(missed):,} modules, the first {missed[0]}"
        yield Finding(
            "tensors-without-entry", CONFIG, "targets", "targets that hit every quantized module", got
        )


def _hit(pattern: Pattern, module: str) -> bool:
    mapped = (loader + module.removeprefix(own) for loader, own in MAPPINGS if module.startswith(own))
    return any(pattern.matches(name) for known in (module, *mapped) for name in (known, *fused_names(known)))


def _groups(
    quantization: Mapping[str, Any],
    groups: list[Mapping[str, Any]],
    declared: Declaration,
    linears: Mapping[str, Linear],
) -> Iterator[Finding]:
    """The columns of a group in formats that fix them, and in those that don't the ones that the scales show."""
    given = [group["weights"].get("group_size") for group in groups] or [quantization.get("group_size")]
    sizes = {size for size in given if type(size) is int and size > 0}
    if not sizes:
        return
    wrong: Counter[tuple[str, int]] = Counter()
    for linear in linears.values():
        found = _columns(linear, declared)
        if found and not found & sizes:
            wrong[linear.kind, max(found)] += 1
    said = " or ".join(map(str, sorted(sizes)))
    for (kind, columns), count in sorted(wrong.items()):
        yield Finding(
            "entry-block", CONFIG, "group_size", said, f"groups of {columns} in {count:,} {kind} modules"
        )


def _columns(linear: Linear, declared: Declaration) -> set[int]:
    """The sizes of a group that fit a module's scales; none for a format without groups."""
    grid, shape = linear.grid, linear.shape
    if linear.kind in GROUP:
        return {GROUP[linear.kind]}
    if grid is None or len(grid.shape) != 2 or len(shape) != 2 or 0 in grid.shape:
        return set()
    if linear.kind in ("gptq", "awq"):
        inputs, count = shape[0], grid.shape[0]
        return {
            size
            for size in (16, 32, 64, 128, 256, 512, 1024, -(-inputs // count))
            if -(-inputs // size) == count
        }
    if linear.kind == "int-pack" and grid.shape[1] > 1:
        columns = shape[1] // 2 if declared.bits == 8 else shape[1]
        return {columns // grid.shape[1]} if not columns % grid.shape[1] else {-1}
    return set()


def _words(declared: Declaration, linears: Mapping[str, Linear]) -> Iterator[Finding]:
    """Bits of a code in words, as `qzeros` and `g_idx` show them."""
    if declared.bits is None or declared.method not in ("gptq", "awq"):
        return
    wrong = Counter(
        bits_of(linear)
        for linear in linears.values()
        if linear.kind in ("gptq", "awq") and linear.extras and bits_of(linear) != declared.bits
    )
    for bits, count in sorted(wrong.items()):
        yield Finding(
            "entry-kind", CONFIG, "bits", str(declared.bits), f"codes of {bits} bits in {count:,} modules"
        )
