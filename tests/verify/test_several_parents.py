"""A child of several parents: with all of them each tensor is held to its own origin, which no manifest can shift."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardmill.pipeline.run import build as run
from shardmill.pipeline.stages.job import Settings, Watch
from shardmill.verify.commands.group import verify
from shardmill.verify.questions.diff import diff
from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.provenance import statement
from shardmill.verify.questions.reproduce import reproduce
from shardmill.verify.questions.roundtrip import Limits, roundtrip
from shardmill.verify.reading.manifest import MANIFEST, canonical, parse_manifest
from shardmill.verify.reading.parents import Parents
from shardmill.verify.reading.source import Folder
from shardmill.verify.rules.findings import Report
from tests.pipeline.parents import change_tensor
from tests.pipeline.several.parents import Three

Q_A = "model.layers.0.self_attn.q_a_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Three:
    """The three parents and their child in `out`. Nobody writes to it."""
    three = Three(tmp_path_factory.mktemp("three"))
    run.build(three.prepare(), three.root / "out", Settings(kernel="numpy"), Watch())
    return three


@pytest.fixture
def three(made: Three, tmp_path: Path) -> Three:
    """A copy that a test may change."""
    found = Three.__new__(Three)
    found.root = Path(shutil.copytree(made.root, tmp_path / "three"))
    found.main, found.mtp, found.native = (found.root / name for name in ("main", "mtp", "native"))
    return found


def parents(three: Three) -> Parents:
    return Parents(Folder(three.main), {"mtp": Folder(three.mtp), "native": Folder(three.native)})


def slugs(report: Report) -> list[tuple[str, str]]:
    return [(finding.slug, finding.tensor) for finding in report.findings if finding.severity != "info"]


def questions(three: Three, parent: Any) -> dict[str, Report]:
    out = Folder(three.root / "out")
    return {
        "integrity": integrity(out, parent),
        "roundtrip": roundtrip(out, parent, Limits()),
        "reproduce": reproduce(out, parent, None),
    }


def test_a_true_child_is_clean_against_all_its_parents(made: Three) -> None:
    """Nothing is found, and all blocks that were encoded are made again, whichever parent they are from."""
    reports = questions(made, parents(made))
    assert [slugs(report) for report in reports.values()] == [[], [], []]
    assert str(reports["reproduce"].facts["blocks"]).startswith("16 of 16 compared, 0 differ")
    assert not any("of source" in topic for topic in reports["integrity"].not_checked)


def test_what_is_not_given_is_not_judged_and_said(made: Three) -> None:
    """Without --source the tensors of each other checkpoint are left out by number."""
    for report in questions(made, Folder(made.main)).values():
        assert {slug for slug, _ in slugs(report)} <= {"source-not-given"}
        assert "4 tensors of source native" in report.not_checked


def test_what_the_parent_has_otherwise_is_vouched_for_by_its_source_alone(made: Three) -> None:
    """Of a tensor in place of the parent's own the source must be given, whatever the manifest says of it."""
    found = slugs(integrity(Folder(made.root / "out"), Folder(made.main)))
    assert ("source-not-given", Q_A) in found
    assert slugs(integrity(Folder(made.root / "out"), parents(made))) == []


def test_diff_holds_each_tensor_to_its_origin(made: Three) -> None:
    """Native codes and the draft's joint are carried; only what was encoded is re-encoded."""
    report = diff(parents(made), Folder(made.root / "out"))
    told = {finding.slug for finding in report.findings}
    assert told <= {"diff-reencoded", "diff-config"}


def test_a_changed_byte_of_a_source_is_found(three: Three) -> None:
    """What was carried from another checkpoint is compared with that one, byte by byte."""
    change_tensor(three.native / "model-00001-of-00002.safetensors", Q_A, 7)
    assert ("carried-changed", Q_A) in slugs(integrity(Folder(three.root / "out"), parents(three)))
    change_tensor(three.mtp / "model.safetensors", "draft.mlp.experts.0.up_proj.weight", 9)
    found = slugs(reproduce(Folder(three.root / "out"), parents(three), None))
    assert found == [("block-differs", Q_A), ("block-differs", "model.layers.2.mlp.experts.0.up_proj.weight")]


def edited(three: Three, change: Callable[[dict[str, Any]], object]) -> Report:
    """The answer of integrity after the manifest says something else, its own digest made again."""
    path = three.root / "out" / MANIFEST
    body = json.loads(path.read_bytes())
    change(body)
    del body["self"]
    body["self"] = hashlib.sha256(canonical(body)).hexdigest()
    path.write_bytes(canonical(body))
    return integrity(Folder(three.root / "out"), parents(three))


def test_a_shifted_origin_is_found(three: Three) -> None:
    """A manifest that exchanges two experts of a source, or calls a tensor another checkpoint's, is found out."""
    draft = "model.layers.2.mlp.experts.{}.up_proj.weight"

    def exchange(body: dict[str, Any]) -> None:
        taken = body["sources"]["mtp"]["tensors"]
        taken[draft.format(0)], taken[draft.format(1)] = taken[draft.format(1)], taken[draft.format(0)]

    assert "rename-exchanges" in dict(slugs(edited(three, exchange)))


def test_a_tensor_of_the_parent_is_no_sources(three: Three) -> None:
    """To say of the main parent's norm that a source gave it excuses nothing: that source's norm has other bytes."""
    norm = "model.layers.0.norm.weight"
    report = edited(three, lambda body: body["sources"]["native"]["tensors"].update({norm: norm}))
    assert ("carried-changed", norm) in slugs(report)
    report = edited(three, lambda body: body["sources"]["mtp"]["tensors"].update({norm: norm}))
    assert ("rename-exchanges", norm) in slugs(report)
    assert any(slug == "source-changed" for slug, _ in slugs(report))


def test_a_malformed_record_is_refused(three: Three) -> None:
    """`sources` of another form are a fault of the manifest."""
    report = edited(three, lambda body: body["sources"]["mtp"].update(tensors=["x"]))
    assert "manifest-json" in dict(slugs(report))


def test_the_statement_names_every_origin(made: Three) -> None:
    """Provenance has each source's revision as a dependency, and each tensor's own name there as a parameter."""
    manifest, _ = parse_manifest((made.root / "out" / MANIFEST).read_bytes())
    assert manifest is not None
    definition = statement(manifest, "1")["predicate"]["buildDefinition"]
    names = {dependency["name"] for dependency in definition["resolvedDependencies"]}
    assert "source/native" in names
    origins = definition["internalParameters"]["origins"]
    assert origins["mtp"]["model.layers.2.eh_proj.weight"] == "draft.eh_proj.weight"


@pytest.mark.parametrize("question", ["all", "integrity", "reproduce", "roundtrip"])
def test_the_commands_take_sources(made: Three, question: str) -> None:
    """--source NAME=DIR stands beside --parent, once for each; without --parent it is a wrong call."""
    out = str(made.root / "out")
    given = ["--source", f"mtp={made.mtp}", "--source", f"native={made.native}"]
    answer = CliRunner().invoke(verify, [question, out, "--parent", str(made.main), *given, "--json"])
    assert answer.exit_code == 0, answer.output
    told = json.loads(answer.stdout)
    assert not any("of source" in topic for topic in told["not_checked"])
    if question in ("all", "integrity"):
        assert CliRunner().invoke(verify, [question, out, *given]).exit_code == 2
    twice = [*given, "--source", f"mtp={made.mtp}"]
    assert CliRunner().invoke(verify, [question, out, "--parent", str(made.main), *twice]).exit_code == 2


def test_a_source_that_no_manifest_names_is_said(made: Three) -> None:
    """A place that gave nothing is not asked for anything."""
    report = integrity(Folder(made.root / "out"), Parents(Folder(made.main), {"third": Folder(made.mtp)}))
    assert "source third" in report.not_checked
    assert {slug for slug, _ in slugs(report)} == {"source-not-given"}


def test_a_source_of_another_commit_is_found(three: Three) -> None:
    """Where a given place says which commit it is, the manifest must name that one of it."""
    note = three.native / ".cache" / "huggingface" / "download" / "config.json.metadata"
    note.parent.mkdir(parents=True)
    note.write_text("f" * 40 + "\n")
    report = integrity(Folder(three.root / "out"), parents(three))
    assert "parent-differs" in dict(slugs(report))
