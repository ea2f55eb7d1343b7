"""The command build where its output is a branch on a hub."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardmill.pipeline.commands.options import is_quiet, show_json, teller
from shardmill.pipeline.commands.printable import printable
from shardmill.pipeline.commands.progress import counted, human, meter
from shardmill.pipeline.commands.publish import HubPlace, sentence, ways_of
from shardmill.pipeline.container.hub import place_of
from shardmill.pipeline.container.side_files import missed
from shardmill.pipeline.stages.job import Prepared, Settings, Watch

if TYPE_CHECKING:
    from shardmill.pipeline.publish.facts import Place
    from shardmill.pipeline.stream.build import Streamed

_ODD_SHOWN = 5


class FolderOrHub(click.ParamType):  # type: ignore[type-arg]  # no generic before click 8.2
    """Becomes a folder's Path, or a Place."""

    name = "folder|hf://org/name[@branch]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | Place:
        if isinstance(value, str) and value.startswith("hf://"):
            return HubPlace().convert(value, param, ctx)
        folder = click.Path(path_type=Path, file_okay=False)
        converted: Path = folder.convert(value, param, ctx)
        return converted

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """As it is written: a place in capitals would be refused."""
        return "DIR|hf://org/name[@branch]"


hub_or_folder_option = click.option(
    "-o",
    "--out",
    type=FolderOrHub(),
    required=True,
    help="Folder that the checkpoint is built in, or a branch on a hub that its shards are sent to as they are made.",
)


def build_into_hub(
    prepared: Prepared,
    place: Place,
    wished: tuple[bool, bool, str | None],
    settings: Settings,
    as_json: bool,
) -> None:
    """Builds and says what was done. wished: --create, --private and --message."""
    from shardmill.pipeline.publish.publish import Wish
    from shardmill.pipeline.stream.build import stream

    started, tell = time.monotonic(), teller()
    create, private, message = wished
    wish = Wish(private, create, message)
    with meter(quiet=as_json or is_quiet()) as progress:
        for line in missed(prepared.parent.left):
            tell(line)
        done = stream(prepared, place, wish, settings, Watch(progress.advance), progress.begin, tell)
    seconds = time.monotonic() - started
    if as_json:
        show_json("build", {**_as_json(done, place), "seconds": round(seconds, 3)})
    else:
        _show(done, prepared, place, seconds)


def _as_json(done: Streamed, place: Place) -> dict[str, Any]:
    plan = done.publication
    return {
        "made": dict(done.work.made),
        "resumed": list(done.work.resumed),
        "files_written": [step.file.name for step in plan.steps if step.way != "keep"],
        "bytes_read": done.work.bytes_read,
        "kernel": done.work.kernel,
        "workers": done.work.workers,
        "plan_key": done.plan.key,
        "odd": list(done.odd),
        "hub": {
            "place": str(place),
            "commit": done.commit,
            "unchanged": plan.changes_nothing,
            **ways_of(plan),
        },
    }


def _show(done: Streamed, prepared: Prepared, place: Place, seconds: float) -> None:
    for sentence_ in done.odd[:_ODD_SHOWN]:
        click.echo(f"warning: {printable(sentence_)}")
    if len(done.odd) > _ODD_SHOWN:
        click.echo(f"warning: {len(done.odd) - _ODD_SHOWN} more tensors like it; the manifest lists them")
    if done.publication.changes_nothing:
        click.echo(f"nothing to do: {place} is up to date at {done.commit} ({seconds:.1f} s)")
        return
    work = done.work
    resumed = f" ({len(work.resumed)} of them before an interruption)" if work.resumed else ""
    click.echo(
        f"built {place} in {seconds:.1f} s: {counted(len(work.made), 'shard')} made or read{resumed}, "
        f"{human(work.bytes_read)} read; kernel: {work.kernel}; {counted(work.workers, 'worker')}; "
        f"plan key: {done.plan.key}"
    )
    click.echo(f"{place}: {sentence(ways_of(done.publication))}")
    click.echo(f"commit {done.commit}")
    words = ["shardmill", "verify", "all", str(place), "--parent", place_of(prepared.parent.folder)]
    click.echo(f"Next:  {shlex.join(words)}")
