"""Who writes the manifest gains nothing by it where the parent is at hand; settings and side files are the parent's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.roundtrip import Limits, roundtrip
from shardmill.verify.reading import source as places
from shardmill.verify.reading.source import Folder
from tests.verify.test_pairs import Q, Two
from tests.verify.zoo.clean import LM, encoded
from tests.verify.zoo.model import Blob, bf16

NORM = f"{LM}layers.0.input_layernorm.weight"
OTHER = f"{LM}layers.1.input_layernorm.weight"


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path)


def _found(two: Two) -> set[str]:
    child, parent = two.sources()
    return {finding.slug for finding in integrity(child, parent).findings}


def _listed_source(two: Two) -> None:
    two.child[NORM].data = bf16("other", 128).data
    two.child.manifest["sources"][NORM] = "0" * 32  # type: ignore[index]


def _swapped(two: Two) -> None:
    first, second = two.child[NORM].data, two.child[OTHER].data
    two.child[NORM].data, two.child[OTHER].data = second, first
    two.child.manifest["renamed"] = {NORM: OTHER, OTHER: NORM}  # type: ignore[index]


def _dropped(two: Two) -> None:
    two.child.drop(NORM)
    two.child.manifest["dropped"] = [NORM]  # type: ignore[index]


def _garbage(two: Two) -> None:
    two.child.find(NORM)[NORM] = Blob("F32", (128,), bytes(512))
    two.child.manifest["repairs"] = [{"repair": "reconcile/1", "tensor": NORM}]  # type: ignore[index]


def _claimed(two: Two) -> None:
    two.child.manifest["parent"] = {"repository": "org/name", "revision": "0" * 40}  # type: ignore[index]


@pytest.mark.parametrize(
    ("lie", "slug"),
    [
        (_listed_source, "carried-changed"),
        (_swapped, "rename-exchanges"),
        (_dropped, "dropped-in-part"),
        (_garbage, "carried-retyped"),
        (_claimed, "parent-differs"),
    ],
)
def test_a_manifest_removes_no_check(two: Two, lie: Callable[[Two], None], slug: str) -> None:
    assert slug not in _found(two)
    lie(two)
    assert slug in _found(two)


def test_a_file_without_digest_is_said_where_files_are_hashed(two: Two) -> None:
    child, _ = two.sources()
    from tests.verify.zoo.model import canonical

    path = two.folder / "child" / "shardmill.manifest.json"
    value = json.loads(path.read_bytes())
    value["files"]["config.json"]["sha256"] = None
    path.write_bytes(canonical(value))
    report = integrity(child)
    assert "digest-missing" in {finding.slug for finding in report.findings}
    assert any(topic.startswith("digests of 1 files") for topic in report.not_checked)


def test_what_is_excused_from_the_parents_bytes_is_listed(two: Two) -> None:
    child, parent = two.sources()
    (said,) = integrity(child, parent).facts["excused from the parent's bytes"].values()  # type: ignore[attr-defined]
    assert said.startswith("12 tensors")


@pytest.mark.parametrize("key", ["rope_theta", "eos_token_id"])
def test_a_setting_that_is_not_the_parents_is_found(two: Two, key: str) -> None:
    for model, value in ((two.parent, 1), (two.child, 2)):
        model.config[key] = value  # type: ignore[index]
    assert "parent-config" in _found(two)


def test_a_tokenizer_that_is_not_the_parents_is_found(two: Two) -> None:
    two.child.others["tokenizer.json"] = b'{"model": {"vocab": {"a": 0}}}'
    assert "parent-side-file" in _found(two)


def _pair(two: Two, change: Callable[[np.ndarray], None]) -> set[str]:  # type: ignore[type-arg]
    """A child whose q is made of a parent's q with a change in a place."""
    values = np.random.Generator(np.random.PCG64(1)).normal(0, 0.02, (128, 128)).astype("<f4")
    bits = values.view("<u4") >> 16
    two.parent[Q].data = bits.astype("<u2").tobytes()
    changed = bits.astype("<u2").copy()
    change(changed)
    shard = two.child.find(Q)
    shard[Q], shard[f"{Q}_scale_inv"] = encoded(Blob("BF16", (128, 128), changed.tobytes()), 32)
    child, parent = two.sources()
    return {finding.slug for finding in roundtrip(child, parent, Limits()).findings}


def _rows(bits: np.ndarray) -> None:  # type: ignore[type-arg]
    bits[[3, 4]] = bits[[4, 3]]


def _column(bits: np.ndarray) -> None:  # type: ignore[type-arg]
    bits[:, 7] ^= 0x8000


@pytest.mark.parametrize("change", [_rows, _column])
def test_one_row_or_column_that_is_another_is_named(two: Two, change: Callable[..., None]) -> None:
    assert "roundtrip-local" in _pair(two, change)


def test_no_row_of_a_true_weight_is_named(two: Two) -> None:
    assert _pair(two, lambda bits: None) == set()


def test_a_weight_a_little_too_large_as_a_whole_is_found(two: Two) -> None:
    _pair(two, lambda bits: None)
    scale = two.child[f"{Q}_scale_inv"]
    scale.data = (np.frombuffer(scale.data, "<f4") * np.float32(1.03)).astype("<f4").tobytes()
    child, parent = two.sources()
    assert "roundtrip-gain" in {finding.slug for finding in roundtrip(child, parent, Limits()).findings}


def test_a_file_that_was_hardly_written_is_not_read_for_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.verify.zoo.llama import whole

    monkeypatch.setattr(places, "SPARSE_FROM", 1 << 20)
    whole().write(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(1 << 30)
    assert "sparse-file" in {finding.slug for finding in integrity(Folder(tmp_path)).findings}
