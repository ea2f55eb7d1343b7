"""The cards: total memory, and what a worker finds free when it starts."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Card:
    """`free_at_boot` is the reading after the worker's own CUDA context exists; vLLM compares with it."""

    name: str
    total_bytes: int
    free_at_boot: int
    source: str
    sm: int = 120  # compute capability times ten: it decides which attention backend vLLM chooses

    @property
    def context_bytes(self) -> int:
        return self.total_bytes - self.free_at_boot

    def boots(self, utilization: float) -> bool:
        """vLLM refuses to start when total x utilization exceeds the memory that is free, pinned or not."""
        return self.total_bytes * utilization <= self.free_at_boot


GIB_MAX = 1 << 20
CONTEXT_GIB = 1.08  # the published card prints 93.89 of 94.97 GiB free, and calls the difference about 1.05

CARDS: dict[str, Card] = {
    "rtx-pro-6000": Card(
        "RTX PRO 6000 Blackwell, 96 GB",
        int(94.97 * GIB),
        int(93.89 * GIB),
        "measured by others: published card",
    ),
    "h200": Card(
        "H200, 141 GB", int(139.8 * GIB), int((139.8 - CONTEXT_GIB) * GIB), "context is a guess", 90
    ),
    "h100": Card(
        "H100, 80 GB", int(79.2 * GIB), int((79.2 - CONTEXT_GIB) * GIB), "total and context are guesses", 90
    ),
    "b200": Card(
        "B200, 180 GB",
        int(179.0 * GIB),
        int((179.0 - CONTEXT_GIB) * GIB),
        "total and context are guesses",
        100,
    ),
}


def custom_card(gib: float) -> Card:
    """A card of `gib` GiB with the usual context, taken for SM120. Raises ValueError for what no card has."""
    if not CONTEXT_GIB < gib < GIB_MAX:
        raise ValueError(gib)
    return Card(
        f"{gib:g} GiB", int(gib * GIB), int((gib - CONTEXT_GIB) * GIB), "total as given; context is a guess"
    )
