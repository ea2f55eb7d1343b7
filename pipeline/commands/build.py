"""The command build."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import click

from shardmill.pipeline.commands.options import (
    json_option,
    out_option,
    paranoid_option,
    parent_option,
    recipe_option,
    tell,
)
from shardmill.pipeline.commands.progress import counted, human, meter
from shardmill.pipeline.manifest.lock import load_lock, lock_path
from shardmill.pipeline.recipe import read as recipes
from shardmill.pipeline.run import build as run
from shardmill.pipeline.run.prepare import prepare
from shardmill.pipeline.run.unchanged import is_unchanged
from shardmill.pipeline.stages.job import Settings, Watch


@click.command()
@recipe_option
@parent_option
@out_option
@click.option(
    "--workers", type=click.IntRange(1, 64), default=2, show_default=True, help="Shards made at a time."
)
@click.option("--kernel", type=click.Choice(["auto", "numpy", "numba"]), default="auto", show_default=True)
@click.option(
    "--passthrough",
    type=click.Choice(["copy", "reflink", "hardlink"]),
    default="copy",
    show_default=True,
    help="How an unchanged file is passed on; copied where the file systems can't. A hard link is the parent's own "
    "file: editing one edits both.",
)
@click.option("--sha256/--no-sha256", default=True, show_default=True, help="Hash every output file.")
@click.option("--expect-key", help="Refuse to build any plan but the one with this key (see plan --json).")
@click.option(
    "--scheduler", help="Address of a dask.distributed scheduler, e.g. tcp://host:8786; default: threads."
)
@paranoid_option
@json_option
def build(
    config: Path,
    parent: Path,
    out: Path,
    workers: int,
    kernel: str,
    passthrough: Any,
    sha256: bool,
    expect_key: str | None,
    scheduler: str | None,
    paranoid: bool,
    as_json: bool,
) -> None:
    """Do what the plan says. A build that was cut goes on where it stopped; one that is done does nothing.

    Example: shardmill build -c pipeline.toml --parent /data/parent --out /data/out
    """
    started = time.monotonic()
    if kernel == "numba" and importlib.util.find_spec("numba") is None:
        raise click.UsageError(
            "--kernel numba needs numba: pip install 'shardmill[fast]', or leave --kernel out"
        )
    recipe, lock = recipes.load(config), load_lock(lock_path(config))
    settings = Settings(workers, kernel, sha256, passthrough, paranoid, scheduler)
    if expect_key is None and is_unchanged(recipe, parent, out, settings, lock):
        _show_nothing_to_do(out, time.monotonic() - started, as_json)
        return
    prepared = prepare(recipe, parent, lock, paranoid)
    if expect_key not in (None, prepared.plan.key):
        raise click.ClickException(
            f"the plan's key is {prepared.plan.key}, not {expect_key}; nothing was written"
        )
    with meter(quiet=as_json) as progress:
        summary = run.build(prepared, out, settings, Watch(progress.advance), progress.begin, tell)
    seconds = time.monotonic() - started
    if as_json:
        click.echo(json.dumps(_summary_json(summary, seconds)))
    else:
        _show_summary(summary, out, seconds)


def _summary_json(summary: run.Summary, seconds: float) -> dict[str, Any]:
    return {
        "made": {verdict.file: verdict.reason for verdict in summary.made},
        "resumed": list(summary.resumed),
        "files_written": list(summary.files_written),
        "bytes_read": summary.bytes_read,
        "kernel": summary.kernel,
        "plan_key": summary.plan.key,
        "seconds": round(seconds, 3),
    }


def _show_summary(summary: run.Summary, out: Path, seconds: float) -> None:
    if not summary.files_written:
        _show_nothing_to_do(out, seconds, as_json=False)
        return
    made, fresh = len(summary.made), len(summary.plan.shards) - len(summary.made)
    if fresh:
        for verdict in summary.made:
            click.echo(f"{verdict.file}: {verdict.reason}")
    resumed = f" ({len(summary.resumed)} of them before a cut)" if summary.resumed else ""
    click.echo(
        f"built {out} in {seconds:.1f} s: {counted(made, 'shard')} made{resumed}, {fresh} up to date, "
        f"{counted(len(summary.files_written), 'file')} written, {human(summary.bytes_read)} read"
    )
    click.echo(f"kernel: {summary.kernel}; recipe: {summary.plan.recipe}; plan key: {summary.plan.key}")


def _show_nothing_to_do(out: Path, seconds: float, as_json: bool) -> None:
    if as_json:
        click.echo(
            json.dumps(
                {
                    "made": {},
                    "resumed": [],
                    "files_written": [],
                    "bytes_read": 0,
                    "seconds": round(seconds, 3),
                }
            )
        )
    else:
        click.echo(f"nothing to do: {out} is up to date ({seconds:.1f} s)")
