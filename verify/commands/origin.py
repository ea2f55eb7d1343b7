"""`verify origin`: the command."""

from __future__ import annotations

import secrets

import click

from shardmill.verify.commands.options import Bar, parents_at, seed_option, source_at, source_option
from shardmill.verify.commands.output import Output, answer, output_options
from shardmill.verify.questions.origin import origin, traits


@click.command("origin")
@click.argument("place", metavar="DIR")
@click.option(
    "--parent", metavar="DIR", help="The checkpoint that it was made from; without it, traits alone."
)
@source_option
@seed_option
@output_options
def origin_command(
    place: str, parent: str | None, others: tuple[str, ...], seed: int | None, output: Output
) -> None:
    """Which tool's formula made the codes and scales in DIR?

    \b
    Example: shardmill verify origin build/checkpoint --parent build/toy-parent
    """
    source = source_at(place)
    if parent is None:
        answer(traits(source), output, source)
        return
    theirs = parents_at(parent, others)
    assert theirs is not None
    with Bar() as bar:
        report = origin(source, theirs, secrets.randbits(32) if seed is None else seed, bar)
    if "origin" in report.not_checked and not report.findings:
        raise click.UsageError(
            f"nothing was compared: {report.not_checked['origin']}; give the parent that DIR was made from"
        )
    answer(report, output, source, theirs)
