"""The pages of docs/: complete, generated where they say so, and in the site's table of contents."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from shardmill.pipeline.commands.main import shardmill
from shardmill.pipeline.commands.reference import reference

ROOT = Path(__file__).parents[1]

# What a command of a page begins with -> the test that holds it instead: it needs a hub, a GPU, a key or a server.
NOT_RUN = {
    "shardmill publish": "tests/pipeline/publish/test_publish.py",
    "shardmill delta": "tests/pipeline/delta/test_delta.py",
    "shardmill apply": "tests/pipeline/delta/test_delta.py",
    "shardmill report": "tests/verify/report/test_command.py",
    "shardmill serve": "tests/runtime_patch/test_presets.py",
    "shardmill preflight": "tests/runtime_patch/test_preflight.py",
    "shardmill tune": "tests/kernels/gpu/gpu_checks.py",
    "shardmill verify fit": "tests/verify/fit/test_command.py",
    "shardmill verify sign": "tests/verify/test_signature.py",
    "shardmill verify attested": "tests/verify/test_output.py",
    "shardmill verify all build/checkpoint --parent /data/parent --attest": "tests/verify/test_output.py",
    "shardmill verify accept": "tests/verify/accept/test_record_compare.py",
    "shardmill plan --parent build/headers": "tests/pipeline/test_plan.py",
    "shardmill toy-parent build/headers": "tests/pipeline/test_plan.py",
}
# What a command of a page has anywhere -> the test that holds it: a network, several parents, a parent that is eaten.
HELD_ELSEWHERE = {
    "hf://": "tests/verify/test_remote.py",
    "https://": "tests/verify/test_remote.py",
    "--source": "tests/pipeline/several/test_sources.py",
    "--consume-parent": "tests/pipeline/consume/test_consume.py",
    "--loader sglang": "tests/verify/test_loads_sglang.py",  # its table does not hold the toy's architecture
}
# Where a page's words lie: a toy parent and its child.
PLACES = {
    "build/toy-parent": "parent",
    "/data/parent": "parent",
    "/data/Qwen3-8B": "parent",
    "/data/old": "parent",
    "P": "parent",
    "parent": "parent",
    "build/checkpoint": "child",
    "/data/child": "child",
    "/data/model": "child",
    "/data/out": "child",
    "DIR": "child",
    "child": "child",
    "pipeline.toml": "pipeline.toml",
    "mine.toml": "mine.toml",
    "qwen3-8b.toml": "mine.toml",
    "recipe.toml": "mine.toml",
}
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


def _why_not_run(line: str) -> str | None:
    """The test that holds a command which can't be run here."""
    held = [test for part, test in HELD_ELSEWHERE.items() if part in line]
    return next(iter(held), next((test for start, test in NOT_RUN.items() if line.startswith(start)), None))


def _lines(page: Path) -> list[str]:
    """The commands that a reader would copy, without their comments."""
    text = page.read_text()
    found = re.findall(r"^(?:    )?(shardmill [a-z][^\n]*)", text, re.MULTILINE)
    lines = [
        re.split(r"  +#| #|; | \| | && ", line)[0].strip() for line in found if page.name != "commands.md"
    ]
    known = shardmill.list_commands(click.Context(shardmill))
    return [line for line in lines if line.split()[1] in known]


COMMANDS = sorted({line for page in PAGES for line in _lines(page)})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a toy parent, the two recipes and the child, as a reader has them after the tutorial."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "pipeline.toml").write_text((ROOT / "pipeline.toml").read_text())
    before = Path.cwd()
    os.chdir(folder)
    try:
        for line in (
            "toy-parent parent --size tiny",
            "init parent -o mine.toml",
            "build -c pipeline.toml --parent parent --out child",
        ):
            result = CliRunner().invoke(shardmill, line.split(), catch_exceptions=False)
            assert result.exit_code == 0, (line, result.output[-400:])
    finally:
        os.chdir(before)
    return folder


def _on_the_toy(line: str) -> str:
    """The same command with the toy's places."""
    words = [PLACES.get(word, word) for word in shlex.split(line)[1:]]
    if words[0] == "toy-parent":
        words[1] = "toy"
    for option in ("-o", "--out"):
        if option in words:
            words[words.index(option) + 1] = "new"
    if words[0] == "plan" and "-c" not in words:
        words += ["-c", "pipeline.toml"]
    return shlex.join(words)


@pytest.mark.parametrize("words", sorted({_on_the_toy(line) for line in COMMANDS if not _why_not_run(line)}))
def test_a_command_of_a_page_runs(
    words: str, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exit code 0, as the reader has it who follows the pages; lines that differ in places alone are one."""
    given = [str(tmp_path / word) if word in ("new", "toy") else word for word in shlex.split(words)]
    monkeypatch.chdir(home)
    result = CliRunner().invoke(shardmill, given, catch_exceptions=False)
    assert result.exit_code == 0, (given, result.output[-600:])


def test_what_is_not_run_is_tested_elsewhere() -> None:
    """Each reason names a test that is there, and each is needed by a page."""
    assert all((ROOT / test).exists() for test in HELD_ELSEWHERE.values())
    for start, test in NOT_RUN.items():
        assert (ROOT / test).exists(), test
        assert any(line.startswith(start) for line in COMMANDS), start


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")), ids=lambda page: page.name)
def test_a_page_says_first_what_it_is_for(page: Path) -> None:
    """Below its heading stands a sentence: no table, no code, no other heading."""
    heading, first = [line for line in page.read_text().splitlines() if line][:2]
    assert heading.startswith("# ")
    assert re.match(r"[A-Z`]|shardmill ", first), first
    assert not first.startswith("```"), first


def test_the_page_of_commands_is_what_the_commands_say() -> None:
    """`python -m shardmill.pipeline.commands.reference > docs/commands.md` writes it."""
    assert (ROOT / "docs/commands.md").read_text() == reference()


def test_every_page_is_in_the_sites_contents_once() -> None:
    """mkdocs.yml names each page of docs/ and nothing else."""
    named = re.findall(r"[\w.-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(named) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_tutorial_runs(tmp_path: Path) -> None:
    """Its commands, one after another, but for those that NOT_RUN names and `all`, which is run below."""
    lines = re.findall(r"^    (shardmill [^\n]*)", (ROOT / "docs/tutorial.md").read_text(), re.MULTILINE)
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        for line in lines:
            if " all " not in line and not _why_not_run(line):
                result = CliRunner().invoke(shardmill, line.split()[1:], catch_exceptions=False)
                assert result.exit_code == 0, (line, result.output[-400:])
    finally:
        os.chdir(before)


SHELLS = re.findall(r"_SHARDMILL_COMPLETE=(\w+)_source", (ROOT / "docs/environment.md").read_text())


def test_the_page_names_three_shells() -> None:
    """Those that completion is written for."""
    assert sorted(SHELLS) == ["bash", "fish", "zsh"]


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_is_switched_on_as_the_page_says(shell: str) -> None:
    """What the start-up file evaluates asks the command again, and that names its commands."""

    def asked(environment: dict[str, str]) -> str:
        result = CliRunner().invoke(shardmill, [], prog_name="shardmill", env=environment)
        assert result.exit_code == 0, result.output
        return result.output

    source = asked({"_SHARDMILL_COMPLETE": f"{shell}_source"})
    assert f"_SHARDMILL_COMPLETE={shell}_complete" in source
    begun = {"COMP_WORDS": "shardmill pl", "COMP_CWORD": "pl" if shell == "fish" else "1"}
    assert "plan" in re.split(r"[,\s]", asked({"_SHARDMILL_COMPLETE": f"{shell}_complete", **begun}))
