"""`verify loads`: the command."""

from __future__ import annotations

import click

from shardmill.verify.commands.options import remote_options, source_at, unasked
from shardmill.verify.commands.output import Output, answer, output_options
from shardmill.verify.questions.loads import LOADERS, RUNTIMES, loads


@click.command("loads")
@click.argument("place", metavar="DIR")
@click.option(
    "--loader", type=click.Choice(LOADERS), help="Of one loader alone.  [default: all with a table]"
)
@click.option(
    "--runtime",
    type=click.Choice(RUNTIMES),
    help="vLLM as it ships, or with the runtime patch; left out, what the checkpoint's entries ask for.",
)
@remote_options
@output_options
def loads_command(place: str, loader: str | None, runtime: str | None, output: Output) -> None:
    """What becomes of the checkpoint in DIR in vLLM 0.33.0, transformers 5.24 and SGLang 0.5.23, weight by weight?

    \b
    Example: shardmill verify loads build/checkpoint --loader transformers
    """
    source = source_at(place)
    answer(unasked(loads(source, runtime, loader), "loads"), output, source)
