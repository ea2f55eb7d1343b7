"""The command report."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import click

from shardmill.pipeline.commands.options import json_option
from shardmill.pipeline.errors import BuildError, CheckpointError
from shardmill.verify.commands.options import Bar, parents_at, source_at, source_option
from shardmill.verify.reading.atomic import write_whole
from shardmill.verify.report.facts import Facts
from shardmill.verify.report.gather import NoManifestError, gather
from shardmill.verify.rules.findings import UnreadableError, printable

Renderer = Callable[[Facts], str]
PAGE, CARD, FACTS = "report.html", "card.md", "report.json"


@click.command()
@click.argument("place", metavar="DIR")
@click.option("--parent", metavar="DIR", help="The checkpoint that it was made from; without it, no errors.")
@source_option
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("report"),
    show_default=True,
    help="Folder for report.html, card.md and report.json.",
)
@json_option
def report(place: str, parent: str | None, others: tuple[str, ...], out: Path, as_json: bool) -> None:
    """What the checkpoint in DIR is and what it lost: a page, a section for its model card, and JSON.

    The page is one file that fetches nothing. Keep the folder outside of DIR, whose files are all accounted for.

    Example: shardmill report /data/out --parent /data/parent --out /data/report
    """
    render_page, render_card = _renderers()
    if out.resolve().is_relative_to(Path(place).resolve()):
        raise click.UsageError(
            f"--out {out} lies in the checkpoint, whose files are published; choose another."
        )
    source, origin = source_at(place), parents_at(parent, others)
    try:
        with Bar() as bar:
            facts = gather(source, origin, bar)
    except NoManifestError as error:
        raise CheckpointError(str(error)) from None
    except UnreadableError as error:
        finding = error.finding
        raise CheckpointError(
            f"{finding.file}: {finding.rule.sentence} {finding.got}; fetch it again"
        ) from None
    text, before = facts.to_json(), _name_of_report(out)
    _write(out, {PAGE: render_page(facts), CARD: render_card(facts), FACTS: text})
    instead = f", in place of the report of {printable(before)}" if before not in ("", facts.name) else ""
    click.echo(text if as_json else f"wrote {out / PAGE}, {CARD} and {FACTS}{instead}")


def _name_of_report(out: Path) -> str:
    """Whose report is in the folder; "" where none is."""
    try:
        said = json.loads((out / FACTS).read_bytes())
    except (OSError, ValueError, RecursionError):
        return ""
    return str(said.get("name", "")) if isinstance(said, dict) else ""


def _renderers() -> tuple[Renderer, Renderer]:
    """Those of the page and the card. Raises click.UsageError where their libraries, an extra, are not there."""
    missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
    if missing:
        raise click.UsageError(
            f"the report needs {' and '.join(missing)}; install with: pip install jinja2 matplotlib"
        )
    from shardmill.verify.report.page import render_card, render_page

    return render_page, render_card


def _write(out: Path, texts: dict[str, str]) -> None:
    """Writes each text whole, in place of an older one. A name that is no UTF-8 is written with its escape."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_whole(out / name, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise BuildError(f"{out}: cannot be written: {error.strerror}; choose another --out") from None
