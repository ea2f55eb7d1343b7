"""`verify loads`: the command."""

from __future__ import annotations

import click

from shardmill.verify.commands.options import answer, as_json, remote_options, source_at, strict, unasked
from shardmill.verify.questions.loads import RUNTIMES, loads


@click.command("loads")
@click.argument("place", metavar="DIR")
@click.option(
    "--runtime",
    type=click.Choice(RUNTIMES),
    help="vLLM as it ships, or with the runtime patch; left out, what the checkpoint's entries ask for.",
)
@remote_options
@strict
@as_json
def loads_command(place: str, runtime: str | None, strict: bool, as_json: bool) -> None:
    """Would vLLM 0.33.0 load the checkpoint in DIR, and which module takes each tensor?

    \b
    Example: shardmill verify loads build/checkpoint --runtime stock
    """
    source = source_at(place)
    answer(unasked(loads(source, runtime), "loads"), as_json, source, strict=strict)
