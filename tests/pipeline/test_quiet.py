"""`-q` leaves answers and errors alone; `-v` says what a command took; neither changes what is made."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pipeline.parents import published, write_recipe
from tests.pipeline.test_commands import Told, shardmill  # noqa: F401


@pytest.mark.parametrize(
    "words", [["-q"], ["-v"], ["-q", "-v"], []], ids=lambda words: " ".join(words) or "none"
)
def test_a_build_says_as_much_as_was_asked_for(
    parent: Path,
    tmp_path: Path,
    shardmill: Callable[..., Told],  # noqa: F811
    reference: dict[str, bytes],
    words: list[str],
) -> None:
    # The old name of --recipe still works, with a note.
    places = ["--config", write_recipe(tmp_path), "--parent", parent, "--out", tmp_path / "out"]
    code, answer, notes = shardmill(*words, "build", *places)
    cost = re.compile(r"took \d+\.\d s, \d+\.\d s of processor time, at most \d+ MiB in one process\n")
    assert (code, "built" in answer, "Next:" in answer) == (0, True, "-q" not in words)
    assert bool(cost.search(notes)) is ("-v" in words)
    assert bool(cost.sub("", notes)) is ("-q" not in words)
    shard = next(name for name in reference if name.endswith(".safetensors"))
    assert published(tmp_path / "out")[shard] == reference[shard]


def test_a_quiet_command_still_says_what_is_wrong(tmp_path: Path, shardmill: Callable[..., Told]) -> None:  # noqa: F811
    code, _, complaint = shardmill("-q", "plan", "-c", write_recipe(tmp_path), "--parent", tmp_path / "none")
    assert (code, "none" in complaint) == (2, True)
