"""A child by another tool beside its parent: names and heads that the tool is known to change raise no alarm."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.lint import lint
from shardmill.verify.questions.roundtrip import Limits, roundtrip
from shardmill.verify.reading.source import Folder
from shardmill.verify.rules.findings import Report
from tests.verify.zoo import encoders as e
from tests.verify.zoo.model import Model
from tests.verify.zoo.published import PUBLISHED, parent

MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _published(name: str) -> Model:
    return next(one for one in PUBLISHED if one.name == name).model()


def _asked(child: Model, before: Model, folder: Path) -> tuple[Report, list[str]]:
    child.write(folder / "child")
    before.write(folder / "parent")
    pair = Folder(folder / "child"), Folder(folder / "parent")
    reports = integrity(*pair), roundtrip(*pair, Limits())
    return reports[0], [f.slug for report in reports for f in report.findings if f.severity != "info"]


def _mixtral(model: Model) -> Model:
    for name in model.names:
        for new, old in MIXTRAL.items():
            if f".experts.0.{new}." in name or f".experts.1.{new}." in name:
                model.rename(name, name.replace(new, old))
    return model


def test_experts_that_a_tool_renamed_are_compared_under_their_old_names(tmp_path: Path) -> None:
    """llm-compressor writes gate_proj, up_proj, down_proj where Mixtral has w1, w3, w2."""
    child, before = _published("block fp8 moe"), _mixtral(parent(True))
    assert _asked(child, before, tmp_path / "true")[1] == []
    swapped = _published("block fp8 moe")
    front = "model.layers.1.mlp.experts.0."
    for leaf in ("weight", "weight_scale_inv"):
        swapped.rename(f"{front}gate_proj.{leaf}", "held")
        swapped.rename(f"{front}up_proj.{leaf}", f"{front}gate_proj.{leaf}")
        swapped.rename("held", f"{front}up_proj.{leaf}")
    assert set(_asked(swapped, before, tmp_path / "swapped")[1]) >= {"roundtrip-error"}


def test_a_head_that_the_config_ties_is_said_and_not_called_lost(tmp_path: Path) -> None:
    child = _published("fp8 channel")
    child.drop("lm_head.weight")
    assert child.config is not None
    lost = _asked(child.copy(), parent(False), tmp_path / "lost")[1]
    child.config["tie_word_embeddings"] = True
    report, loud = _asked(child, parent(False), tmp_path / "tied")
    assert (lost, loud) == (["lost-from-parent"], [])
    assert "head-tied" in {finding.slug for finding in report.findings}
    assert "lm_head" in report.not_checked


def test_mistrals_own_layout_is_not_compared_and_that_is_said(tmp_path: Path) -> None:
    child = parent(False)
    for name in child.names:
        bare = name.replace("model.layers", "layers").replace("self_attn.q_proj", "attention.wq")
        child.rename(name, bare.replace("model.", "").replace("lm_head", "output"))
    report, loud = _asked(child, parent(False), tmp_path)
    assert loud == []
    assert "Mistral's own layout" in report.not_checked["parent"]


def test_another_models_weights_are_not_taken_for_another_layout(tmp_path: Path) -> None:
    child = parent(False)
    for name in child.names:
        child.rename(name, name.replace("model.layers", "transformer.h").replace("model.", "transformer."))
    assert "lost-from-parent" in _asked(child, parent(False), tmp_path)[1]


def _of_four_bits(model: Model, most: int) -> Model:
    """W4AFP8: INT4 codes a byte each, scales by groups of 32."""
    for name in model.names:
        if name.endswith("_proj.weight"):
            rows, cols = model[name].shape
            w = e.matrix(name, rows, cols)
            s = abs(w.reshape(rows, -1, 32)).max(2) / most
            codes = (w.reshape(rows, -1, 32) / s[..., None]).round().astype("i1").reshape(rows, cols)
            model.shards["model.safetensors"][name] = e.blob("I8", codes)
            model.shards["model.safetensors"][f"{name}_scale"] = e.blob("F32", s)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": "int-quantized"}
    assert model.config is not None
    model.config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip
    return model


@pytest.mark.parametrize(("most", "found"), [(7, []), (100, ["entry-kind"])])
def test_four_bits_in_bytes_are_held_to_four_bits(most: int, found: list[str], tmp_path: Path) -> None:
    _of_four_bits(parent(False), most).write(tmp_path)
    assert sorted({f.slug for f in lint(Folder(tmp_path)).findings if f.severity != "info"}) == found
