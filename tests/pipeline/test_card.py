"""The child's model card, and the signature of the checkpoint that it replaces."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from shardmill.pipeline.commands.main import shardmill
from shardmill.pipeline.container.card import front_matter, items
from shardmill.pipeline.run.publish import SIGNATURES
from tests.pipeline.parents import RECIPE, write_recipe

CARD = """---
license: other
license_name: its-own
license_link: LICENSE
language:
- en
- zh
tags: [chat, moe]
library_name: sentence-transformers
base_model: someone/else
model-index:
- name: x
  results: []
---
# The parent's own words
"""


def _build(parent: Path, out: Path, recipe: Path) -> str:
    words = ["build", "-c", recipe, "--parent", parent, "--out", out, "--kernel", "numpy"]
    result = CliRunner().invoke(shardmill, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("text", "keys"),
    {
        "a card": (CARD, ["license", "license_name", "license_link", "language", "library_name", "tags"]),
        "no front matter": ("# Words\n", []),
        "an open end": ("---\nlicense: mit\n", []),
        "nothing": ("", []),
        "a BOM": ("\ufeff---\nlicense: mit\n---\n", ["license"]),
        "control characters": ("---\nlicense: a\x1b[2J\n---\n", []),
    }.values(),
)
def test_front_matter_keeps_what_holds_for_a_child(text: str, keys: list[str]) -> None:
    """Licence, languages, tags, library; not what describes the parent alone."""
    assert list(front_matter(text)) == [
        key
        for key in ("license", "license_name", "license_link", "language", "library_name", "tags")
        if key in keys
    ]


@pytest.mark.parametrize("lines", ["tags: [a, b]", "tags:\n- a\n- b", "tags:\n  - a\n  - b"])
def test_a_list_is_read_in_each_of_its_spellings(lines: str) -> None:
    """Inline, and one item a line."""
    assert items(lines) == ["a", "b"]


def test_the_child_keeps_the_parents_licence_and_tags(parent: Path, tmp_path: Path) -> None:
    """And says that it is quantized, from what, and by what."""
    (parent / "README.md").write_text(CARD)
    _build(parent, tmp_path / "out", write_recipe(tmp_path))
    card = (tmp_path / "out" / "README.md").read_text()
    front = card.split("---")[1]
    for line in ("license: other", "license_link: LICENSE", "- zh", "tags: [chat, moe, fp8, shardmill]"):
        assert line in front
    assert "library_name: sentence-transformers" in front
    assert "model-index" not in front
    assert "someone/else" not in front


def test_a_card_without_front_matter_gets_a_library(parent: Path, tmp_path: Path) -> None:
    """Never a licence that the parent does not state."""
    _build(parent, tmp_path / "out", write_recipe(tmp_path))
    front = (tmp_path / "out" / "README.md").read_text().split("---")[1]
    assert "library_name:" in front
    assert "license" not in front


def test_a_rebuild_removes_the_signature_of_the_checkpoint_before(parent: Path, tmp_path: Path) -> None:
    """And says so; a build with nothing to do leaves it."""
    recipe, out = write_recipe(tmp_path), tmp_path / "out"
    _build(parent, out, recipe)
    for name in SIGNATURES:
        (out / name).write_text("{}")
    assert "sign again" not in _build(parent, out, recipe)
    assert all((out / name).exists() for name in SIGNATURES)
    (parent / "README.md").write_text(CARD)
    assert "sign again" in _build(parent, out, write_recipe(tmp_path, RECIPE))
    assert not any((out / name).exists() for name in SIGNATURES)


@pytest.mark.parametrize("question", ["integrity", "lint", "all"])
def test_a_folder_of_holes_is_refused_by_every_question(parent: Path, question: str) -> None:
    """Its data is on a hub; what lies here would read as zeros."""
    (parent / ".shardmill-hub.json").write_text("{}")
    result = CliRunner().invoke(shardmill, ["verify", question, str(parent)])
    assert (result.exit_code, "hf://org/repo" in result.output) == (2, True)


def test_the_version_names_kernel_and_extras() -> None:
    """What a report of a fault needs."""
    output = CliRunner().invoke(shardmill, ["--version"]).output
    assert all(word in output for word in ("shardmill ", "kernel: ", "extras: "))


def test_a_misspelt_command_is_told_the_nearest() -> None:
    """Like a misspelt option."""
    assert "Did you mean plan" in CliRunner().invoke(shardmill, ["plann"]).output


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_plan_keeps_names_and_blocks(parent: Path, tmp_path: Path, width: int) -> None:
    """Sizes give way; a name is never cut."""
    from rich.console import Console

    from shardmill.pipeline.commands.plan_text import _table

    row = {
        "action": "quantize",
        "block": [128, 128],
        "tensors": 1,
        "bytes_before": 2,
        "bytes_after": 1,
        "scale_bytes": 4,
    }
    console = Console(width=width, record=True)
    with console.capture() as capture:
        console.print(_table("r", {"shared experts + MLP": row}, width))
    assert "[128,128]" in capture.get()
    assert "shared experts + MLP" in capture.get()
