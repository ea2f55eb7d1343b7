"""A question about two checkpoints of which nothing can be compared is a wrong call, not a clean answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from shardmill.verify.commands.group import verify
from tests.verify.zoo.clean import plain


@pytest.mark.parametrize("question", ["roundtrip", "reproduce"])
def test_a_parent_that_shares_nothing_is_refused_as_usage(question: str, tmp_path: Path) -> None:
    plain().write(tmp_path / "child")
    (tmp_path / "parent").mkdir()
    asked = [question, str(tmp_path / "child"), "--parent", str(tmp_path / "parent")]
    result = CliRunner().invoke(verify, asked)
    assert result.exit_code == 2
    assert "nothing was compared" in result.output
