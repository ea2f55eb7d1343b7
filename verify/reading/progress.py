"""How far a question has come: threads add what they have done, one caller hears of it."""

from __future__ import annotations

from collections.abc import Callable

Heard = Callable[[int, int], None]  # bytes or blocks done, and in all


class Progress:
    """Counts up to `total`; `heard` gets the count after each step."""

    def __init__(self, total: int, heard: Heard) -> None:
        self._total, self._heard, self._done = total, heard, 0

    def add(self, count: int) -> None:
        self._done += count
        self._heard(self._done, self._total)
