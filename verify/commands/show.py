"""A report for people: one line for a fine file, then the findings grouped by rule, worst first, with what to do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console
from rich.markup import escape

from shardmill.verify.rules.findings import Finding, Report, Severity, printable
from shardmill.verify.rules.table import RULES

SHOWN_OF_A_RULE = 5
STYLE = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}


def show(report: Report, console: Console) -> None:
    """Prints the report, what was not judged and not asked above all else.

    A report of several questions has a block for each, which says why one was not asked.
    """
    for line in (*report.coverage.lines(), *_not_asked(report)):
        console.print(escape(printable(line)), highlight=False, soft_wrap=True)
    for line in report.fine:
        console.print(f"[green]ok[/]  {escape(printable(line))}", highlight=False, soft_wrap=True)
    for _, group in groupby(report.worst_first(), key=lambda finding: finding.slug):
        _show_rule(report, list(group), console)
    for name, value in report.facts.items():
        _show_fact(name, value, console)
    for line in _looked_at(report):
        console.print(escape(line), highlight=False, soft_wrap=True)
    console.print(_verdict(report), highlight=False, soft_wrap=True)


def _not_asked(report: Report) -> list[str]:
    return [
        f"not asked: {question}, because {reason}"
        for question, reason in report.not_asked.items()
        if question not in report.facts
    ]


def _looked_at(report: Report) -> Iterator[str]:
    """What was checked, of several questions a line for each, and what was not, but for what was not asked at all."""
    for question, topics in groupby(report.checked, key=lambda topic: topic.rpartition(": ")[0]):
        if question not in report.not_asked:
            listed = ", ".join(topic.removeprefix(f"{question}: ") for topic in topics)
            yield f"checked: {question}: {listed}" if question else f"checked: {listed}"
    for topic, reason in report.not_checked.items():
        if topic.partition(": ")[0] not in report.not_asked:
            yield f"not checked: {topic} ({printable(reason)})"


def _show_fact(name: str, value: object, console: Console, indent: str = "") -> None:
    """A mapping takes a line for each entry, but for its verdict, which stands beside its name."""
    entries = dict(value) if isinstance(value, dict) else {}
    beside = entries.pop("verdict", "") if isinstance(value, dict) else value
    line = f"{indent}{printable(name)}:" + (f" {printable(str(beside))}" if beside != "" else "")
    console.print(escape(line), highlight=False, soft_wrap=True)
    for key, item in entries.items():
        _show_fact(str(key), item, console, indent + "    ")


def _show_rule(report: Report, findings: list[Finding], console: Console) -> None:
    rule, severity = findings[0].rule, findings[0].severity
    console.print(
        f"[{STYLE[severity]}]{severity.value}[/] {rule.id} {rule.slug}: {escape(rule.sentence)}",
        highlight=False,
        soft_wrap=True,
    )
    for finding in findings[:SHOWN_OF_A_RULE]:
        console.print("    " + escape(_line(finding)), highlight=False, soft_wrap=True)
    rest = report.count(findings[0].slug) - min(len(findings), SHOWN_OF_A_RULE)
    if rest:
        console.print(
            f"    and {rest:,} more (--json names {'them' if not report.more[findings[0].slug] else 'many of them'})",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"    what to do: {escape(rule.advice)}", highlight=False, soft_wrap=True)


def _line(finding: Finding) -> str:
    place = ": ".join(printable(part) for part in (finding.file, finding.tensor) if part)
    facts = [f"expected {printable(finding.expected)}"] if finding.expected else []
    facts += [f"got {printable(finding.got)}"] if finding.got else []
    return ": ".join(part for part in (place, ", ".join(facts)) if part)


def _verdict(report: Report) -> str:
    counts = dict.fromkeys(Severity, 0)
    for slug in {finding.slug for finding in report.findings}:
        counts[Severity(RULES[slug].severity)] += report.count(slug)
    said = ", ".join(f"{n:,} {severity.value}{'s' if n != 1 else ''}" for severity, n in counts.items() if n)
    unsaid = {"partial": "no finding in what was judged"}.get(report.status, report.status)
    others = [question for question in report.not_asked if question != report.question]
    unasked = f"; not asked: {', '.join(others)}" if others else ""
    return f"{report.question}: {said or unsaid}{unasked}"
