"""Adding a rule as CONTRIBUTING says: one row and its check."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmill.verify.questions import lint_names
from shardmill.verify.questions.lint import lint
from shardmill.verify.questions.lint_names import Names
from shardmill.verify.reading.source import Folder
from shardmill.verify.rules import findings, table
from shardmill.verify.rules.findings import Finding
from shardmill.verify.rules.table import Rule
from tests.verify.zoo.clean import CLEAN
from tests.verify.zoo.model import bf16

ROW = Rule("SM999", "shouting-name", "warning", "A tensor's name is in capitals.", "Rename it.")


def shouting(names: Names) -> Iterator[Finding]:
    """The check: a finding names its rule, the file, the tensor, what was expected, what was found."""
    for name, tensor in names.checkpoint.tensors.items():
        if name.isupper():
            yield Finding("shouting-name", tensor.file, name, "lower case", "capitals")


def test_a_rule_is_added_by_a_row_and_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its finding carries the row's id and severity, and the question reports it."""
    rules = {**table.RULES, ROW.slug: ROW}
    monkeypatch.setattr(table, "RULES", rules)
    monkeypatch.setattr(findings, "RULES", rules)
    monkeypatch.setattr(lint_names, "RULES", (*lint_names.RULES, shouting))
    clean = CLEAN["plain"]() if "plain" in CLEAN else next(iter(CLEAN.values()))()
    file = next(iter(clean.shards))
    clean.shards[file]["SHOUTING"] = bf16("loud", 8)
    clean.write(tmp_path)
    found = [finding for finding in lint(Folder(tmp_path)).findings if finding.slug == ROW.slug]
    assert [(finding.tensor, finding.severity) for finding in found] == [("SHOUTING", "warning")]
