"""How far a question has come: workers add what they have done, one caller hears of it."""

from __future__ import annotations

import mmap
from collections.abc import Callable

Heard = Callable[[int, int], None]  # bytes or blocks done, and in all


class Progress:
    """Counts up to `total`; `heard` gets the count after each step.

    `share` is for processes: each then adds to a cell of its own in memory that all see, and the caller collects.
    """

    def __init__(self, total: int, heard: Heard) -> None:
        self._total, self._heard, self._done = total, heard, 0
        self._cells: memoryview | None = None
        self._place: int | None = None
        self._collected = 0

    def add(self, count: int) -> None:
        if self._cells is not None and self._place is not None:
            self._cells[self._place] += count
            return
        self._done += count
        self._heard(self._done, self._total)

    def share(self, workers: int) -> None:
        self._cells, self._collected = memoryview(mmap.mmap(-1, 8 * workers)).cast("q"), 0

    def take(self, place: int) -> None:
        """In a worker: what it adds goes to the cell at `place`."""
        self._place = place

    def collect(self) -> None:
        """In the caller: adds what the workers have added since."""
        if self._cells is not None:
            seen = sum(self._cells)
            self.add(seen - self._collected)
            self._collected = seen
