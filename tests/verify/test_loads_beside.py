"""Beside other questions, `loads` calls a fault what is one of the files, and notes what is one loader's limit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardmill.verify.questions.loads import loads
from shardmill.verify.reading.source import Folder
from tests.verify.zoo import encoders as e
from tests.verify.zoo.clean import mixed_child
from tests.verify.zoo.loading import _keep_b
from tests.verify.zoo.model import Model
from tests.verify.zoo.published import PUBLISHED, parent

SHARD = "model.safetensors"


def _published(name: str) -> Model:
    return next(one for one in PUBLISHED if one.name == name).model()


def _loud(model: Model, folder: Path, *, beside: bool) -> list[str]:
    model.write(folder)
    return sorted({f.slug for f in loads(Folder(folder), beside=beside).findings if f.severity != "info"})


def _put(model: Model, name: str, rows: int = 128, cols: int = 128) -> None:
    model.shards[SHARD][name] = e.blob("BF16", e.matrix(name, rows, cols))


@pytest.mark.parametrize(
    ("name", "asked"), [("fp8 static", ["loads-garbage"]), ("fp8 scalar scale_inv", ["loader-refuses"])]
)
def test_what_only_one_loader_takes_is_noted(name: str, asked: list[str], tmp_path: Path) -> None:
    """`weight_scale` under fp8 is vLLM's, a scalar `weight_scale_inv` is transformers': each misreads the other's."""
    model = _published(name)
    assert _loud(model, tmp_path, beside=True) == []
    noted = {finding.slug for finding in loads(Folder(tmp_path), beside=True).findings}
    assert noted >= {"one-loader"}
    assert _loud(model, tmp_path, beside=False) == asked


def test_a_block_over_two_fused_parts_is_a_limit_of_a_kernel(tmp_path: Path) -> None:
    model = _published("block fp8")
    name = "model.layers.0.mlp.gate_proj.weight"
    w = e.matrix(name, 192, 128)
    model.shards[SHARD] |= e.block_fp8(128)("model.layers.0.mlp.gate_proj", w)
    assert _loud(model, tmp_path, beside=True) == []
    assert _loud(model, tmp_path, beside=False) == ["loader-refuses"]


def test_a_weight_beside_a_whole_model_is_noted_and_a_misnamed_one_is_a_fault(tmp_path: Path) -> None:
    model = parent(False)
    _put(model, "model.layers.0.self_attn.extra_proj.weight")
    assert _loud(model, tmp_path / "more", beside=True) == []
    for old, new in (("model.norm.weight", "model.nrm.weight"),
                     ("model.layers.1.input_layernorm.weight", "model.layers.1.input_norm.weight")):  # fmt: skip
        model = parent(False)
        model.rename(old, new)
        assert _loud(model, tmp_path / new, beside=True) == ["no-home"]


def _uneven(model: Model) -> None:
    _keep_b(model)


@pytest.mark.parametrize("change", [_uneven])
def test_a_child_of_ours_answers_for_every_loader(change: Callable[[Model], None], tmp_path: Path) -> None:
    model = mixed_child()
    change(model)
    assert _loud(model, tmp_path, beside=True) == ["loader-refuses"]


def test_what_no_loader_takes_is_a_fault(tmp_path: Path) -> None:
    """A module of floats that the config makes FP8: vLLM and transformers both hold what memory was."""
    model = _published("block fp8")
    place = "model.layers.1.self_attn.o_proj.weight"
    model.drop(f"{place}_scale_inv")
    model.shards[SHARD][place] = e.blob("BF16", np.full((128, 128), 0.02, np.float32))
    assert _loud(model, tmp_path, beside=True) == ["loads-garbage"]
