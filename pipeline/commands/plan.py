"""The command plan."""

from __future__ import annotations

import secrets
import shutil
import sys
from pathlib import Path
from typing import Any

import click
from rich.box import HEAVY_HEAD, SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from shardmill.pipeline.commands.options import (
    json_option,
    lossless_option,
    out_option,
    parent_option,
    recipe_option,
    show_json,
    show_next,
    source_option,
)
from shardmill.pipeline.commands.printable import printable
from shardmill.pipeline.commands.progress import counted, human, meter
from shardmill.pipeline.commands.recipe import parent_words, planned
from shardmill.pipeline.container.hub import Mirror
from shardmill.pipeline.errors import PlanError
from shardmill.pipeline.plan.facts import plan_json
from shardmill.pipeline.recipe.shipped import is_shipped
from shardmill.pipeline.run.place import refuse_out
from shardmill.pipeline.run.probe import Probed, probe
from shardmill.pipeline.stages.job import Prepared, Settings, Watch

LEFT_SHOWN = 40
_SEED_BITS = 32  # enough that nobody can foresee the draw, few enough to type
_PIPED_WIDTH = 120
_ENDLESS = 1 << 16
_WIDE = 100  # columns that the whole table needs, with names as long as they usually are
_COLUMNS = ("family", "action", "block", "tensors", "before", "after", "scales")
_NEEDS_WIDTH = {"before": _WIDE, "scales": _WIDE, "after": 72, "tensors": 62}


@click.command()
@recipe_option
@parent_option
@source_option
@out_option(
    "Folder that a build would write; for the free disk, and whether a build can go there.", required=False
)
@click.option(
    "--probe",
    "probing",
    is_flag=True,
    help="Read some blocks of each family: which were FP8 before, so that `recover/1` gives them back exactly?",
)
@lossless_option
@click.option(
    "--seed", type=click.IntRange(0), help="Draw the blocks of --probe again, as a seed that it printed says."
)
@json_option
def plan(
    recipe: Path,
    parent: Path,
    sources: tuple[tuple[str, Path], ...],
    out: Path | None,
    probing: bool,
    lossless: bool,
    seed: int | None,
    as_json: bool,
) -> None:
    """What a build would make, from headers alone.

    Example: shardmill plan -c pipeline.toml --parent /data/parent --out /data/out
    """
    if seed is not None and not probing:
        raise click.UsageError("--seed is for --probe")
    prepared = planned(recipe, parent, sources=sources)
    if out is not None:
        refuse_out(parent, out)
    if lossless:
        refuse_losses(prepared, quiet=as_json)
    facts = plan_json(prepared.plan, prepared.parent)
    if out is not None:
        facts["disk"] = {"needed": prepared.plan.file_bytes, "free": _free(out)}
    if Mirror.of(parent):
        facts["upload"] = _upload(prepared)
    drawn = secrets.randbits(_SEED_BITS) if seed is None else seed
    probed: list[Probed] = probe(prepared.plan, prepared.parent, drawn) if probing else []
    if probing:
        facts["seed"] = drawn
        facts["probe"] = list(map(_sampled, probed))
    if as_json:
        show_json("plan", facts)
    else:
        _show_plan(prepared, facts)
        for line in probed:
            click.echo(str(line))
        if probed:
            click.echo(f"sampled by seed {drawn}; the same blocks again: --probe --seed {drawn}")
        name = prepared.plan.recipe if is_shipped(recipe) else str(recipe)
        words = ["shardmill", "build", "-c", name, *parent_words(parent, dict(sources))]
        words += ["--out", str(out) if out else "OUT"]
        show_next(*words)


def _sampled(probed: Probed) -> dict[str, Any]:
    return {
        "family": probed.family,
        "block": [probed.block.rows, probed.block.cols],
        "sampled": probed.sampled,
        "exact": probed.exact,
    }


def refuse_losses(prepared: Prepared, quiet: bool) -> None:
    """Reads what converts. Raises PlanError with every family of which a block loses something."""
    from shardmill.pipeline.run.lossless import problems

    with meter(quiet=quiet) as progress:
        progress.begin(sum(prepared.parent.tensors[name].bytes for name in prepared.plan.converted_from))
        if found := problems(prepared, Settings(lossless=True), Watch(progress.advance)):
            raise PlanError(found)


def _upload(prepared: Prepared) -> dict[str, int]:
    """Bytes of shards that `publish` would send, where the hub copies the parent's, and of all of them."""
    rewritten = [shard.header.file_bytes for shard in prepared.plan.shards if shard.rewritten]
    return {"bytes": sum(rewritten), "of": prepared.plan.file_bytes}


def _free(out: Path) -> int:
    place = out.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _table(recipe: str, families: dict[str, Any], width: int) -> Table:
    """A row a family. Where the terminal is narrow, sizes give way."""
    shown = [name for name in _COLUMNS if width >= _NEEDS_WIDTH.get(name, 0)]
    table = Table(
        title=escape(f"{recipe}: from the parent to the output"), box=SIMPLE if width < _WIDE else HEAVY_HEAD
    )
    for column in shown:
        number = column not in ("family", "action", "block")
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for name, family in families.items():
        block = f"[{family['block'][0]},{family['block'][1]}]" if family["block"] else ""
        sizes = [human(family[size]) for size in ("bytes_before", "bytes_after", "scale_bytes")]
        # rich reads square brackets as markup.
        cells = [escape(printable(name)), family["action"], escape(block), f"{family['tensors']:,}", *sizes]
        table.add_row(*(cell for cell, column in zip(cells, _COLUMNS, strict=True) if column in shown))
    return table


def _show_lines(families: dict[str, Any]) -> None:
    """A line a family, where the terminal has no room for a table with whole names."""
    for name, family in families.items():
        block = " [{},{}]".format(*family["block"]) if family["block"] else ""
        click.echo(f"{printable(name)}: {family['action']}{block}, {counted(family['tensors'], 'tensor')}")


def _show_plan(prepared: Prepared, facts: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    table = _table(printable(prepared.plan.recipe), facts["families"], console.width)
    if Measurement.get(console, console.options.update(max_width=_ENDLESS), table).maximum <= console.width:
        console.print(table)
    else:
        _show_lines(facts["families"])
    for side in ("parent", "output"):
        sums = facts[side]
        click.echo(
            f"{side}: {counted(sums['files'], 'file')}, {counted(sums['tensors'], 'tensor')}, "
            f"{sums['tensor_bytes']:,} tensor bytes, {sums['file_bytes']:,} file bytes ({human(sums['file_bytes'])})"
        )
    rewritten = len(facts["files_rewritten"])
    click.echo(
        f"{facts['converted']:,} tensors convert; {counted(rewritten, 'file')} {'is' if rewritten == 1 else 'are'} "
        f"rewritten, {facts['output']['files'] - rewritten} passed on; "
        f"config.json gets {facts['config_entries']:,} entries"
    )
    _show_sources(facts.get("sources", {}))
    _show_side_files(facts["side_files"])
    if "disk" in facts:
        click.echo(f"disk: needs {human(facts['disk']['needed'])}, {human(facts['disk']['free'])} free")
    if "upload" in facts:
        sums = facts["upload"]
        click.echo(
            f"to upload: {human(sums['bytes'])} of {human(sums['of'])}; the hub copies the rest from the parent"
        )
    click.echo(printable(_loads_line(facts["loads_at"])))
    click.echo(f"plan key: {facts['key']}")


def _show_sources(sources: dict[str, Any]) -> None:
    for name, each in sources.items():
        where = f" ({each['repository']}@{each['revision']})" if each["repository"] else ""
        click.echo(
            f"from source {name}{printable(where)}: {each['tensors']:,} tensors, {human(each['bytes'])}; "
            f"{each['replaced']:,} take the place of the parent's"
        )


def _show_side_files(side_files: dict[str, Any]) -> None:
    """What lies beside the shards: the child gets these files, and does not get those, with sizes and reasons."""
    for name, size in sorted(side_files["passed_on"].items()):
        click.echo(f"passed on: {printable(name)} ({human(size)})")
    left = sorted(side_files["left"].items())
    for name, each in left[:LEFT_SHOWN]:
        click.echo(f"not passed on: {printable(name)} ({human(each['bytes'])}): {each['reason']}")
    if len(left) > LEFT_SHOWN:
        click.echo(f"not passed on: {len(left) - LEFT_SHOWN} more files; --json lists them all")


def _loads_line(loads_at: dict[str, str]) -> str:
    loads = [size for size, answer in loads_at.items() if answer == "yes"]
    fails = [f"{size} ({answer})" for size, answer in loads_at.items() if answer != "yes"]
    return f"loads at tensor-parallel size {', '.join(loads) or 'none'}" + (
        f"; not {'; not '.join(fails)}" if fails else ""
    )
