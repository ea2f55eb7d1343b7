"""The pages of docs/: complete, generated where they say so, and in the site's table of contents."""

from __future__ import annotations

import os
import re
from pathlib import Path

from click.testing import CliRunner

from shardmill.pipeline.commands.main import shardmill
from shardmill.pipeline.commands.reference import reference

ROOT = Path(__file__).parents[1]


def test_the_page_of_commands_is_what_the_commands_say() -> None:
    """`python -m shardmill.pipeline.commands.reference > docs/commands.md` writes it."""
    assert (ROOT / "docs/commands.md").read_text() == reference()


def test_every_page_is_in_the_sites_contents_once() -> None:
    """mkdocs.yml names each page of docs/ and nothing else."""
    named = re.findall(r"[\w.-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(named) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_tutorial_runs(tmp_path: Path) -> None:
    """Its commands, one after another, but for the report, which needs an extra."""
    lines = re.findall(r"^    (shardmill [^\n]*)", (ROOT / "docs/tutorial.md").read_text(), re.MULTILINE)
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        for line in lines:
            if " report " not in line and " all " not in line:
                result = CliRunner().invoke(shardmill, line.split()[1:], catch_exceptions=False)
                assert result.exit_code == 0, (line, result.output[-400:])
    finally:
        os.chdir(before)
