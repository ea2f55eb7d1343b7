"""Every case of the zoo is found by its rule; every clean checkpoint is left in peace."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmill.verify.rules.table import RULES
from tests.verify.zoo.all import CASES, ask
from tests.verify.zoo.case import Case
from tests.verify.zoo.clean import CLEAN


@pytest.mark.parametrize("question", ["integrity", "lint"])
@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_checkpoint_of_each_format_gives_no_finding(name: str, question: str, tmp_path: Path) -> None:
    CLEAN[name]().write(tmp_path / "c")
    report = ask(question, tmp_path / "c")
    assert report.worst_first() == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_faulty_checkpoint_is_found_by_its_rule(case: Case, tmp_path: Path) -> None:
    case.write(tmp_path / "c")
    report = ask(case.question, tmp_path / "c")
    found = {finding.slug for finding in report.findings}
    assert case.rule in found, f"{case.name}: found {found}"
    assert report.exit_code == (0 if {RULES[slug].severity for slug in found} == {"info"} else 1)


def test_the_zoo_has_more_than_sixty_animals_and_no_name_twice() -> None:
    names = [case.name for case in CASES]
    assert len(names) >= 60
    assert len(set(names)) == len(names)
