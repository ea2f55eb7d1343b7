"""The command publish."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import click

from shardmill.pipeline.commands.options import is_quiet, json_option, show_json, teller
from shardmill.pipeline.commands.printable import printable
from shardmill.pipeline.commands.progress import counted, meter
from shardmill.pipeline.errors import ShardmillError

if TYPE_CHECKING:
    from shardmill.pipeline.publish.facts import Place
    from shardmill.pipeline.publish.plan import Publication, Step, Way
    from shardmill.pipeline.publish.publish import Surveyed


class HubPlace(click.ParamType):  # type: ignore[type-arg]  # no generic before click 8.2
    """Becomes a Place; what names none is a usage error."""

    name = "hf://org/name[@revision]"

    def __init__(self, commits: bool = False) -> None:
        self._commits = commits

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Place:
        from shardmill.pipeline.publish.facts import parse_place, refuse_commit

        try:
            place = parse_place(value)
            if not self._commits:
                refuse_commit(place)
        except ShardmillError as error:
            self.fail(str(error), param, ctx)
        return place


class HubOrFolder(HubPlace):
    """Becomes a Place, or the Path of a folder, which must not look like a repository's name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = value if isinstance(value, str) else ""
        if path.startswith("file://"):
            path = unquote(path.removeprefix("file://"))
        if path.startswith(("/", "./", "../")):
            return Path(path)
        if isinstance(value, str) and not value.startswith("hf://"):
            self.fail(
                f"{value}: is no place to publish to; write hf://org/name, or a folder as /path, ./path or file:///path",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.argument("place", metavar="hf://org/name[@branch]|FOLDER", type=HubOrFolder())
@click.option("--dry-run", is_flag=True, help="Tell what would be sent, copied and deleted; change nothing.")
@click.option("--create", is_flag=True, help="Make the repository or branch where there is none.")
@click.option("--private", is_flag=True, help="Make the repository private; one that is public is refused.")
@click.option("--message", help="The commit's message; by default it names the recipe.")
@click.option(
    "--parent",
    type=HubPlace(commits=True),
    metavar="hf://org/name[@revision]",
    help="Repository to copy unchanged files from; by default the parent that the manifest names.",
)
@click.option(
    "--workers", type=click.IntRange(1, 16), default=2, show_default=True, help="Files sent at a time."
)
@json_option
def publish(
    folder: Path,
    place: Place | Path,
    dry_run: bool,
    create: bool,
    private: bool,
    message: str | None,
    parent: Place | None,
    workers: int,
    as_json: bool,
) -> None:
    """Publish the checkpoint in DIR: copied by the hub where it has the bytes, sent where not, shown in one commit.

    An interrupted publication goes on where it stopped. Files that DIR lacks are deleted from the branch. A FOLDER
    (/path, ./path, file:///path) becomes a copy without the build's memory, read back, whole or not at all.

    Example: shardmill publish build/checkpoint hf://org/name --create --dry-run
    """
    if isinstance(place, Path):
        if create or private or message or parent:
            raise click.UsageError(
                "--create, --private, --message and --parent go with hf://org/name; leave them out"
            )
        _into_folder(folder, place, dry_run, as_json)
        return
    from shardmill.pipeline.publish.publish import Wish, survey
    from shardmill.pipeline.publish.publish import publish as run

    wish = Wish(private, create, message, parent, workers)
    tell = teller()
    surveyed = survey(folder, place, wish, tell)
    commit = None
    if not dry_run:
        with meter(quiet=as_json or is_quiet(), what="sending") as progress:
            commit = run(surveyed, wish, _nothing if as_json else tell, progress.begin, progress.advance)
    facts = _facts(surveyed, commit)
    if as_json:
        show_json("publish", facts)
    else:
        _show(facts, dry_run)


def _into_folder(folder: Path, target: Path, dry_run: bool, as_json: bool) -> None:
    from shardmill.pipeline.publish.folder import copy, plan_copy

    copying = plan_copy(folder, target)
    if not dry_run:
        with meter(quiet=as_json or is_quiet(), what="copying") as progress:
            copy(copying, progress.begin, progress.advance)
    facts = {
        "place": target.absolute().as_uri(),
        "commit": None,
        "message": None,
        "unchanged": copying.plan.changes_nothing,
        **ways_of(copying.plan),
    }
    if as_json:
        show_json("publish", facts)
    else:
        _show(facts, dry_run)


def _nothing(line: str) -> None:
    return None


def _facts(surveyed: Surveyed, commit: str | None) -> dict[str, Any]:
    return {
        "place": str(surveyed.place),
        "commit": commit,
        "message": surveyed.message,
        "unchanged": surveyed.plan.changes_nothing and surveyed.head is not None,
        **ways_of(surveyed.plan),
    }


def ways_of(plan: Publication) -> dict[str, Any]:
    """What a publication sends, copies, finds, keeps and deletes: files and bytes of each."""
    words: dict[str, Way] = {"sent": "send", "copied": "copy", "found": "found", "kept": "keep"}
    ways = {word: _way(plan.of(way)) for word, way in words.items()}
    deleted = {file.name: file.bytes for file in plan.deleted}
    return {**ways, "deleted": {"bytes": sum(deleted.values()), "files": deleted}}


def _way(steps: Sequence[Step]) -> dict[str, Any]:
    files = {step.file.name: step.file.bytes for step in steps}
    sources = {
        step.file.name: f"hf://{step.source.repository}@{step.source.commit}/{step.source.name}"
        for step in steps
        if step.source
    }
    return {"bytes": sum(files.values()), "files": files} | ({"from": sources} if sources else {})


def _show(facts: dict[str, Any], dry_run: bool) -> None:
    if dry_run:
        for word in ("sent", "copied", "deleted"):
            for name, size in facts[word]["files"].items():
                click.echo(f"would be {word}: {printable(name)}: {size:,} bytes")
    if facts["unchanged"]:
        where = f" at {facts['commit'] or 'its head'}" if facts["message"] is not None else ""
        click.echo(f"nothing to do: {facts['place']} has every file{where}")
        return
    click.echo(f"{facts['place']}: {sentence(facts)}")
    if dry_run:
        click.echo("nothing was changed: this is a dry run")
    elif facts["commit"]:
        click.echo(f"commit {facts['commit']}")


def sentence(ways: dict[str, Any]) -> str:
    """'2 files sent (1,024 bytes), ...', of what `ways_of` gives."""
    return ", ".join(
        f"{counted(len(ways[word]['files']), 'file')} {word} ({ways[word]['bytes']:,} bytes)"
        for word in ("sent", "copied", "found", "kept", "deleted")
    )
