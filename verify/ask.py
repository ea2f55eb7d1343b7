"""What the commands share: options, where a checkpoint is, progress, printing, the exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from verify.findings import Report
from verify.show import show
from verify.source import Folder, Source

F = TypeVar("F", bound=Callable[..., Any])

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")


def source_at(place: str) -> Source:
    """The folder, file, http(s) address or hf:// repository at `place`. Raises click.UsageError if there is none."""
    if place.startswith(("http://", "https://", "hf://")):
        from verify.remote_places import PlaceError, hub_repository, web_folder

        try:
            return hub_repository(place) if place.startswith("hf://") else web_folder(place)
        except PlaceError as error:
            raise click.UsageError(str(error)) from None
    path = Path(place)
    if not path.exists():
        raise click.UsageError(f"{place}: there is no such folder or file.")
    if path.is_file() and path.suffix != ".safetensors":
        raise click.UsageError(f"{place}: give a checkpoint's folder or a .safetensors file.")
    return Folder(path)


def answer(report: Report, as_json: bool, *sources: Source) -> None:
    """Prints the report and ends the process with its exit code."""
    for source in sources:
        if source.remote:
            report.facts["read"] = f"{source.where}, {source.transferred:,} bytes transferred"
    if as_json:
        click.echo(report.as_json())
    else:
        show(report, Console(highlight=False))
    sys.exit(report.exit_code)


class Bar:
    """A progress bar on stderr where that is a terminal; silence elsewhere."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=None)

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
