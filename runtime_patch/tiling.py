"""How a prefill of the sparse indexer is cut so that its scratch does not grow with the context.

The indexer scores every query row against every pool of four tokens. A tile is `pools` pools of each request in
the batch by `rows` query rows. Its scratch is the gathered keys, the logits, and the keys of the two-level top-k.
Plain integers: neither torch nor vLLM is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardmill.runtime_patch.errors import PatchError

POOL_BYTES = 132  # a pool's 128 E4M3 codes and one f32 scale
LOGIT_BYTES = 4
WINNERS = 3  # tiles whose winners stand beside the best so far
# A row and selected pool: score and index in each column of the winners, and while a tile is added its column as
# int32 and int64, its score, its index, and the masks.
SELECTION_BYTES = 8 * (1 + WINNERS) + 4 + 8 + 4 + 8 + 2


@dataclass(frozen=True, slots=True)
class Tiling:
    """rows x pools of one tile, for `requests` requests."""

    rows: int
    pools: int
    requests: int
    selected: int

    @property
    def gathered(self) -> int:
        """Pools whose keys are gathered at a time."""
        return self.pools * self.requests

    @property
    def scratch_bytes(self) -> int:
        return self.gathered * POOL_BYTES + self.rows * row_bytes(self.pools, self.selected)


def row_bytes(pools: int, selected: int) -> int:
    return pools * LOGIT_BYTES + selected * SELECTION_BYTES


def gathered_most(requests_most: int, page: int, budget_bytes: int) -> int:
    """Pools whose keys may lie gathered at a time: a quarter of the budget, and a page of every request at least."""
    return max(budget_bytes // 4 // POOL_BYTES, requests_most * page)


def plan(
    *, rows: int, requests: int, longest: int, selected: int, page: int, gathered: int, budget_bytes: int
) -> Tiling:
    """The tiling of `rows` query rows over `requests` requests, the longest of `longest` pools, within the budget.

    `page` is the number of pools of a cache page: a tile begins at a page. `gathered` bounds the pools of all
    requests together. All rows at once and as many pools as then fit: few tiles, and the logits kernel is busiest
    with many rows. Where not even a page fits so, rows are cut, evenly. Raises PatchError where the budget does not
    hold a single row.
    """
    beside = (budget_bytes - rows * selected * SELECTION_BYTES) // (
        rows * LOGIT_BYTES + requests * POOL_BYTES
    )
    most = min(beside, gathered // requests, -(-longest // page) * page)
    pools = max(page, most // page * page)
    fitting = (budget_bytes - pools * requests * POOL_BYTES) // row_bytes(pools, selected)
    if fitting < 1:
        least = page * requests * POOL_BYTES + row_bytes(page, selected)
        raise PatchError(
            f"VLLM_KVQ_INDEXER_MIB: {budget_bytes} bytes hold no tile of {requests} requests; at least {least} needed"
        )
    parts = -(-rows // fitting)
    return Tiling(-(-rows // parts), pools, requests, selected)
