"""Problems that many tensors share, as one sentence each."""

from __future__ import annotations

from collections.abc import Iterable


def alike(problems: Iterable[tuple[str, str]]) -> list[str]:
    """problems: (the tensor, its reason). Each reason once, with the first tensor and how many more it has."""
    tensors: dict[str, list[str]] = {}
    for tensor, reason in problems:
        tensors.setdefault(reason, []).append(tensor)
    return [
        f"{first}{f' and {len(others):,} more' if others else ''}: {reason}"
        for reason, (first, *others) in tensors.items()
    ]
