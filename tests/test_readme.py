"""README and docs tell what is: commands that exist, a plan's own lines, links that lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from shardmill.pipeline.commands.main import shardmill

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WIDTH_MAX = 120


def _commands(page: Path) -> list[str]:
    return re.findall(r"^    (?:\$ )?(shardmill [a-z][^\n]*)", page.read_text(), re.MULTILINE)


def _leaf(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that `words` name, and its own arguments."""
    command: click.Command = shardmill
    context = click.Context(command)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        assert found is not None, f"no command {words[0]}"
        command, words = found, words[1:]
    return command, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_exists_with_its_options(page: Path) -> None:
    """What a reader copies is understood by the command line."""
    for line in _commands(page):
        command, words = _leaf(shlex.split(re.split(r"  +| #|; | \| | > | && ", line)[0])[1:])
        if any(word.isupper() and word.startswith("[") for word in words):
            continue  # a synopsis
        known = {name for param in command.params for name in [*param.opts, *param.secondary_opts]} | {
            "--help",
            "-h",
        }
        options = [word.split("=")[0] for word in words if re.fullmatch(r"--?[a-zA-Z][\w-]*(=.*)?", word)]
        assert [name for name in options if name not in known] == [], line


def test_the_plan_in_the_readme_is_what_plan_prints(tmp_path: Path) -> None:
    """Ten lines of the toy's plan, word for word but for the table's border."""
    CliRunner().invoke(shardmill, ["toy-parent", str(tmp_path / "toy")], catch_exceptions=False)
    arguments = ["plan", "-c", str(ROOT / "pipeline.toml"), "--parent", str(tmp_path / "toy")]
    printed = CliRunner().invoke(shardmill, arguments, catch_exceptions=False).output
    table = {_flat(line) for line in printed.splitlines()}
    block = (ROOT / "README.md").read_text().split("## What a plan says")[1].split("## ")[0]
    shown = [_flat(line) for line in block.splitlines() if line.startswith("    ")]
    assert len(shown) >= 10
    for line in shown:
        assert any(each.startswith(line.removesuffix("...")) for each in table), line


def _flat(line: str) -> str:
    return " ".join(re.sub("[│┃|]", " ", line).split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    """Links within the project, anchors included; those to the web are not fetched."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in _anchors(other), f"{page.name}: {target}"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_promise_of_the_readme_names_a_test_that_exists() -> None:
    """A line of "What you can count on" leads to one test, by the file and the title of its link."""
    promises = (ROOT / "README.md").read_text().split("## What you can count on")[1].split("## ")[0]
    lines = re.split(r"^- ", promises.split("\n[")[0], flags=re.MULTILINE)[1:]
    named = re.findall(r'^\[(\w+)\]: (\S+) "(\w+)"$', promises, re.MULTILINE)
    assert [line for line in lines if not re.search(r"\[test\]\[\w+\]", line)] == []
    assert set(re.findall(r"\[test\]\[(\w+)\]", promises)) == {label for label, _, _ in named}
    assert [name for _, path, name in named if f"def {name}(" not in (ROOT / path).read_text()] == []


def test_the_readme_has_one_width() -> None:
    """No line is wider than the limit, tables apart."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line for line in lines if len(line) > WIDTH_MAX and not line.startswith("|")] == []
