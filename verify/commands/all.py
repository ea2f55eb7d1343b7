"""`verify all`: every question that applies, one after the other, and one verdict."""

from __future__ import annotations

from pathlib import Path

import click

from shardmill.verify.commands.options import (
    Bar,
    parents_at,
    remote_options,
    seed_option,
    source_at,
    source_option,
    unasked,
)
from shardmill.verify.commands.output import Output, answer, output_options
from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.lint import LintOptions, lint
from shardmill.verify.questions.loads import loads
from shardmill.verify.questions.reproduce import reproduce
from shardmill.verify.questions.roundtrip import Limits, roundtrip
from shardmill.verify.questions.signature import SIGNATURE, check_signature
from shardmill.verify.questions.signers import PublicKey, SigningError
from shardmill.verify.reading.source import Folder, Source
from shardmill.verify.rules.findings import Finding, Report


@click.command("all")
@click.argument("place", metavar="DIR")
@click.option(
    "--parent", metavar="DIR", help="The checkpoint that it was made from: adds roundtrip and reproduce."
)
@click.option(
    "--public-key",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="PEM",
    help="The publisher's key: adds signature.",
)
@source_option
@seed_option
@remote_options
@output_options
def all_command(
    place: str,
    parent: str | None,
    public_key: Path | None,
    others: tuple[str, ...],
    seed: int | None,
    output: Output,
) -> None:
    """Ask every question that applies to the checkpoint in DIR.

    \b
    Example: shardmill verify all build/checkpoint --parent build/toy-parent
    """
    source = source_at(place)
    origin = parents_at(parent, others)
    with Bar() as bar:
        reports = ask_all(source, origin, bar, seed)
    reports.append(_signature(source, public_key))
    answer(together(reports), output, source, *([origin] if origin else []))


def ask_all(source: Source, parent: Source | None, bar: Bar, seed: int | None = None) -> list[Report]:
    """The answers in order. Where there are no weights, `integrity` says so and nothing else can be asked."""
    whole = integrity(source, parent, progress=bar.of("integrity"))
    if whole.count("no-weights"):
        others = ("lint", "loads", "roundtrip", "reproduce")
        return [whole, *(_unasked(question, "there are no weights here") for question in others)]
    reports = [
        whole,
        lint(source, LintOptions(seed=seed), bar.of("lint")),
        unasked(loads(source, beside=True), "loads"),
    ]
    if parent is None:
        return [
            *reports,
            *(_unasked(question, "no --parent was given") for question in ("roundtrip", "reproduce")),
        ]
    return [
        *reports,
        unasked(roundtrip(source, parent, Limits(), progress=bar.of("roundtrip")), "values"),
        unasked(reproduce(source, parent, seed=seed, progress=bar.of("reproduce")), "blocks"),
    ]


def _unasked(question: str, reason: str) -> Report:
    report = Report(question)
    report.cannot_ask(reason)
    return report


def _signature(source: Source, public_key: Path | None) -> Report:
    if public_key is not None and isinstance(source, Folder):
        try:
            return check_signature(source.root, PublicKey(public_key))
        except SigningError as error:
            raise click.UsageError(str(error)) from None
    if public_key is not None:
        return _unasked("signature", "only a folder has files to hash")
    signed = isinstance(source, Folder) and (source.root / SIGNATURE).is_file()
    return _unasked("signature", f"{f'{SIGNATURE} is here, but ' if signed else ''}no --public-key was given")


def together(reports: list[Report]) -> Report:
    """One report of all: each finding once, what was and was not checked by question."""
    whole = Report("all")
    seen: set[Finding] = set()
    for report in reports:
        for finding in report.findings:
            if finding not in seen:
                seen.add(finding)
                whole.add(finding)
        whole.more |= report.more
        for topic in report.checked:
            whole.checks(f"{report.question}: {topic}")
        for topic, reason in report.not_checked.items():
            whole.leaves_out(f"{report.question}: {topic}", reason)
        whole.not_asked |= report.not_asked
        whole.facts[report.question] = {"verdict": _verdict(report), **report.facts}
    whole.fine, whole.coverage = reports[0].fine, reports[0].coverage
    return whole


def _verdict(report: Report) -> str:
    if report.question in report.not_asked:
        return f"not asked, because {report.not_asked[report.question]}"
    return "no finding in what was judged" if report.status == "partial" else report.status
