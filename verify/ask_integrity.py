"""`verify integrity`: the command."""

from __future__ import annotations

import click

from verify.ask import Bar, answer, as_json, source_at
from verify.integrity import integrity


@click.command("integrity")
@click.argument("place", metavar="DIR")
@click.option("--parent", metavar="DIR", help="Also compare with the parent checkpoint there.")
@click.option("--headers-only", is_flag=True, help="Read headers, index, config and manifest; no data.")
@as_json
def integrity_command(place: str, parent: str | None, headers_only: bool, as_json: bool) -> None:
    """Is the checkpoint in DIR whole, and is it what was published?

    \b
    Example: shardmill verify integrity build/checkpoint --parent build/toy-parent
    """
    source = source_at(place)
    with Bar() as bar:
        report = integrity(source, source_at(parent) if parent else None, not headers_only, bar)
    answer(report, as_json)
