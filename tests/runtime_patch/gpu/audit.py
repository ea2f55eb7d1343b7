"""The indexer's choice at a small budget against its choice in one tile, row by row, inside one running server.

Where the two sets of pools differ, their scores must not: the rows then hold equal scores at the edge, of which either
choice is a best one. Scores of the tiles are compared with those of the one tile too, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

EXAMPLES = 12


@dataclass
class Audit:
    """Counts over all calls. `parted` rows chose other pools; of those `unequal`, with other scores, must be none."""

    budget_bytes: int
    calls: int = 0
    rows: int = 0
    parted: int = 0
    unequal: int = 0
    tied: int = 0  # rows with more scores equal to the last chosen one than places for them
    tied_lowest: int = 0  # of those, rows where vLLM's kernel took the lowest pools
    scores: int = 0
    scores_parted: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)


def install(budget_bytes: int) -> Audit:
    """Wraps the bounded indexer's selection: it answers as before, and is asked again at `budget_bytes`."""
    from shardmill.runtime_patch import indexer

    found, original = Audit(budget_bytes), indexer.select_pools

    def audited(op: Any, chunk: Any, q: Any, weights: Any, starts: Any, ends: Any, k: int) -> Any:
        whole = original(op, chunk, q, weights, starts, ends, k)
        usual, op.budget_bytes = op.budget_bytes, budget_bytes
        try:
            tiled = original(op, chunk, q, weights, starts, ends, k)
            tiles = list(_scores(op, chunk, q, weights, starts, ends, k))
        finally:
            op.budget_bytes = usual
        ((_, one),) = _scores(op, chunk, q, weights, starts, ends, k)
        _count(found, whole, tiled, one, tiles, (ends - starts).long())
        return whole

    indexer.select_pools = audited
    return found


def _scores(op: Any, chunk: Any, q: Any, weights: Any, starts: Any, ends: Any, k: int) -> Any:
    """(first pool, f32 [rows, pools]) of each tile at the indexer's budget; what a row may not see is -inf."""
    import torch

    from shardmill.runtime_patch import indexer, tiling

    plan = tiling.plan(
        rows=q.shape[0],
        requests=chunk.num_reqs,
        longest=chunk.max_seqlen_k,
        selected=k,
        page=op.k_cache.kv_cache.shape[1],
        gathered=op.pools_max,
        budget_bytes=op.budget_bytes,
    )
    request = torch.searchsorted(chunk.local_cu_seq_lens[1:], starts, right=True).clamp_max(
        chunk.num_reqs - 1
    )
    for first, keys, scales, offsets in indexer._gathered_tiles(op, chunk, plan):
        lengths = (ends - starts - first).clamp(0, plan.pools)
        parts = []
        for begin in range(0, q.shape[0], plan.rows):
            part = slice(begin, min(begin + plan.rows, q.shape[0]))
            begins = offsets[request[part]]
            scores = indexer._logits(q[part], keys, scales, weights[part], begins, lengths[part], plan.pools)
            columns = torch.arange(scores.shape[1], device=q.device)
            parts.append(
                scores.masked_fill(columns >= lengths[part][:, None], float("-inf"))[:, : plan.pools]
            )
        yield first, torch.cat(parts)


def _count(found: Audit, whole: Any, tiled: Any, one: Any, tiles: Any, lengths: Any) -> None:
    import torch

    rows = torch.arange(len(whole), device=whole.device)
    left, right = whole.sort(1).values, tiled.sort(1).values
    parted = (left != right).any(1)
    of_left, of_right = _chosen(one, left), _chosen(one, right)
    unequal = parted & (of_left != of_right).any(1)
    edge = of_left[:, :1]
    equal = (one == edge) & torch.isfinite(one)
    taken = torch.zeros_like(one, dtype=torch.bool)
    taken[rows[:, None].expand_as(left)[left >= 0], left[left >= 0].long()] = True
    places = (equal & taken).sum(1)
    tied = (equal.sum(1) > places) & (lengths > left.shape[1])
    lowest = (equal & (equal.cumsum(1) <= places[:, None])) == (equal & taken)
    found.calls += 1
    found.rows += len(rows)
    found.parted += int(parted.sum())
    found.unequal += int(unequal.sum())
    found.tied += int(tied.sum())
    found.tied_lowest += int((tied & lowest.all(1)).sum())
    for first, tile in tiles:
        same = one[:, first : first + tile.shape[1]]
        tile = tile[:, : same.shape[1]]
        found.scores += int(torch.isfinite(same).sum())
        found.scores_parted += int((same != tile).sum())
    for row in torch.nonzero(parted | tied)[: EXAMPLES - len(found.examples), 0].tolist():
        found.examples.append(
            {
                "row": row,
                "pools": int(lengths[row]),
                "edge": float(edge[row, 0]),
                "equal": torch.nonzero(equal[row])[:8, 0].tolist(),
                "taken": torch.nonzero(equal[row] & taken[row])[:8, 0].tolist(),
                "only whole": sorted(set(left[row].tolist()) - set(right[row].tolist()))[:8],
                "only tiled": sorted(set(right[row].tolist()) - set(left[row].tolist()))[:8],
            }
        )


def _chosen(scores: Any, pools: Any) -> Any:
    """The scores of the chosen pools, ascending; what was not chosen (-1) is +inf."""
    return scores.gather(1, pools.clamp_min(0).long()).masked_fill(pools < 0, float("inf")).sort(1).values
