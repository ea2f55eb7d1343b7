"""How an answer leaves a command: printed in the form that was asked for, signed where asked, with its exit code."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from shardmill.verify.reading.atomic import write_whole
from shardmill.verify.reading.source import Folder, Source
from shardmill.verify.rules.findings import Report

FORMS = ("text", "json", "sarif", "junit")

F = TypeVar("F", bound=Callable[..., Any])


class Output(NamedTuple):
    """What the user asked for: the form, whether what was not judged counts, and where a signed verdict goes."""

    form: str = "text"
    strict: bool = False
    attest: Path | None = None
    key: Path | None = None
    password: str | None = None


_OPTIONS = (
    click.option(
        "--strict", is_flag=True, help="Exit 1 also where a weight was not judged or a question not asked."
    ),
    click.option("--json", "as_json", is_flag=True, help="The same as --format json."),
    click.option(
        "--format",
        "form",
        type=click.Choice(FORMS),
        default="text",
        show_default=True,
        help="Of what is printed.",
    ),
    click.option(
        "--attest",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Also write the verdict as a statement signed by --attest-key.",
    ),
    click.option(
        "--attest-key",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="PEM",
        help="An elliptic-curve key; its password is read from SHARDMILL_KEY_PASSWORD.",
    ),
)


def output_options(command: F) -> F:
    """--strict, --json, --format, --attest and --attest-key, which the command gets as one `output`."""

    @functools.wraps(command)
    def with_output(
        *args: Any,
        as_json: bool,
        form: str,
        strict: bool,
        attest: Path | None,
        attest_key: Path | None,
        **options: Any,
    ) -> Any:
        if (attest is None) != (attest_key is None):
            raise click.UsageError(
                "give --attest and --attest-key together; without a signature it proves nothing."
            )
        password = os.environ.get("SHARDMILL_KEY_PASSWORD")
        output = Output("json" if as_json else form, strict, attest, attest_key, password)
        return command(*args, output=output, **options)

    asked: Any = with_output
    for option in reversed(_OPTIONS):
        asked = option(asked)
    return asked  # type: ignore[no-any-return]


def answer(report: Report, output: Output, *sources: Source) -> None:
    """Prints the report and ends the process with its exit code: 2 where the question could not be asked."""
    for source in sources:
        if source.remote:
            report.facts["read"] = f"{source.where}, {source.transferred:,} bytes transferred"
    if output.attest is not None and output.key is not None:
        _attest(report, output.attest, output.key, output.password, sources[0])
    _print(report, output.form)
    if output.strict:
        sys.exit(report.strict_exit_code)
    sys.exit(report.exit_code or (2 if report.question in report.not_asked else 0))


def _print(report: Report, form: str) -> None:
    if form == "json":
        click.echo(report.as_json())
    elif form == "sarif":
        from shardmill.verify.commands.sarif import as_sarif

        click.echo(as_sarif(report))
    elif form == "junit":
        from shardmill.verify.commands.junit import as_junit

        click.echo(as_junit(report))
    else:
        from rich.console import Console

        from shardmill.verify.commands.show import show

        show(report, Console(highlight=False))


def _attest(report: Report, place: Path, key: Path, password: str | None, source: Source) -> None:
    """Writes the signed verdict. Raises click.UsageError where it can't be made."""
    if not isinstance(source, Folder) or source.only is not None:
        raise click.UsageError("--attest needs a folder: the statement names every file by its sha256.")
    if place.resolve().is_relative_to(source.root.resolve()):
        raise click.UsageError(f"--attest {place} is inside the checkpoint that is judged; choose another.")
    try:
        from shardmill.verify.questions.attestation import attest
        from shardmill.verify.questions.dsse import KeyFileError

        try:
            envelope = attest(report, source.root, key, password)
        except KeyFileError as error:
            raise click.UsageError(str(error)) from None
    except ImportError as error:
        raise click.UsageError(
            f"--attest needs cryptography ({error}); `pip install cryptography`."
        ) from None
    try:
        write_whole(place, envelope)
    except OSError as error:
        raise click.UsageError(
            f"{place}: can't be written: {error.strerror}; choose another --attest."
        ) from None
