"""Progress of a long run: a bar with bytes, rate and time left; plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import click

if TYPE_CHECKING:
    from rich.progress import Progress

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_FRAMES = 0.1


class Meter(Protocol):
    """Hears how many bytes there will be, then of each count that is done."""

    def begin(self, total: int) -> None: ...

    def advance(self, count: int) -> None: ...


@contextmanager
def meter(quiet: bool, what: str = "building") -> Iterator[Meter]:
    """The Meter that fits standard error: none, a bar, or lines."""
    if quiet:
        yield _Silent()
    elif sys.stderr.isatty():
        with _bar() as progress:
            yield _Bar(progress, what)
    else:
        yield _Lines()


class _Silent:
    def begin(self, total: int) -> None:
        pass

    def advance(self, count: int) -> None:
        pass


def _bar() -> Progress:
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    # No thread of its own: a build forks its workers, and a lock that another thread holds would stay held in them.
    return progress.Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)


class _Bar:
    def __init__(self, progress: Progress, what: str) -> None:
        self._progress = progress
        self._task = progress.add_task(what, total=None)
        self._drawn = 0.0

    def begin(self, total: int) -> None:
        self._progress.update(self._task, total=total)

    def advance(self, count: int) -> None:
        self._progress.advance(self._task, count)
        now = time.monotonic()
        if now - self._drawn >= _SECONDS_BETWEEN_FRAMES:
            self._drawn = now
            self._progress.refresh()


class _Lines:
    def __init__(self) -> None:
        self.begin(0)

    def begin(self, total: int) -> None:
        self._total, self._done = total, 0
        self._started = self._told = time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._told >= _SECONDS_BETWEEN_LINES:
            self._told = now
            rate = self._done / (now - self._started)
            left = (self._total - self._done) / rate
            line = f"{human(self._done)} of {human(self._total)}, {human(int(rate))}/s, {left:.0f} s left"
            click.echo(line, err=True)


def counted(count: int, what: str) -> str:
    """1, "shard" -> '1 shard'; 2650, "tensor" -> '2,650 tensors'."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def human(count: int) -> str:
    """Bytes for people: 1536 -> '1.5 KiB'."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
