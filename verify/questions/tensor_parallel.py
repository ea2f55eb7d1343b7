"""At which tensor-parallel sizes block-quantized modules can be cut: a rank's rows must be whole blocks.

Inside a fused module every part must end on a block, so a part of 64 / TP rows counts by itself. With more ranks than
key-value heads, engines give each rank a copy of one head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardmill.verify.formats.blocks import WHOLE, Block, block_of, said_block
from shardmill.verify.formats.declared import Declaration
from shardmill.verify.formats.fused import COLUMN_PARALLEL, ROW_PARALLEL, kind_of
from shardmill.verify.formats.linear import FLAT, Linear
from shardmill.verify.rules.findings import Finding

SIZES = (1, 2, 4, 8)


def tensor_parallel(
    linears: Mapping[str, Linear], declared: Declaration | None, more: tuple[int, ...] = (), kv_heads: int = 0
) -> dict[int, str]:
    """TP size -> "" if every quantized module can be cut, else the first that can't and why."""
    verdict = dict.fromkeys(sorted({*SIZES, *more}), "")
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for module, linear in linears.items():
        key = (kind_of(module), linear.shape)
        if linear.weight is None or linear.kind in FLAT or key in seen:
            continue
        seen.add(key)
        for size in verdict:
            verdict[size] = verdict[size] or _trouble(
                module, linear, _block(linear, declared), size, kv_heads
            )
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


def _block(linear: Linear, declared: Declaration | None) -> Block:
    """(rows, columns) that a cut must not split: a scale for a whole weight or row serves every rank."""
    if linear.kind in (*WHOLE, "comfy-fp8", "bare", "other") or len(linear.shape) < 2:
        return said_block(linear, declared) or (1, 1)
    return (128, 128) if linear.kind == "fp8-pbwo" else block_of(linear, declared)


def _trouble(module: str, linear: Linear, block: tuple[int, int], size: int, kv_heads: int) -> str:
    leaf = module.rpartition(".")[2]
    if len(linear.shape) < 2:
        return ""
    rows, cols = linear.shape[-2:]
    if leaf in ("k_proj", "v_proj") and 0 < kv_heads < size:
        if size % kv_heads:
            return f"{leaf}: {kv_heads} heads do not go into {size} ranks"
        return _cut(leaf, "rows", rows, block[0], kv_heads)
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
