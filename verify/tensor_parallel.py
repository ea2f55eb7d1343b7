"""At which tensor-parallel sizes block-quantised modules can be cut: a rank's rows must be whole blocks.

Inside a fused module every part must end on a block, so a part of 64 / TP rows counts by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from verify.declared import Declaration
from verify.findings import Finding
from verify.fused import COLUMN_PARALLEL, ROW_PARALLEL, kind_of
from verify.schemes import GROUP, Linear, implied_block

SIZES = (1, 2, 4, 8)


def tensor_parallel(linears: Mapping[str, Linear], declared: Declaration | None) -> dict[int, str]:
    """TP size -> "" if every quantised module can be cut, else the first that can't and why."""
    verdict = dict.fromkeys(SIZES, "")
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for module, linear in linears.items():
        key = (kind_of(module), linear.shape)
        if linear.weight is None or key in seen:
            continue
        seen.add(key)
        for size in SIZES:
            verdict[size] = verdict[size] or _trouble(module, linear, _block(module, linear, declared), size)
    return verdict


def sentence(verdict: Mapping[int, str]) -> str:
    """`loads at TP 1, 2; not 4 (b_proj: 16 rows a rank in blocks of 32)`"""
    fits = [str(size) for size, trouble in verdict.items() if not trouble]
    fails = [f"{size} ({trouble})" for size, trouble in verdict.items() if trouble]
    return f"loads at TP {', '.join(fits) or 'none'}" + (f"; not {', '.join(fails)}" if fails else "")


def demanded(verdict: Mapping[int, str], sizes: tuple[int, ...]) -> Iterator[Finding]:
    for size in sizes:
        if verdict.get(size):
            yield Finding("tensor-parallel", "", "", f"whole blocks on each of {size} ranks", verdict[size])


def _block(module: str, linear: Linear, declared: Declaration | None) -> tuple[int, int]:
    """(rows, columns) that share a scale; 1 where rows have scales of their own, 0 where one scale serves all."""
    if linear.kind in GROUP:
        return 1, GROUP[linear.kind]
    grid = linear.grid
    if linear.kind not in ("fp8-block", "fp8-grid", "fp8-pbwo") or grid is None or len(linear.shape) < 2:
        return 1, 1
    entry = (declared.entries or {}).get(module) if declared is not None else None
    if entry is not None and entry.group:
        return entry.group, entry.group
    if declared is not None and declared.block is not None:
        return declared.block
    if linear.kind == "fp8-pbwo":
        return 128, 128
    rows, cols = linear.shape[-2:]
    return implied_block(rows, grid.shape[-2]), implied_block(cols, grid.shape[-1])


def _trouble(module: str, linear: Linear, block: tuple[int, int], size: int) -> str:
    leaf = module.rpartition(".")[2]
    if len(linear.shape) < 2:
        return ""
    rows, cols = linear.shape[-2:]
    if leaf in COLUMN_PARALLEL:
        return _cut(leaf, "rows", rows, block[0], size)
    if leaf in ROW_PARALLEL:
        return _cut(leaf, "columns", cols, block[1], size)
    return ""


def _cut(leaf: str, axis: str, total: int, block: int, size: int) -> str:
    if total % size:
        return f"{leaf}: {total} {axis} do not divide"
    if size > 1 and block > 1 and (total // size) % block:
        return f"{leaf}: {total // size} {axis} a rank in blocks of {block}"
    return ""
