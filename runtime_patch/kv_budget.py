"""What vLLM 0.33.0's KV planner will make of a preset, known before the boot.

The planner packs one block of every attention layer together: its tokens' latent rows and indexer entries, for
all MLA layers, the draft's among them. The KDA states of a request lie in blocks of the same size, as many layers
to a block as fit. Measured against the planner itself for every rung, with and without a draft (tests/vllm).
Plain integers: neither torch nor vllm is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, lcm

from shardmill.kernels.kv_row import CANONICAL_BYTES

# GLM-5.3-Flash
MLA_LAYERS = 11
DRAFT_LAYERS = 1
KDA_LAYERS = 34
KDA_HEADS = 64
KDA_DIM = 128
CONV_TAPS = 3  # a convolution of four taps keeps three, and one more for each speculated token
INDEX_BYTES = 33  # an indexer entry of 132 B serves four tokens

# vLLM 0.33.0
STOCK_ROW_BYTES = CANONICAL_BYTES
PAGE_ROWS = 64
INDEX_PAGE_BYTES = 64 * 132
SIZING_BYTES = 512  # the bytes of a token with which vLLM sizes the hybrid block, whatever the row
BLOCK_QUANTUM = 128  # tokens
NULL_BLOCKS = 1
TAIL_BLOCKS = 1  # one block of a request for the indexer's incomplete pool


@dataclass(frozen=True, slots=True)
class Budget:
    """Of one rank: a block's tokens and bytes, the blocks that one request of full length needs, and the pool's."""

    block_tokens: int
    block_bytes: int
    request_blocks: int
    pool_blocks: int

    @property
    def least_bytes(self) -> int:
        """The smallest pool that holds one request of full length."""
        return (self.request_blocks + NULL_BLOCKS) * self.block_bytes

    @property
    def holds(self) -> bool:
        return self.pool_blocks >= self.request_blocks + NULL_BLOCKS

    @property
    def requests(self) -> float:
        """Requests of full length that the pool holds, as vLLM's log counts them."""
        return self.pool_blocks / self.request_blocks


def budget(
    *, tokens: int, row_bytes: int, pool_bytes: int, ranks: int, speculated: int, checkpoints: int
) -> Budget:
    """The planner's numbers for requests of `tokens` tokens, with prefix caching.

    speculated: tokens that the draft proposes, 0 without one; checkpoints: state blocks that the KDA prefill
    backend keeps, 1 for FlashKDA and 0 for Triton.
    """
    state = state_bytes(ranks, speculated)
    block_tokens = ceil(state / SIZING_BYTES / BLOCK_QUANTUM) * BLOCK_QUANTUM
    layers = MLA_LAYERS + (DRAFT_LAYERS if speculated else 0)
    alignment = lcm(PAGE_ROWS * row_bytes, INDEX_PAGE_BYTES)
    block_bytes = ceil(layers * block_tokens * (row_bytes + INDEX_BYTES) / alignment) * alignment
    groups = ceil(KDA_LAYERS / (block_bytes // (block_tokens * SIZING_BYTES)))
    states = 2 + speculated + checkpoints
    request = ceil(tokens / block_tokens) + groups * states + TAIL_BLOCKS
    return Budget(block_tokens, block_bytes, request, pool_bytes // block_bytes)


def state_bytes(ranks: int, speculated: int) -> int:
    """One KDA layer's state on one rank: BF16 convolution taps of q, k and v, and an f32 matrix a head."""
    heads = KDA_HEADS // ranks
    taps = (CONV_TAPS + speculated) * 3 * heads * KDA_DIM * 2
    return taps + heads * KDA_DIM * KDA_DIM * 4
