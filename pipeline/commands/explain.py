"""The command explain."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pipeline import run
from pipeline.commands.options import (
    json_option,
    out_option,
    paranoid_option,
    parent_option,
    planned,
    recipe_option,
    tell,
)
from pipeline.job import Settings
from pipeline.stale import Verdict
from verify.accept.bound import stale_sentences


@click.command()
@recipe_option
@parent_option
@out_option
@paranoid_option
@json_option
def explain(config: Path, parent: Path, out: Path, paranoid: bool, as_json: bool) -> None:
    """What a build would do now, with one sentence why, for each shard. Writes nothing.

    Example: shardmill explain -c pipeline.toml --parent /data/parent --out /data/out
    """
    prepared = planned(config, parent, paranoid)
    verdicts = run.explain(prepared, out, Settings(paranoid=paranoid), tell)
    stale = [verdict for verdict in verdicts if verdict.reason]
    runs = list(stale_sentences(out, will_change=bool(stale)))
    if as_json:
        shards = {verdict.file: verdict.reason for verdict in verdicts}
        staged_files = [verdict.file for verdict in verdicts if verdict.staged]
        click.echo(json.dumps({"shards": shards, "staged": staged_files, "accept_runs": runs}))
        return
    for verdict in verdicts:
        click.echo(f"{verdict.file}: {_what_becomes_of(verdict)}")
    staged = sum(verdict.staged for verdict in stale)
    made = f", {staged} made before are still to be published" if staged else ""
    click.echo(
        f"{len(stale) - staged} of {len(verdicts)} shards will be made{made}; the others are up to date"
    )
    for sentence in runs:
        click.echo(sentence)


def _what_becomes_of(verdict: Verdict) -> str:
    if verdict.reason is None:
        return "is up to date"
    if verdict.staged:
        return f"is made and still to be published: {verdict.reason}"
    return f"will be made: {verdict.reason}"
