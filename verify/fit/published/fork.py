"""The published fork's KV arithmetic: a second model, for the figures of the published card alone.

The fork stands on an older branch than vLLM 0.33.0: 2,304 tokens a block, 37 B a token and layer for the pooled index
and its alignment, and no page padding of the states. The formula was inferred from published figures (6,352 and 6,016
B a token, 8,060 against a measured 8,050); its code was not seen.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardmill.verify.fit.layers import state_bytes
from shardmill.verify.fit.planner import ceil_div
from shardmill.verify.fit.preset import ROW_BYTES, Preset
from shardmill.verify.fit.shape import Linear, Shape

NAME = "published-fork"
BLOCK_TOKENS = 2304
TAIL_BYTES = 37  # 33 B of pooled index entry and 4 B of alignment, per token and layer


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """What the planner of the fork needs for one request; the same questions as `planner.KvPlan` answers."""

    token_bytes: int
    state_bytes: int

    def need_bytes(self, tokens: int) -> int:
        return self.token_bytes * ceil_div(tokens, BLOCK_TOKENS) * BLOCK_TOKENS + self.state_bytes

    def bytes_per_token(self, max_len: int) -> float:
        return self.need_bytes(max_len) / max_len

    def pool_tokens(self, pool_bytes: int, max_len: int) -> int:
        return int(pool_bytes / self.bytes_per_token(max_len))

    def max_context(self, pool_bytes: int, limit: int) -> int:
        blocks = max(pool_bytes - self.state_bytes, 0) // (self.token_bytes * BLOCK_TOKENS)
        return min(blocks * BLOCK_TOKENS, limit)


def plan_fork(shape: Shape, preset: Preset) -> ForkPlan:
    """The fork's plan. States: two, one per draft token, and one more, as its prefix caching holds them."""
    linear = [layer for layer in shape.layers if isinstance(layer, Linear)]
    paged = len(shape.layers) - len(linear) + (len(shape.draft_layers) if preset.draft_tokens else 0)
    states = sum(state_bytes(layer, preset) for layer in linear) * (3 + preset.draft_tokens)
    return ForkPlan(paged * (ROW_BYTES[preset.rung] + TAIL_BYTES), states)
