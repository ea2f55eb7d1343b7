"""Lies in a coherent manifest: with the true parent at hand each is a finding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.verify.commands.all import ask_all, together
from shardmill.verify.commands.options import Bar
from shardmill.verify.reading.source import Folder
from shardmill.verify.rules.findings import Report
from tests.verify.test_pairs import Q, Two
from tests.verify.zoo.clean import LM, encoded
from tests.verify.zoo.model import bf16, f32

NORM = f"{LM}layers.0.input_layernorm.weight"
LAST_NORM = f"{LM}norm.weight"
EMBEDDING = f"{LM}embed_tokens.weight"
HEAD = "lm_head.weight"
SCALE = f"{Q}_scale_inv"
Lie = Callable[[Two, dict[str, Any]], None]


def _other(two: Two, name: str) -> None:
    blob = two.child[name]
    blob.data = bf16(f"other {name}", *blob.shape).data


def _converted_norm(two: Two, manifest: dict[str, Any]) -> None:
    _other(two, NORM)
    manifest["conversions"][NORM] = {"family": "x", "numerics": "bf16/1", "block": [1, 1]}


def _dequantized_head(two: Two, manifest: dict[str, Any]) -> None:
    _other(two, HEAD)
    manifest["conversions"][HEAD] = {"family": "x", "numerics": "dequantize/1", "block": [128, 128]}


def _reconciled_head(two: Two, manifest: dict[str, Any]) -> None:
    _other(two, HEAD)
    manifest["repairs"] = [{"repair": "reconcile/1", "tensor": HEAD}]


def _adopted_norm(two: Two, manifest: dict[str, Any]) -> None:
    _other(two, NORM)
    file = next(file for file, shard in two.child.shards.items() if NORM in shard)
    manifest["repairs"] = [{"repair": "input_scales/1", "file": file}]


def _unknown_repair(two: Two, manifest: dict[str, Any]) -> None:
    _other(two, NORM)
    manifest["repairs"] = [{"repair": "polish/7", "tensor": NORM}]


def _dropped_last_norm(two: Two, manifest: dict[str, Any]) -> None:
    two.child.drop(LAST_NORM)
    manifest["dropped"] = [LAST_NORM]


def _dropped_embedding(two: Two, manifest: dict[str, Any]) -> None:
    two.child.drop(EMBEDDING)
    manifest["dropped"] = [EMBEDDING]


def _moved_norm(two: Two, manifest: dict[str, Any]) -> None:
    """One norm is left out, and the other layer's has its name."""
    other = f"{LM}layers.1.input_layernorm.weight"
    two.child[NORM].data = two.child[other].data
    manifest["renamed"] = {other: NORM}
    manifest["dropped"] = [NORM]


def _renamed_head(two: Two, manifest: dict[str, Any]) -> None:
    two.child[HEAD].data = (
        two.child[EMBEDDING].data[: len(two.child[HEAD].data)].ljust(len(two.child[HEAD].data), b"\1")
    )
    manifest["renamed"] = {HEAD: HEAD}


def _no_record(two: Two, manifest: dict[str, Any]) -> None:
    """The codes of another weight, of which the manifest says nothing at all."""
    _foreign(two)
    del manifest["conversions"][Q]


def _foreign(two: Two) -> None:
    shard = two.child.find(Q)
    shard[Q], shard[SCALE] = encoded(bf16("quite another", 128, 128), 32)


def _unknown_numerics(two: Two, manifest: dict[str, Any]) -> None:
    _foreign(two)
    manifest["conversions"][Q]["numerics"] = "mine/1"


def _numerics_of_another_form(two: Two, manifest: dict[str, Any]) -> None:
    _foreign(two)
    manifest["conversions"][Q]["numerics"] = "int8/1"


def _numerics_that_keep_codes(two: Two, manifest: dict[str, Any]) -> None:
    _foreign(two)
    manifest["conversions"][Q]["numerics"] = "reblock/1"


def _lossless(two: Two, manifest: dict[str, Any]) -> None:
    _foreign(two)
    manifest["conversions"][Q] |= {"numerics": "recover/1", "exact_blocks": 16}


def _counted(two: Two, manifest: dict[str, Any]) -> None:
    manifest["conversions"][Q] |= {"numerics": "recover/1", "exact_blocks": 16}


def _transposed(two: Two, manifest: dict[str, Any]) -> None:
    """A square weight that the recipe's text calls transposed."""
    text = '[[family]]\nname = "turned"\ntransposed = true\n'
    _foreign(two)
    manifest["conversions"][Q]["family"] = "turned"
    manifest["recipe"] = _recipe(text)


def _recipe(text: str) -> dict[str, Any]:
    import hashlib

    return {"name": "lies", "layers": [{"toml": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}]}


def _of_another_block(two: Two, manifest: dict[str, Any]) -> None:
    manifest["conversions"][Q]["block"] = [64, 64]


def _one_row(two: Two, manifest: dict[str, Any]) -> None:
    codes = np.frombuffer(two.child[Q].data, "u1").reshape(128, 128).copy()
    codes[[3, 4]] = codes[[4, 3]]
    two.child[Q].data = codes.tobytes()


def _a_scale(two: Two, manifest: dict[str, Any]) -> None:
    scales = np.frombuffer(two.child[SCALE].data, "<f4").copy()
    scales[5] *= np.float32(1.0001)
    two.child[SCALE].data = scales.tobytes()


def _added(two: Two, manifest: dict[str, Any]) -> None:
    """A tensor of no parent, beside a conversion that nobody made."""
    two.child.find(Q)[f"{LM}layers.0.self_attn.extra_scale"] = f32(3.0)
    manifest["conversions"][f"{LM}layers.0.self_attn.extra"] = {
        "family": "x",
        "numerics": "amax/1",
        "block": [1, 1],
    }


def _a_settings_file(two: Two, manifest: dict[str, Any]) -> None:
    assert two.child.config is not None
    two.child.config["hidden_act"] = "relu"
    assert two.parent.config is not None
    two.parent.config["hidden_act"] = "silu"


LIES: tuple[Lie, ...] = (
    _converted_norm, _dequantized_head, _reconciled_head, _adopted_norm, _unknown_repair, _dropped_last_norm,
    _dropped_embedding, _moved_norm, _renamed_head, _no_record, _unknown_numerics, _numerics_of_another_form,
    _numerics_that_keep_codes, _lossless, _counted, _transposed, _of_another_block, _one_row, _a_scale, _added,
    _a_settings_file,
)  # fmt: skip


def _all(folder: Path) -> Report:
    return together(ask_all(Folder(folder / "child"), Folder(folder / "parent"), Bar(), 5))


def _two(folder: Path) -> tuple[Two, dict[str, Any]]:
    two = Two(folder)
    assert two.child.manifest is not None
    return two, two.child.manifest


def test_the_true_child_is_without_a_fault(tmp_path: Path) -> None:
    two, _ = _two(tmp_path)
    two.sources()
    assert [f for f in _all(tmp_path).findings if f.severity != "info"] == []


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__.strip("_").replace("_", "-"))
def test_a_lie_beside_the_true_parent_is_found(tmp_path: Path, lie: Lie) -> None:
    two, manifest = _two(tmp_path)
    lie(two, manifest)
    two.sources()
    assert _all(tmp_path).exit_code == 1
