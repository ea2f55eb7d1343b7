"""Fused FP8 weights with a scale a part, and NVFP4 banks with a number an expert, are held to the parent's values."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.lint import lint
from shardmill.verify.questions.origin import origin
from shardmill.verify.questions.roundtrip import Limits, roundtrip
from shardmill.verify.rules.findings import Report
from tests.verify.memory import Memory
from tests.verify.mutants import files_of
from tests.verify.zoo import encoders as e
from tests.verify.zoo.clean import nearest_e4m3
from tests.verify.zoo.model import Blob, Model

ATTENTION, BANK = "model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.experts.gate_up_proj"
CONFIG = {
    "model_type": "phi3",
    "num_hidden_layers": 1,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
HEIGHTS = (128, 64, 64)
EXPERTS, ROWS = 3, 64


def _sized(name: str, factor: float, rows: int) -> e.Array:
    return e.rounded(e.matrix(name, rows, 128) * np.float32(factor))


def _floats() -> dict[str, e.Array]:
    parts = [_sized(part, size, rows) for part, size, rows in zip("qkv", (1, 3, 0.4), HEIGHTS, strict=True)]
    bank = [_sized(f"expert {n}", size, ROWS) for n, size in enumerate((1, 4, 0.3))]
    return {ATTENTION: np.concatenate(parts), BANK: np.stack(bank)}


def _parent() -> Memory:
    tensors = {f"{name}.weight": e.blob("BF16", values) for name, values in _floats().items()}
    return Memory(files_of(Model({"model.safetensors": tensors}, dict(CONFIG), indexed=False)))


def _fused() -> dict[str, Blob]:
    whole, begin = _floats()[ATTENTION], np.cumsum((0, *HEIGHTS))
    scale = np.array([np.abs(whole[a:b]).max() / np.float32(448) for a, b in pairwise(begin)])
    codes = nearest_e4m3(whole / np.repeat(scale, HEIGHTS)[:, None].astype("<f4"))
    return {
        f"{ATTENTION}.weight": e.blob("F8_E4M3", codes),
        f"{ATTENTION}.weight_scale": e.blob("F32", scale),
    }


def _bank(halves: bool) -> dict[str, Blob]:
    codes, scales, totals = [], [], []
    for w in _floats()[BANK]:
        parts = (w[: ROWS // 2], w[ROWS // 2 :]) if halves else (w,)
        total = [np.abs(part).max() / np.float32(6 * 448) for part in parts]
        spread = np.repeat(total, ROWS // len(parts))[:, None].astype("<f4")
        stored = nearest_e4m3(np.maximum(e.blocks(w, 1, 16) / (np.float32(6) * spread), 2.0**-9))
        values = e._e4m3_values()[stored] * spread
        codes.append(e.nearest_e2m1(w / e.spread(values, 1, 16, w.shape)))
        scales.append(stored)
        totals.append(total)
    return {
        f"{BANK}.weight": e.blob("U8", np.stack(codes)),
        f"{BANK}.weight_scale": e.blob("F8_E4M3", np.stack(scales)),
        f"{BANK}.weight_scale_2": e.blob(
            "F32", np.array(totals).reshape(EXPERTS, -1) if halves else np.ravel(totals)
        ),
    }


def _child(tensors: dict[str, Blob], change: Callable[[dict[str, Blob]], None] = lambda _: None) -> Memory:
    others = {f"{name}.weight": e.blob("BF16", values) for name, values in _floats().items()}
    whole = {**{name: blob for name, blob in others.items() if name not in tensors}, **tensors}
    change(whole)
    return Memory(files_of(Model({"model.safetensors": whole}, dict(CONFIG), indexed=False)))


def _slugs(report: Report) -> set[str]:
    return {finding.slug for finding in report.findings if finding.severity == "error"}


def _scale(name: str, place: int, factor: float) -> Callable[[dict[str, Blob]], None]:
    def change(tensors: dict[str, Blob]) -> None:
        values = np.frombuffer(tensors[name].data, "<f4").copy()
        values[place] *= np.float32(factor)
        tensors[name].data = values.tobytes()

    return change


@pytest.mark.parametrize(
    "made", [_fused(), _bank(False), _bank(True)], ids=["parts", "bank", "bank of halves"]
)
def test_a_clean_one_is_compared_and_gives_no_finding(made: dict[str, Blob]) -> None:
    report = roundtrip(_child(made), _parent(), Limits())
    assert (_slugs(report), report.not_checked) == (set(), {})
    assert "values" in report.checked
    found = _slugs(lint(_child(made))) | _slugs(integrity(_child(made), _parent()))
    assert found <= {"config-silent"}  # no declaration here


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("factor", [2.0, 0.5, 1.1])
@pytest.mark.parametrize(
    ("made", "leaf"),
    [(_fused(), f"{ATTENTION}.weight_scale"), (_bank(False), f"{BANK}.weight_scale_2")],
    ids=["parts", "bank"],
)
def test_one_parts_or_experts_number_changed_is_found(
    made: dict[str, Blob], leaf: str, place: int, factor: float
) -> None:
    clean = {name: Blob(blob.dtype, blob.shape, blob.data) for name, blob in made.items()}
    assert _slugs(roundtrip(_child(clean, _scale(leaf, place, factor)), _parent(), Limits()))


def test_parts_whose_ends_the_config_does_not_say_are_left_out_by_name() -> None:
    child = _child(_fused(), lambda tensors: None)
    files = dict(child._files)
    files["config.json"] = files["config.json"].replace(
        b'"num_attention_heads": 4', b'"num_attention_heads": 5'
    )
    report = roundtrip(Memory(files), _parent(), Limits())
    assert any("one scale a fused part" in why for why in report.not_checked.values())


def test_the_formula_of_a_bank_with_a_number_an_expert_is_named() -> None:
    report = origin(_child(_bank(False)), _parent(), 3)
    assert "NVFP4, amax / (6 * global) in f32" in str(report.facts["NVFP4 of ModelOpt"])
    assert report.findings == []
