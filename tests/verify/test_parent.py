"""What a child owes its parent: everything carried byte by byte, nothing lost but what is declared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shardmill.verify.questions.integrity import integrity
from shardmill.verify.reading.source import Folder
from shardmill.verify.rules.findings import Report
from tests.verify.zoo.clean import LM, mixed_child, nvfp4_parent
from tests.verify.zoo.model import Model, bf16, f32, patch

NORM = f"{LM}norm.weight"
Q = f"{LM}layers.0.self_attn.q_proj.weight"


def _ask(child: Model, parent: Model, folder: Path) -> Report:
    child.write(folder / "child")
    parent.write(folder / "parent")
    return integrity(Folder(folder / "child"), Folder(folder / "parent"))


def _rows(report: Report) -> list[tuple[str, str]]:
    return [(finding.slug, finding.tensor) for finding in report.findings]


@pytest.mark.parametrize("manifest", [True, False])
def test_a_true_child_is_clean_with_and_without_a_manifest(manifest: bool, tmp_path: Path) -> None:
    child = mixed_child()
    child.manifest = child.manifest if manifest else None
    report = _ask(child, nvfp4_parent(), tmp_path)
    assert report.findings == []
    assert "parent" in report.checked


def test_a_lost_layer_is_named_tensor_by_tensor(tmp_path: Path) -> None:
    child, parent = mixed_child(), nvfp4_parent()
    lost = [name for name in parent.names if ".layers.2.mlp.experts.3." in name]
    for name in lost:
        child.drop(name)
    rows = _rows(_ask(child, parent, tmp_path))
    assert {tensor for slug, tensor in rows if slug == "lost-from-parent"} == set(lost)


def test_what_the_plan_declares_as_left_out_or_renamed_is_not_lost(tmp_path: Path) -> None:
    child, parent = mixed_child(), nvfp4_parent()
    tower = [name for name in child.names if name.startswith("model.visual.blocks.0.")]
    for name in tower:
        child.drop(name)
    child.rename("lm_head.weight", "head.weight")
    child.manifest = {
        **(child.manifest or {}),
        "dropped": tower,
        "renamed": {"lm_head.weight": "head.weight"},
    }
    assert _rows(_ask(child, parent, tmp_path)) == []


@pytest.mark.parametrize("manifest", [True, False])
def test_a_carried_tensor_with_another_byte_is_named(manifest: bool, tmp_path: Path) -> None:
    child = mixed_child()
    child.manifest = child.manifest if manifest else None
    patch(child[NORM], 17, bytes([child[NORM].data[17] ^ 4]))
    (finding,) = _ask(child, nvfp4_parent(), tmp_path).findings
    assert (finding.slug, finding.tensor, finding.got) == (
        "carried-changed",
        NORM,
        "byte 17 of the tensor differs",
    )


def test_a_carried_tensor_of_another_form_is_named(tmp_path: Path) -> None:
    child = mixed_child()
    child.find(NORM)[NORM] = f32(1.0, 128)
    assert _rows(_ask(child, nvfp4_parent(), tmp_path)) == [("carried-retyped", NORM)]


def test_a_tensor_from_nowhere_is_named(tmp_path: Path) -> None:
    child = mixed_child()
    child.find(NORM)["backdoor.weight"] = f32(1.0, 8)
    assert _rows(_ask(child, nvfp4_parent(), tmp_path)) == [("added-undeclared", "backdoor.weight")]


def test_another_revision_of_the_parent_is_told_by_its_converted_tensors(tmp_path: Path) -> None:
    parent = nvfp4_parent()
    parent.find(Q)[Q] = bf16("another", 128, 128)
    assert _rows(_ask(mixed_child(), parent, tmp_path)) == [("source-changed", Q)]


def test_a_source_that_the_parent_does_not_have_is_named(tmp_path: Path) -> None:
    parent = nvfp4_parent()
    parent.drop(Q)
    assert ("source-changed", Q) in _rows(_ask(mixed_child(), parent, tmp_path))


def test_a_faulty_parent_is_said(tmp_path: Path) -> None:
    def damage(path: Path) -> None:
        data = (path / "model-00001-of-00002.safetensors").read_bytes()
        (path / "model-00001-of-00002.safetensors").write_bytes(data + b"x")

    child = mixed_child()
    child.write(tmp_path / "child")
    nvfp4_parent().write(tmp_path / "parent")
    damage(tmp_path / "parent")
    report = integrity(Folder(tmp_path / "child"), Folder(tmp_path / "parent"))
    assert ("parent-faulty", "") in _rows(report)


@pytest.mark.parametrize(
    "change",
    [lambda m: None, lambda m: m.shards.update({"z.safetensors": m.shards.pop(next(iter(m.shards)))})],
)
def test_a_tensor_may_lie_in_another_file_than_the_parents(
    change: Callable[[Model], None], tmp_path: Path
) -> None:
    child = mixed_child()
    change(child)
    slugs = {slug for slug, _ in _rows(_ask(child, nvfp4_parent(), tmp_path))}
    assert slugs <= {"incomplete-shards"}
