"""The table of rules: ids are unique and stable, every rule is used and shown to fire, the catalogue is the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardmill.verify.rules.catalogue import CATALOGUE, catalogue
from shardmill.verify.rules.table import BY_ID, RULES, rule_named
from tests.verify.zoo.all import CASES

ROOT = Path(__file__).parents[2]
TESTS = "\n".join(path.read_text() for path in sorted((ROOT / "tests" / "verify").glob("test_*.py")))
SOURCES = "\n".join(
    path.read_text() for path in sorted((ROOT / "verify").rglob("*.py")) if path.parent.name != "rules"
)
IN_ZOO = {case.rule for case in CASES}


def test_no_id_and_no_slug_is_there_twice() -> None:
    assert len(BY_ID) == len(RULES)
    assert all(re.fullmatch(r"SM\d{3}", id) for id in BY_ID)


@pytest.mark.parametrize("slug", RULES)
def test_every_rule_is_born_in_the_code_and_fires_for_an_animal_or_a_test(slug: str) -> None:
    assert f'"{slug}"' in SOURCES, "no code reports it"
    assert slug in IN_ZOO or f'"{slug}"' in TESTS, "nothing shows that it fires"


def test_every_slug_that_the_code_reports_is_in_the_table() -> None:
    assert set(re.findall(r'Finding\(\s*"([a-z0-9-]+)"', SOURCES)) <= set(RULES)


def test_a_rule_is_named_by_id_in_any_case_or_by_slug() -> None:
    assert rule_named("sm101") is rule_named("SM101") is rule_named("placeholder-input-scale")
    assert rule_named("SM999") is None


def test_the_catalogue_in_docs_is_made_from_the_table() -> None:
    """`python -m shardmill.verify.rules.catalogue` writes it."""
    assert (ROOT / CATALOGUE).read_text() == catalogue()


def test_every_question_has_its_page_and_each_option_that_a_page_names_is_there() -> None:
    from click.testing import CliRunner

    from shardmill.verify.commands.group import QUESTIONS, verify

    pages = {
        path.stem.removeprefix("verify-"): path.read_text() for path in (ROOT / "docs").glob("verify-*.md")
    }
    ours = set(QUESTIONS) - {"accept", "fit", "all", "sign"}
    assert ours <= set(pages)
    for question in ours:
        shown = CliRunner().invoke(verify, [question, "--help"]).output
        if question == "signature":
            shown += CliRunner().invoke(verify, ["sign", "--help"]).output
        named = set(re.findall(r"`(--[a-z-]+)", pages[question]))
        assert {option for option in named if option not in shown} == set()
