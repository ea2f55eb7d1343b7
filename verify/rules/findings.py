"""What a question answers with: findings, each named by a rule, and what was and was not looked at.

A checker never raises for a fault of the checkpoint: it adds a finding and goes on, so that one run names them all.
A report is clean only if every weight was judged and the question was asked. The exit code is 0 for clean or info
only, 1 for errors or warnings; a strict one is also 1 for a weight that was not judged or a question not asked.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from shardmill.verify.rules.coverage import Coverage
from shardmill.verify.rules.table import RULES, Rule

# A hostile file can hold a million faults of one kind; a report names this many and counts the rest.
FINDINGS_OF_A_RULE_MAX = 20_000
VERDICT_FORM = "shardmill/verdict/1"  # of what --json prints: docs/schemas/verdict-1.json


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: the rule's slug, where it is, what was expected there and what was found."""

    slug: str
    file: str = ""
    tensor: str = ""
    expected: str = ""
    got: str = ""

    @property
    def rule(self) -> Rule:
        return RULES[self.slug]

    @property
    def severity(self) -> Severity:
        return Severity(self.rule.severity)

    def as_json(self) -> dict[str, str]:
        return {
            "rule": self.rule.id,
            "severity": self.severity.value,
            "file": printable(self.file),
            "tensor": printable(self.tensor),
            "expected": printable(self.expected),
            "got": printable(self.got),
        }


class UnreadableError(Exception):
    """A file cannot be judged further; carries the finding that says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.slug)
        self.finding = finding


def printable(text: str, chars_max: int = 300) -> str:
    """`text` without control characters or lone surrogates, cut: names in a hostile file reach a terminal."""
    shown = text if len(text) <= chars_max else text[:chars_max] + f"... ({len(text)} characters)"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)


FACT_CHARS_MAX = 2_000


def _bounded(fact: object) -> object:
    """A fact with every text of it printable and of bounded length, keys too."""
    if isinstance(fact, dict):
        return {printable(str(key), FACT_CHARS_MAX): _bounded(value) for key, value in fact.items()}
    if isinstance(fact, (list, tuple)):
        return [_bounded(value) for value in fact]
    return printable(fact, FACT_CHARS_MAX) if isinstance(fact, str) else fact


@dataclass(slots=True)
class Report:
    """The answer to one question about one checkpoint."""

    question: str
    checked: list[str] = field(default_factory=list)
    not_checked: dict[str, str] = field(default_factory=dict)  # topic -> reason
    findings: list[Finding] = field(default_factory=list)
    fine: list[str] = field(default_factory=list)  # one line for each file without a finding
    facts: dict[str, object] = field(default_factory=dict)  # what the question measured beside its findings
    coverage: Coverage = field(default_factory=Coverage)
    not_asked: dict[str, str] = field(default_factory=dict)  # question -> why it could not be asked
    more: Counter[str] = field(default_factory=Counter)  # rule's slug -> findings that were counted, not kept
    _kept: Counter[str] = field(default_factory=Counter)

    def add(self, *findings: Finding) -> None:
        for finding in findings:
            if self._kept[finding.slug] < FINDINGS_OF_A_RULE_MAX:
                self._kept[finding.slug] += 1
                self.findings.append(finding)
            else:
                self.more[finding.slug] += 1

    def checks(self, topic: str) -> None:
        if topic not in self.checked and topic not in self.not_checked:
            self.checked.append(topic)

    def leaves_out(self, topic: str, reason: str) -> None:
        if topic in self.checked:
            self.checked.remove(topic)
        self.not_checked.setdefault(topic, reason)

    def count(self, slug: str) -> int:
        """Findings of one rule, those that were not kept included."""
        return self._kept[slug] + self.more[slug]

    def cannot_ask(self, reason: str) -> None:
        """Says that this question could not be asked here, and why."""
        self.not_asked.setdefault(self.question, reason)

    @property
    def status(self) -> str:
        """The severity of the worst finding; without one 'not asked', 'partial' or 'clean'."""
        worst = min((ORDER[finding.severity] for finding in self.findings), default=None)
        if worst is not None:
            return list(ORDER)[worst].value
        if self.question in self.not_asked:
            return "not asked"
        return "clean" if self.coverage.whole else "partial"

    @property
    def exit_code(self) -> int:
        return 1 if self.status in (Severity.ERROR, Severity.WARNING) else 0

    @property
    def strict_exit_code(self) -> int:
        """As `exit_code`, and 1 where a weight was not judged or a question was not asked."""
        return 1 if self.coverage.not_judged or self.not_asked else self.exit_code

    def worst_first(self) -> list[Finding]:
        return sorted(self.findings, key=lambda f: (ORDER[f.severity], f.rule.id, f.file, f.tensor))

    def as_json(self) -> str:
        value: dict[str, object] = {
            "format": VERDICT_FORM,
            "question": self.question,
            "status": self.status,
            "coverage": self.coverage.as_json(),
            "not_asked": {question: printable(reason) for question, reason in self.not_asked.items()},
            "checked": [printable(topic) for topic in self.checked],
            "not_checked": [printable(topic) for topic in self.not_checked],
            "findings": [finding.as_json() for finding in self.worst_first()],
        }
        if self.more:
            value["more"] = {RULES[slug].id: count for slug, count in sorted(self.more.items())}
        if self.facts:
            value["facts"] = _bounded(self.facts)
        return json.dumps(value, indent=2)
