"""`verify integrity`: the command."""

from __future__ import annotations

import click

from shardmill.verify.commands.options import Bar, answer, as_json, remote_options, source_at, strict
from shardmill.verify.questions.integrity import integrity


@click.command("integrity")
@click.argument("place", metavar="DIR")
@click.option("--parent", metavar="DIR", help="Also compare with the parent checkpoint there.")
@click.option(
    "--headers-only/--data",
    default=None,
    help="Headers alone, or all data.  [default: data of a folder, headers of a remote place]",
)
@remote_options
@strict
@as_json
def integrity_command(
    place: str, parent: str | None, headers_only: bool | None, strict: bool, as_json: bool
) -> None:
    """Is the checkpoint in DIR whole, and is it what was published?

    \b
    Example: shardmill verify integrity build/checkpoint --parent build/toy-parent
    """
    source = source_at(place)
    origin = source_at(parent) if parent else None
    with Bar() as bar:
        report = integrity(source, origin, None if headers_only is None else not headers_only, bar)
    answer(report, as_json, source, *([origin] if origin else []), strict=strict)
