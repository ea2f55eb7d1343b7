"""A report as JUnit XML, which CI servers show as tests: a rule with findings fails, what was checked passes.

A topic that was not checked and a question that was not asked are skipped tests, with the reason.
"""

from __future__ import annotations

from itertools import groupby
from xml.etree.ElementTree import Element, SubElement, tostring

from shardmill.verify.rules.findings import Finding, Report, Severity, printable

FINDINGS_SHOWN = 100  # of a rule


def as_junit(report: Report) -> str:
    name = f"shardmill verify {report.question}"
    suite = Element("testsuite", name=name)
    for topic in report.checked:
        SubElement(suite, "testcase", classname=name, name=printable(topic))
    for topic, reason in {**report.not_checked, **report.not_asked}.items():
        case = SubElement(suite, "testcase", classname=name, name=printable(topic))
        SubElement(case, "skipped", message=printable(reason))
    failures = 0
    for _, group in groupby(report.worst_first(), key=lambda finding: finding.slug):
        failures += _add_rule(suite, name, report, list(group))
    for line in report.coverage.lines():
        case = SubElement(suite, "testcase", classname=name, name="coverage")
        SubElement(case, "skipped", message=printable(line))
    skipped = len(suite.findall("testcase/skipped"))
    suite.attrib |= {
        "tests": str(len(suite)),
        "failures": str(failures),
        "errors": "0",
        "skipped": str(skipped),
    }
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(suite, encoding="unicode")


def _add_rule(suite: Element, name: str, report: Report, findings: list[Finding]) -> bool:
    """Adds the rule's test case; whether it fails. One of severity info passes, and says what it found."""
    rule = findings[0].rule
    case = SubElement(suite, "testcase", classname=name, name=f"{rule.id} {rule.slug}")
    lines = [rule.sentence, *map(_line, findings[:FINDINGS_SHOWN])]
    if rest := report.count(rule.slug) - min(len(findings), FINDINGS_SHOWN):
        lines.append(f"and {rest:,} more")
    text = "\n".join([*lines, f"what to do: {rule.advice}"])
    if findings[0].severity == Severity.INFO:
        SubElement(case, "system-out").text = text
        return False
    failure = SubElement(case, "failure", type=findings[0].severity.value, message=rule.sentence)
    failure.text = text
    return True


def _line(finding: Finding) -> str:
    parts = (finding.file, finding.tensor, finding.expected and f"expected {finding.expected}", finding.got)
    return ": ".join(printable(part) for part in parts if part)
