"""`verify all`: every question that applies, one after the other, and one verdict."""

from __future__ import annotations

from pathlib import Path

import click

from shardmill.verify.commands.options import Bar, answer, as_json, source_at
from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.lint import lint
from shardmill.verify.questions.loads import loads
from shardmill.verify.questions.reproduce import reproduce
from shardmill.verify.questions.roundtrip import Limits, roundtrip
from shardmill.verify.questions.signature import SigningError, check_signature
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
    help="The publisher's: adds signature.",
)
@as_json
def all_command(place: str, parent: str | None, public_key: Path | None, as_json: bool) -> None:
    """Ask every question that applies to the checkpoint in DIR.

    \b
    Example: shardmill verify all build/checkpoint --parent build/toy-parent
    """
    source = source_at(place)
    origin = source_at(parent) if parent else None
    with Bar() as bar:
        reports = ask_all(source, origin, bar)
    reports.append(_signature(source, public_key))
    answer(together(reports), as_json, source, *([origin] if origin else []))


def ask_all(source: Source, parent: Source | None, bar: Bar) -> list[Report]:
    reports = [integrity(source, parent, progress=bar), lint(source, progress=bar), loads(source)]
    if parent is not None:
        reports += [
            roundtrip(source, parent, Limits(), progress=bar),
            reproduce(source, parent, progress=bar),
        ]
    return reports


def _signature(source: Source, public_key: Path | None) -> Report:
    if public_key is not None and isinstance(source, Folder):
        try:
            return check_signature(source.root, public_key)
        except SigningError as error:
            raise click.UsageError(str(error)) from None
    report = Report("signature")
    report.leaves_out("signature", "no --public-key given" if public_key is None else "only of a folder")
    return report


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
        whole.facts[report.question] = {"verdict": report.status, **report.facts}
    whole.fine = reports[0].fine
    return whole
