"""`verify diff`, `verify roundtrip`, `verify reproduce`: the questions about two checkpoints."""

from __future__ import annotations

import click

from shardmill.verify.commands.options import (
    Bar,
    parents_at,
    remote_options,
    seed_option,
    source_at,
    source_option,
)
from shardmill.verify.commands.output import Output, answer, output_options
from shardmill.verify.formats.encode import RECIPES
from shardmill.verify.questions.diff import diff
from shardmill.verify.questions.reproduce import BLOCKS, reproduce
from shardmill.verify.questions.roundtrip import Limits, roundtrip
from shardmill.verify.reading.source import Source
from shardmill.verify.rules.findings import Report


@click.command("diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--bytes", "by_bytes", is_flag=True, help="Read the data even where both have a manifest.")
@source_option
@remote_options
@output_options
def diff_command(a: str, b: str, by_bytes: bool, others: tuple[str, ...], output: Output) -> None:
    """What differs between checkpoint A (parent, or the older release) and B?

    \b
    Example: shardmill verify diff build/toy-parent build/checkpoint
    """
    first, second = parents_at(a, others), source_at(b)
    assert first is not None
    with Bar() as bar:
        report = diff(first, second, by_bytes, bar)
    answer(report, output, first, second)


@click.command("roundtrip")
@click.argument("place", metavar="DIR")
@click.option("--parent", required=True, metavar="DIR", help="The checkpoint that it was made from.")
@click.option("--all", "everything", is_flag=True, help="Also weights that have the parent's own form.")
@click.option("--max-error", type=float, help="Largest relative error of an FP8 weight.  [default: 0.05]")
@click.option("--min-cosine", type=float, help="Smallest cosine of a weight.  [default: 0.985]")
@source_option
@remote_options
@output_options
def roundtrip_command(
    place: str,
    parent: str,
    everything: bool,
    max_error: float | None,
    min_cosine: float | None,
    others: tuple[str, ...],
    output: Output,
) -> None:
    """How much did the weights in DIR lose against their parent?

    \b
    Example: shardmill verify roundtrip build/checkpoint --parent build/toy-parent
    """
    usual = Limits()
    limits = Limits(
        {**usual.error, "fp8": usual.error["fp8"] if max_error is None else max_error},
        cosine=usual.cosine if min_cosine is None else dict.fromkeys(usual.cosine, min_cosine),
    )
    source, origin = source_at(place), parents_at(parent, others)
    assert origin is not None
    with Bar() as bar:
        report = roundtrip(source, origin, limits, everything, bar)
    _refuse_unasked(report, "values", origin)
    answer(report, output, source, origin)


@click.command("reproduce")
@click.argument("place", metavar="DIR")
@click.option("--parent", required=True, metavar="DIR", help="The checkpoint that it was made from.")
@click.option(
    "--blocks",
    type=click.IntRange(1),
    default=BLOCKS,
    show_default=True,
    help="How many blocks are drawn and compared.",
)
@click.option("--all", "everything", is_flag=True, help="Compare every block.")
@seed_option
@click.option(
    "--numerics",
    "--recipe",  # its name before manifest format 2, for one release
    "numerics",
    type=click.Choice(RECIPES),
    help="Those of a checkpoint that has no manifest to name them.  (--recipe is its old name.)",
)
@source_option
@remote_options
@output_options
def reproduce_command(
    place: str,
    parent: str,
    blocks: int,
    everything: bool,
    seed: int | None,
    numerics: str | None,
    others: tuple[str, ...],
    output: Output,
) -> None:
    """Are the blocks in DIR, bit for bit, what their numerics make of the parent?

    \b
    Example: shardmill verify reproduce build/checkpoint --parent build/toy-parent --all
    """
    source, origin = source_at(place), parents_at(parent, others)
    assert origin is not None
    with Bar() as bar:
        report = reproduce(source, origin, None if everything else blocks, seed, numerics, bar)
    _refuse_unasked(report, "blocks", origin)
    answer(report, output, source, origin)


def _refuse_unasked(report: Report, topic: str, parent: Source) -> None:
    """A pair of which nothing could be compared has not been judged: that is a wrong call, not a clean answer."""
    if topic in report.not_checked and not report.findings:
        holds_weights = any(file.endswith(".safetensors") for file in parent.files())
        reason = report.not_checked[topic] if holds_weights else f"{parent.where} holds no weights"
        raise click.UsageError(f"nothing was compared: {reason}; give the parent that DIR was made from")
