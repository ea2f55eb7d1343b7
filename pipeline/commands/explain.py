"""The command explain."""

from __future__ import annotations

from pathlib import Path

import click

from shardmill.pipeline.commands.options import (
    json_option,
    out_option,
    paranoid_option,
    parent_option,
    recipe_option,
    show_json,
    source_option,
    tell,
)
from shardmill.pipeline.commands.printable import printable
from shardmill.pipeline.commands.progress import counted
from shardmill.pipeline.commands.recipe import planned
from shardmill.pipeline.run import build as run
from shardmill.pipeline.run.stale import Verdict
from shardmill.pipeline.stages.job import Settings


@click.command()
@recipe_option
@parent_option
@source_option
@out_option()
@paranoid_option
@json_option
def explain(
    recipe: Path,
    parent: Path,
    sources: tuple[tuple[str, Path], ...],
    out: Path,
    paranoid: bool,
    as_json: bool,
) -> None:
    """What a build would do now: each shard, with one sentence why, and the files beside them. Writes nothing.

    Example: shardmill explain -c pipeline.toml --parent /data/parent --out /data/out
    """
    prepared = planned(recipe, parent, paranoid, sources)
    explained = run.explain(prepared, out, Settings(paranoid=paranoid), tell)
    verdicts = explained.shards
    stale = [verdict for verdict in verdicts if verdict.reason]
    if as_json:
        shards = {verdict.file: verdict.reason for verdict in verdicts}
        staged_files = [verdict.file for verdict in verdicts if verdict.staged]
        show_json("explain", {"shards": shards, "staged": staged_files, "others": list(explained.others)})
        return
    for verdict in verdicts:
        click.echo(printable(f"{verdict.file}: {_what_becomes_of(verdict)}"))
    for name in explained.others:
        click.echo(printable(f"{name}: will be written"))
    staged = sum(verdict.staged for verdict in stale)
    click.echo(
        f"{len(stale) - staged} of {counted(len(verdicts), 'shard')} will be made"
        + (f", {staged} made before will be published" if staged else "")
        + (", the others are up to date" if len(stale) < len(verdicts) else "")
    )


def _what_becomes_of(verdict: Verdict) -> str:
    if verdict.reason is None:
        return "is up to date"
    if verdict.staged:
        return "is made and will be published"
    return f"will be made: {verdict.reason}"
