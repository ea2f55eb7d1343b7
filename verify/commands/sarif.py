"""A report as SARIF 2.1.0, which code-scanning pages show: a result a finding, a rule a kind of finding.

Form: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any
from urllib.parse import quote

from shardmill.verify.rules.findings import Finding, Report, Severity, printable
from shardmill.verify.rules.table import Rule

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVEL = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def as_sarif(report: Report) -> str:
    findings = report.worst_first()
    rules = list({finding.slug: finding.rule for finding in findings}.values())
    places = {rule.slug: number for number, rule in enumerate(rules)}
    run: dict[str, Any] = {
        "tool": {"driver": _driver(rules)},
        "invocations": [
            {
                "executionSuccessful": not report.not_asked,
                "toolExecutionNotifications": list(_left_out(report)),
            }
        ],
        "results": [_result(finding, places[finding.slug]) for finding in findings],
        "properties": {
            "question": report.question,
            "status": report.status,
            "coverage": report.coverage.as_json(),
        },
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _driver(rules: list[Rule]) -> dict[str, Any]:
    return {
        "name": "shardmill",
        "version": version("shardmill"),
        "rules": [
            {
                "id": rule.id,
                "name": rule.slug,
                "shortDescription": {"text": rule.sentence},
                "help": {"text": rule.advice},
                "defaultConfiguration": {"level": LEVEL[Severity(rule.severity)]},
            }
            for rule in rules
        ],
    }


def _result(finding: Finding, place: int) -> dict[str, Any]:
    location: dict[str, Any] = {}
    if finding.file:
        uri = quote(printable(finding.file))
        location["physicalLocation"] = {"artifactLocation": {"uri": uri}, "region": {"startLine": 1}}
    if finding.tensor:
        location["logicalLocations"] = [{"fullyQualifiedName": printable(finding.tensor), "kind": "member"}]
    result: dict[str, Any] = {
        "ruleId": finding.rule.id,
        "ruleIndex": place,
        "level": LEVEL[finding.severity],
        "message": {"text": _message(finding)},
    }
    return {**result, "locations": [location]} if location else result


def _message(finding: Finding) -> str:
    facts = [f"expected {printable(finding.expected)}"] if finding.expected else []
    facts += [f"got {printable(finding.got)}"] if finding.got else []
    place = ": ".join(printable(part) for part in (finding.file, finding.tensor) if part)
    return " ".join(
        part for part in (f"{place}:" if place else "", finding.rule.sentence, ", ".join(facts)) if part
    )


def _left_out(report: Report) -> list[dict[str, Any]]:
    """What was not judged, checked or asked: no results, but a reader must see it."""
    lines = [
        *report.coverage.lines(),
        *(f"not asked: {question}, because {reason}" for question, reason in report.not_asked.items()),
        *(f"not checked: {topic} ({reason})" for topic, reason in report.not_checked.items()),
    ]
    return [{"level": "note", "message": {"text": printable(line)}} for line in lines]
