"""`verify loads` says of 42 random models under each profile what the real transformers 5.24 did with them.

What it did is recorded in recorded.json by `make loaders-test`, which also compares afresh.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmill.verify.formats.transformers_modules import ARCHITECTURES
from shardmill.verify.questions import loads_vllm
from shardmill.verify.questions.loads_transformers import Held, hold
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.source import Folder
from tests.verify.loaders.cases import Edit, as_published, outcome, unfold, with_edit

RECORD = Path(__file__).with_name("recorded.json")
ROWS: list[dict[str, Any]] = json.loads(RECORD.read_text())


def checkpoint_of(row: dict[str, Any], config: dict[str, Any]) -> Checkpoint:
    """A checkpoint of these names and dtypes, opened without a file."""
    checkpoint = Checkpoint(
        Folder(Path("recorded")), {}, config=config, quantization=config["quantization_config"]
    )
    for dtype, names in row["tensors"].items():
        for name in unfold(names):
            checkpoint.tensors[name] = Tensor(name, dtype, (), 0, 0, "model.safetensors")
    return checkpoint


def cases(row: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Held]]:
    for found in row["outcomes"]:
        edit = Edit(**found["edit"])
        yield found, hold(checkpoint_of(row, with_edit(row["config"], edit)))


def predicted(held: Held) -> dict[str, Any]:
    coded = (name for name, word in held.weights.items() if word == "fp8")
    return outcome(coded, held.missing, held.unexpected, error=bool(held.error))


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['name']}-{row['profile']}" for row in ROWS])
def test_what_becomes_of_every_weight_is_what_transformers_did(row: dict[str, Any]) -> None:
    for found, held in cases(row):
        real = {key: value for key, value in found.items() if key not in ("edit", "said")}
        assert predicted(held) == real, found["edit"]


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['name']}-{row['profile']}" for row in ROWS])
def test_every_tensor_has_a_module_of_vllm_where_both_tables_hold_the_architecture(
    row: dict[str, Any],
) -> None:
    checkpoint = checkpoint_of(row, row["config"] | {"use_routing_bias": True})  # as MiniMax-M2 is published
    named = [replace(tensor, name=as_published(tensor.name)) for tensor in checkpoint.tensors.values()]
    checkpoint.tensors = {tensor.name: tensor for tensor in named}
    if loads_vllm.family_of(checkpoint) is None:
        assert row["config"]["model_type"] == "ministral"
        return
    assert loads_vllm.homeless(checkpoint) == []


def test_whatever_transformers_loads_wrongly_without_an_error_is_a_finding() -> None:
    """A scale that is missing or left over beside codes is found, but for a tied head that FP8Linear leaves float."""
    for row in ROWS:
        for found, held in cases(row):
            if held.error:
                continue
            harmless = (
                {"lm_head.weight_scale_inv"} if held.weights.get("lm_head.weight") == "float" else set()
            )
            wrong = (held.missing - harmless) | held.unexpected
            assert bool(held.wrong) == bool(wrong), (row["name"], found["edit"])


def test_the_record_holds_42_models_of_every_architecture_under_both_profiles() -> None:
    names = Counter(row["name"] for row in ROWS)
    assert len(names) == 42
    assert set(names.values()) == {2}
    kinds = {row["config"]["model_type"] for row in ROWS}
    assert len(kinds) >= 20
    assert all(any(kind in known.types for known in ARCHITECTURES) for kind in kinds)
    assert sum(len(row["outcomes"]) for row in ROWS) == 420
