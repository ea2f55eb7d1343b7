"""`verify lint`: the command."""

from __future__ import annotations

from pathlib import Path

import click

from shardmill.verify.commands.options import Bar, remote_options, seed_option, source_at
from shardmill.verify.commands.output import Output, answer, output_options
from shardmill.verify.questions.lint import LintOptions, lint, parse_ignores, parse_selection
from shardmill.verify.rules.table import RULES

SIZE_MAX = 4_096  # ranks


def _sizes(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in value.split(",")) if value is not None else ()
    except ValueError:
        raise click.BadParameter("give sizes like 1,2") from None
    if any(not 0 < size <= SIZE_MAX for size in sizes):
        raise click.BadParameter(f"give sizes from 1 to {SIZE_MAX:,}")
    return sizes


def _list_rules(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        for rule in sorted(RULES.values(), key=lambda rule: rule.id):
            click.echo(f"{rule.id}  {rule.severity:<7}  {rule.slug:<24}  {rule.sentence}")
        ctx.exit()


@click.command("lint")
@click.argument("place", metavar="DIR")
@click.option("--headers-only", is_flag=True, help="Read no scales.")
@click.option("--sample", type=int, metavar="BYTES", help="Read at most so many bytes of scale grids.")
@click.option(
    "--tp", callback=_sizes, metavar="SIZES", help="Tensor-parallel sizes that must work, like 1,2."
)
@click.option("--select", metavar="RULES", help="Only these rules: ids, id prefixes (SM1) or slugs.")
@click.option(
    "--ignore",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Findings to leave out: lines of `RULE [PATTERN]  # reason`.",
)
@click.option(
    "--list-rules",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_rules,
    help="Show every rule, and stop.",
)
@seed_option
@remote_options
@output_options
def lint_command(
    place: str,
    headers_only: bool,
    sample: int | None,
    tp: tuple[int, ...],
    select: str | None,
    ignore: Path | None,
    seed: int | None,
    output: Output,
) -> None:
    """Does the checkpoint in DIR make sense: its scales, names, groups and config?

    \b
    Example: shardmill verify lint build/checkpoint --tp 1,2
    """
    try:
        options = LintOptions(
            not headers_only,
            sample,
            tp,
            parse_selection(select) if select else None,
            tuple(parse_ignores(ignore.read_text(encoding="utf-8-sig").splitlines())) if ignore else (),
            seed,
        )
    except (ValueError, UnicodeDecodeError) as error:
        raise click.UsageError(str(error)) from None
    source = source_at(place)
    with Bar() as bar:
        report = lint(source, options, bar)
    answer(report, output, source)
