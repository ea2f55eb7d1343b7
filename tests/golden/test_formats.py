"""A checkpoint of every manifest format that was ever written is judged, explained and built on, for ever."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from shardmill.pipeline.manifest.lock import load_lock, lock_path
from shardmill.pipeline.manifest.records import MANIFEST_FILE, MANIFEST_FORMAT, Manifest
from shardmill.pipeline.recipe.read import load
from shardmill.pipeline.run.build import Explanation, Summary, build, explain
from shardmill.pipeline.run.prepare import prepare
from shardmill.pipeline.stages.job import Prepared, Settings, Watch
from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.reproduce import reproduce
from shardmill.verify.reading.source import Folder
from tests.golden.make import GOLDEN
from tests.pipeline.parents import listing, published

FORMATS = ("format-1", "format-2")
REBLOCKED = "model-00002-of-00003.safetensors"
PASSED_ON = "model-00003-of-00003.safetensors"


@pytest.fixture(params=FORMATS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a golden: parent, pipeline.toml, pipeline.lock and out."""
    return Path(shutil.copytree(GOLDEN / request.param, tmp_path / request.param))


def prepared(golden: Path) -> Prepared:
    recipe = golden / "pipeline.toml"
    return prepare(load(recipe), golden / "parent", load_lock(lock_path(recipe)))


def rebuilt(golden: Path) -> Summary:
    return build(prepared(golden), golden / "out", Settings(kernel="numpy"), Watch())


def explained(golden: Path) -> Explanation:
    return explain(prepared(golden), golden / "out", Settings(), lambda line: None)


def test_the_judge_finds_it_clean(golden: Path) -> None:
    """Every byte is what the manifest says, and every block what its numerics make of the parent."""
    source, parent = Folder(golden / "out"), Folder(golden / "parent")
    for report in (integrity(source, parent), reproduce(source, parent, blocks=None)):
        assert report.findings == []
    assert report.facts["blocks"] == "32 of 32 compared, 0 differ"


def test_explain_says_what_a_build_would_do_and_why(golden: Path) -> None:
    """What a former key still proves is up to date; what it left out is said by name. Nothing is written."""
    before = listing(golden / "out")
    reasons = {verdict.file: verdict.reason for verdict in explained(golden).shards}
    reblocked = reasons.pop(REBLOCKED)
    assert set(reasons.values()) == {None}
    if golden.name == "format-1":
        assert reblocked == (
            "an earlier release built it, whose key left `source_block` out: model.gate.weight; it is made again once"
        )
    else:
        assert reblocked is None
    assert listing(golden / "out") == before


def test_a_build_goes_on_from_it_and_loses_nothing(golden: Path) -> None:
    """The same tensors to the byte, the passed-on file not written again, and a manifest of today's format."""
    out = golden / "out"
    before, inode = published(out), (out / PASSED_ON).stat().st_ino
    old = Manifest.from_json(before[MANIFEST_FILE])
    summary = rebuilt(golden)
    after = published(out)
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} <= {
        MANIFEST_FILE,
        "README.md",
        "config.json",
    }
    assert PASSED_ON not in summary.files_written
    assert (out / PASSED_ON).stat().st_ino == inode
    new = Manifest.from_json(after[MANIFEST_FILE])
    assert new.format == MANIFEST_FORMAT
    unrecorded = {name: replace(record, source_block=None) for name, record in new.conversions.items()}
    assert old.conversions in (new.conversions, unrecorded), "format 1 has no source_block"
    assert {name: shard.tensors for name, shard in new.shards.items()} == {
        name: shard.tensors for name, shard in old.shards.items()
    }
    assert explained(golden).others == ()
    assert rebuilt(golden).files_written == ()


def test_a_change_of_the_parent_is_found_through_it(golden: Path) -> None:
    """The digests in its manifest are those that a changed parent is compared with."""
    (golden / "pipeline.lock").unlink()
    path = golden / "parent" / PASSED_ON
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    reasons = {verdict.file: verdict.reason for verdict in explained(golden).shards}
    assert str(reasons[PASSED_ON]).startswith(f"the parent's {PASSED_ON} changed: ")
    assert PASSED_ON in rebuilt(golden).files_written


def test_an_edited_manifest_of_either_format_is_refused(golden: Path) -> None:
    """`self` is held to in the format that was written."""
    manifest = golden / "out" / MANIFEST_FILE
    body = json.loads(manifest.read_bytes())
    body["parent_verified"] = not body["parent_verified"]
    manifest.write_text(json.dumps(body))
    with pytest.raises(Exception, match="was edited since it was written"):
        explained(golden)
