"""The commands plan, build and explain."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline import recipe as recipes
from pipeline import run
from pipeline.commands.parent import ParentFolder
from pipeline.commands.progress import human, meter
from pipeline.job import Prepared, Settings, Watch
from pipeline.lock import load_lock, lock_path
from pipeline.plan import plan_json
from pipeline.probe import Probed, probe
from pipeline.unchanged import is_unchanged
from verify.accept.bound import stale_sentences

recipe_option = click.option(
    "-c",
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("pipeline.toml"),
    show_default=True,
    help="The recipe.",
)
parent_option = click.option(
    "--parent",
    type=ParentFolder(),
    required=True,
    help="Folder of the parent checkpoint, or hf://org/repo@revision.",
)
out_option = click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder that the checkpoint is built in."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
paranoid_option = click.option(
    "--paranoid", is_flag=True, help="Believe no file's stat: hash everything again."
)


@click.command()
@recipe_option
@parent_option
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder that a build would write; for the free disk."
)
@click.option(
    "--probe", "probing", is_flag=True, help="Sample blocks: which families are copies of native FP8?"
)
@json_option
def plan(config: Path, parent: Path, out: Path | None, probing: bool, as_json: bool) -> None:
    """What a build would make, from headers alone.

    Example: shardmill plan -c pipeline.toml --parent /data/parent --out /data/out
    """
    prepared = _prepare(config, parent)
    facts = plan_json(prepared.plan, prepared.parent)
    if out is not None:
        facts["disk"] = {"needed": prepared.plan.file_bytes, "free": _free(out)}
    probed: list[Probed] = probe(prepared.plan, prepared.parent) if probing else []
    if probing:
        facts["probe"] = [
            {
                "family": p.family,
                "block": [p.block.rows, p.block.cols],
                "sampled": p.sampled,
                "exact": p.exact,
            }
            for p in probed
        ]
    if as_json:
        click.echo(json.dumps(facts))
    else:
        _show_plan(prepared, facts)
        for line in probed:
            click.echo(str(line))


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
    prepared = run.prepare(recipe, parent, lock, paranoid)
    if expect_key not in (None, prepared.plan.key):
        raise click.ClickException(
            f"the plan's key is {prepared.plan.key}, not {expect_key}; nothing was written"
        )
    with meter(quiet=as_json) as progress:
        summary = run.build(prepared, out, settings, Watch(progress.advance), progress.begin, _tell)
    seconds = time.monotonic() - started
    if as_json:
        click.echo(json.dumps(_summary_json(summary, seconds)))
    else:
        _show_summary(summary, out, seconds)


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
    prepared = _prepare(config, parent, paranoid)
    verdicts = run.explain(prepared, out, Settings(paranoid=paranoid), _tell)
    stale = [verdict for verdict in verdicts if verdict.reason]
    runs = list(stale_sentences(out, will_change=bool(stale)))
    if as_json:
        shards = {verdict.file: verdict.reason for verdict in verdicts}
        click.echo(json.dumps({"shards": shards, "accept_runs": runs}))
        return
    for verdict in verdicts:
        click.echo(
            f"{verdict.file}: " + (f"will be made: {verdict.reason}" if verdict.reason else "is up to date")
        )
    click.echo(f"{len(stale)} of {len(verdicts)} shards will be made; the others are up to date")
    for sentence in runs:
        click.echo(sentence)


def _prepare(config: Path, parent: Path, paranoid: bool = False) -> Prepared:
    return run.prepare(recipes.load(config), parent, load_lock(lock_path(config)), paranoid)


def _tell(line: str) -> None:
    click.echo(line, err=True)


def _free(out: Path) -> int:
    place = out.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _show_plan(prepared: Prepared, facts: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title=escape(f"{prepared.plan.recipe}: what becomes of the parent"))
    for name in ("family", "done", "block"):
        table.add_column(name)
    for name in ("tensors", "before", "after", "scales"):
        table.add_column(name, justify="right")
    for name, family in facts["families"].items():
        block = f"[{family['block'][0]},{family['block'][1]}]" if family["block"] else ""
        sizes = [human(family[size]) for size in ("bytes_before", "bytes_after", "scale_bytes")]
        # rich reads square brackets as markup.
        table.add_row(escape(name), family["action"], escape(block), f"{family['tensors']:,}", *sizes)
    console.print(table)
    for side in ("parent", "output"):
        sums = facts[side]
        click.echo(
            f"{side}: {sums['files']} files, {sums['tensors']:,} tensors, {sums['tensor_bytes']:,} tensor bytes, "
            f"{sums['file_bytes']:,} file bytes ({human(sums['file_bytes'])})"
        )
    rewritten = len(facts["files_rewritten"])
    click.echo(
        f"{facts['converted']:,} tensors convert; {rewritten} files are rewritten, "
        f"{facts['output']['files'] - rewritten} passed on; config.json gets {facts['config_entries']:,} entries"
    )
    for name, reason in facts["left"].items():
        click.echo(f"not passed on: {name}: {reason}")
    if "disk" in facts:
        click.echo(f"disk: needs {human(facts['disk']['needed'])}, {human(facts['disk']['free'])} free")
    click.echo(_loads_line(facts["loads_at"]))
    click.echo(f"plan key: {facts['key']}")


def _loads_line(loads_at: dict[str, str]) -> str:
    loads = [size for size, answer in loads_at.items() if answer == "yes"]
    fails = [f"{size} ({answer})" for size, answer in loads_at.items() if answer != "yes"]
    return f"loads at tensor-parallel size {', '.join(loads) or 'none'}" + (
        f"; not {'; not '.join(fails)}" if fails else ""
    )


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
    resumed = f" ({len(summary.resumed)} of them before a cut)" if summary.resumed else ""
    click.echo(
        f"built {out} in {seconds:.1f} s: {made} shards made{resumed}, "
        f"{fresh} up to date, {len(summary.files_written)} files written, {human(summary.bytes_read)} read"
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
