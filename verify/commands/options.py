"""What the commands share: options, where a checkpoint is, progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardmill.verify.reading.limits import LIMITS, Limits
from shardmill.verify.reading.parents import Parents
from shardmill.verify.reading.progress import Heard
from shardmill.verify.reading.source import Folder, Source
from shardmill.verify.rules.findings import Report, printable

if TYPE_CHECKING:
    from rich.progress import Progress

_SECONDS_BETWEEN_FRAMES = 0.1
_SECONDS_BETWEEN_LINES = 10.0

F = TypeVar("F", bound=Callable[..., Any])

seed_option = click.option(
    "--seed",
    type=click.IntRange(0),
    help="Draw the sample of an earlier answer again.  [default: drawn by the system, and printed]",
)


def remote_options(command: F) -> F:
    """--timeout and --allow-private, which hold for every remote place of the process."""
    timeout = click.option(
        "--timeout",
        type=click.FloatRange(min=1),
        metavar="SECONDS",
        expose_value=False,
        callback=_set_timeout,
        help="Of all requests to a remote place together.  [default: 600]",
    )
    private = click.option(
        "--allow-private",
        is_flag=True,
        expose_value=False,
        callback=_set_private,
        help="Follow redirects to other hosts of this network.",
    )
    return timeout(private(command))


def _set_timeout(_: click.Context, __: click.Parameter, value: float | None) -> None:
    LIMITS.seconds = Limits().seconds if value is None else value


def _set_private(_: click.Context, __: click.Parameter, value: bool) -> None:
    LIMITS.private = value


_MIRROR_NOTE = ".shardmill-hub.json"  # lies in a folder whose shards are holes behind their headers


def source_at(place: str) -> Source:
    """The folder, file, http(s) address or hf:// repository at `place`. Raises click.UsageError if there is none."""
    if place.startswith(("http://", "https://", "hf://")):
        from shardmill.verify.reading.places import PlaceError, hub_repository, web_folder

        try:
            return hub_repository(place) if place.startswith("hf://") else web_folder(place)
        except PlaceError as error:
            raise click.UsageError(printable(str(error))) from None
    path = Path(place)
    if not path.exists():
        raise click.UsageError(f"{place}: there is no such folder or file.")
    if (path / _MIRROR_NOTE).exists():
        raise click.UsageError(
            f"{place}: is a mirror of headers, whose data is on a hub; give the place itself, hf://org/repo@revision."
        )
    if path.is_file() and path.suffix != ".safetensors":
        raise click.UsageError(f"{place}: give a checkpoint's folder or a .safetensors file.")
    return Folder(path)


def unasked(report: Report, topic: str) -> Report:
    """The report, not asked where the one topic that is the question could not be looked at."""
    if topic in report.not_checked and topic not in report.checked:
        report.cannot_ask(report.not_checked[topic])
    return report


source_option = click.option(
    "--source",
    "others",
    multiple=True,
    metavar="NAME=DIR",
    help="Another checkpoint that gave tensors, by the name that the recipe gives it; may be given for each.",
)


def parents_at(parent: str | None, others: Sequence[str]) -> Source | None:
    """The parent at the place `parent` with the others beside it, each NAME=PLACE. Raises click.UsageError."""
    if parent is None:
        if others:
            raise click.UsageError("--source needs --parent: it says what else the child was made from.")
        return None
    named: dict[str, Source] = {}
    for each in others:
        name, equals, place = each.partition("=")
        if not equals or not name or not place or name in named:
            raise click.UsageError(f"--source {each}: write NAME=DIR, each name once.")
        named[name] = source_at(place)
    return Parents(source_at(parent), named) if named else source_at(parent)


class Bar:
    """Progress on stderr: a bar where that is a terminal, else a line every ten seconds; nothing under `-q`."""

    def __init__(self) -> None:
        self._bar = _terminal_bar() if sys.stderr.isatty() and not _quiet() else None
        self._lines = self._bar is None and not _quiet()
        self._question = ""
        self._started = self._shown = self._heard = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Hears of the command's own question."""
        context = click.get_current_context(silent=True)
        self._show(context.info_name or "" if context else "verify", done, total)

    def of(self, question: str) -> Heard:
        """Hears of one question of several."""
        return lambda done, total: self._show(question, done, total)

    def _show(self, question: str, done: int, total: int) -> None:
        now = time.monotonic()
        if question != self._question:  # it began when the one before was last heard of
            self._question, self._started = question, self._heard
        self._heard = now
        if self._bar is not None:
            words = f"{_counted(question, done)} of {_counted(question, total)}"
            self._bar.update(
                self._bar.task_ids[0], description=question, completed=done, total=total, words=words
            )
            if now - self._shown >= _SECONDS_BETWEEN_FRAMES:
                self._shown = now
                self._bar.refresh()
        elif self._lines and now - self._shown >= _SECONDS_BETWEEN_LINES:
            self._shown = now
            click.echo(_line(question, done, total, now - self._started), err=True)

    def __enter__(self) -> Bar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _quiet() -> bool:
    """Whether `shardmill -q` runs this. Without `shardmill` around it there is no such option."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.find_root().params.get("quiet"))


def _line(question: str, done: int, total: int, seconds: float) -> str:
    """`integrity: 1.2 GiB of 3.9 GiB, 0.3 GiB/s, 9 s left`"""
    rate = done / seconds if seconds else 0.0
    speed = f", {_counted(question, int(rate))}/s, {(total - done) / rate:.0f} s left" if rate else ""
    return f"{question}: {_counted(question, done)} of {_counted(question, total)}{speed}"


_COUNTS = {"origin": "weights", "reproduce": "blocks"}  # questions that do not count bytes


def _counted(question: str, count: int) -> str:
    """`1.2 GiB`, or `1,200 blocks` of a question that counts them."""
    if question in _COUNTS:
        return f"{count:,} {_COUNTS[question]}"
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _terminal_bar() -> Progress:
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TextColumn("{task.fields[words]}"),
        progress.TimeRemainingColumn(),
    )
    # No thread of its own: what is read is spread over forked processes, and a fork must not meet threads.
    bar = progress.Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
    bar.add_task("", total=None, words="")
    return bar
