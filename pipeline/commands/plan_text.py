"""What a plan says to a reader: a table of families, sizes, what is passed on and what is not."""

from __future__ import annotations

import sys
from typing import Any

import click
from rich.box import HEAVY_HEAD, SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from shardmill.pipeline.commands.printable import printable
from shardmill.pipeline.commands.progress import counted, human

LEFT_SHOWN = 40
_PIPED_WIDTH = 120
_ENDLESS = 1 << 16
_WIDE = 100  # columns that the whole table needs, with names as long as they usually are
_COLUMNS = ("family", "action", "block", "tensors", "before", "after", "scales")
_NEEDS_WIDTH = {"before": _WIDE, "scales": _WIDE, "after": 72, "tensors": 62}


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


def show_plan(recipe: str, facts: dict[str, Any]) -> None:
    """Prints the facts of a plan, as `plan_json` has them, with those that the command adds."""
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    table = _table(printable(recipe), facts["families"], console.width)
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
