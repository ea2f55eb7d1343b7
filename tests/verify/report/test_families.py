"""Which families there are, and why some were kept, comes from the checkpoint's manifest."""

from __future__ import annotations

import shutil
from pathlib import Path

from shardmill.verify.reading.source import Folder
from shardmill.verify.report.facts import Facts
from shardmill.verify.report.gather import gather
from tests.golden.make import GOLDEN
from tests.verify.report.conftest import SHARDS


def test_families_add_up_to_the_checkpoint(facts: Facts) -> None:
    """Every tensor of the parent lies in one family, so sums over families are the whole's."""
    after = sum(family.bytes_after + family.scale_bytes for family in facts.families)
    assert after == facts.tensor_bytes
    assert sum(family.bytes_before or 0 for family in facts.families) == facts.parent_tensor_bytes


def test_a_checkpoint_alone_tells_all_but_the_errors(facts: Facts, facts_alone: Facts) -> None:
    """Its manifest knows the sizes before; nothing pretends to have compared weights."""
    assert not facts_alone.compared
    assert facts_alone.parent_tensor_bytes == facts.parent_tensor_bytes
    assert [family.reason for family in facts_alone.families] == [
        None,
        None,
        None,
        "vectors: <i>no</i> Linear",
    ]
    assert all(weight.error is None for weight in facts_alone.weights)
    assert all(family.error is None and not family.layers for family in facts_alone.families)
    assert facts_alone.worst == ()


def test_an_edited_readme_changes_nothing(small: tuple[Path, Path], facts: Facts, tmp_path: Path) -> None:
    """README and report are two renderings of the manifest; neither reads the other."""
    parent, out = small
    copy = Path(shutil.copytree(out, tmp_path / "copy"))
    (copy / "README.md").write_text("# Other words\n")
    assert gather(Folder(copy), Folder(parent)).families == facts.families


def test_of_manifest_format_1_the_converted_families_are_known() -> None:
    """It has no families: conversions and headers name those that were converted, with the parent's sizes."""
    facts = gather(Folder(GOLDEN / "format-1" / "out"), Folder(GOLDEN / "format-1" / "parent"))
    assert not facts.families_known
    found = [(family.name, family.reason, family.bytes_before) for family in facts.families]
    assert found == [
        ("attention", None, 4 * 64 * 48 * 2),
        ("mlp, copies of FP8", None, 2 * 48 * 64 * 2),
        ("native, to BF16", None, 64 * 64),
        ("native, to smaller blocks", None, 64 * 64),
    ]


def test_files_are_told_by_what_was_done_with_them(facts: Facts) -> None:
    kinds = {file.name: file.kind for file in facts.files}
    assert kinds[SHARDS[0]] == "rewritten"
    assert kinds[SHARDS[1]] == "passed on"
    assert kinds["config.json"] == kinds["LICENSE"] == "other"
    assert all(file.sha256 for file in facts.files)
