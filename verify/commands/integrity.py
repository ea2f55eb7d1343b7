"""`verify integrity`: the command."""

from __future__ import annotations

import click

from shardmill.verify.commands.options import Bar, parents_at, remote_options, source_at, source_option
from shardmill.verify.commands.output import Output, answer, output_options
from shardmill.verify.questions.integrity import integrity


@click.command("integrity")
@click.argument("place", metavar="DIR")
@click.option("--parent", metavar="DIR", help="Also compare with the parent checkpoint there.")
@click.option(
    "--headers-only/--data",
    default=None,
    help="Headers alone, or all data.  [default: data of a folder, headers of a remote place]",
)
@source_option
@remote_options
@output_options
def integrity_command(
    place: str, parent: str | None, headers_only: bool | None, others: tuple[str, ...], output: Output
) -> None:
    """Is the checkpoint in DIR whole, and is it what was published?

    \b
    Example: shardmill verify integrity build/checkpoint --parent build/toy-parent
    """
    source = source_at(place)
    origin = parents_at(parent, others)
    with Bar() as bar:
        report = integrity(source, origin, None if headers_only is None else not headers_only, bar)
    answer(report, output, source, *([origin] if origin else []))
