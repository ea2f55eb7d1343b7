"""Stretches of zero bytes, found at memory speed: a download that was preallocated and never filled looks so.

One word in each 2 KiB is looked at; only where it is zero, the strip is looked at closely. A run of 4 KiB or more holds
such a word wherever it begins, so that none is passed over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from shardmill.verify.formats.linear import U8

RUN_BYTES_MIN = 4 << 10
STEP = 256  # words of 8 bytes between two that are looked at
RUNS_MAX = 1_000  # that are kept of a tensor

Run = tuple[int, int]  # first byte, byte after the last


@dataclass(slots=True)
class ZeroRuns:
    """Fed a tensor's bytes in order. `runs`: those of `least` bytes or more; the whole tensor if it is all zero."""

    total: int
    least: int = RUN_BYTES_MIN
    runs: list[Run] = field(default_factory=list)
    _seen: int = 0
    _open: int = 0  # zero bytes at the end of what was seen

    def feed(self, strip: U8) -> None:
        if not len(strip):
            return
        if no_run(strip, self.least) and strip[-1]:
            self._close(self._seen + _leading(strip) if self._open else self._seen)
            self._seen += len(strip)
            return
        self._look(strip)

    def _look(self, strip: U8) -> None:
        """Every run of the strip, by the places of its bytes that are not zero."""
        live = np.flatnonzero(strip)
        if not len(live):
            self._open += len(strip)
            self._seen += len(strip)
            return
        self._close(self._seen + int(live[0]))
        for place in np.flatnonzero(np.diff(live) > self.least)[:RUNS_MAX]:
            self._keep(self._seen + int(live[place]) + 1, self._seen + int(live[place + 1]))
        self._open = len(strip) - int(live[-1]) - 1
        self._seen += len(strip)

    def _close(self, end: int) -> None:
        """Ends the run that is open at byte `end`."""
        self._keep(self._seen - self._open, end)
        self._open = 0

    def _keep(self, begin: int, end: int) -> None:
        if end - begin >= min(self.least, max(self.total, 1)) and len(self.runs) < RUNS_MAX:
            self.runs.append((begin, end))

    def finish(self) -> tuple[Run, ...]:
        self._close(self._seen)
        return tuple(self.runs)


def no_run(strip: U8, least: int = RUN_BYTES_MIN) -> bool:
    """Whether the words that are looked at show that no run lies in this strip alone."""
    words = strip[: len(strip) // 8 * 8].view("<u8")
    return bool(len(words)) and bool(words[:: least // 16].all())


def _leading(strip: U8) -> int:
    """Zero bytes at the front of a strip that has others too."""
    front = strip[: STEP * 8]
    live = np.flatnonzero(front)
    return int(live[0]) if len(live) else int(np.flatnonzero(strip)[0])
