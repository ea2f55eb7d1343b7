"""`verify loads` says of every case what the real SGLang 0.5.23 did with it.

What it did is recorded in recorded.json by `make sglang-test`, which also compares afresh.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardmill.verify.questions.loads_sglang import Held, hold
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.source import Folder
from tests.verify.loaders.cases import Edit, fold
from tests.verify.loaders.sglang.forms import Case, cases
from tests.verify.loaders.sglang.models import Headers

RECORD = Path(__file__).with_name("recorded.json")
ROWS: list[dict[str, Any]] = json.loads(RECORD.read_text())
DTYPES = {"F8_E4M3": "float8_e4m3fn", "U8": "uint8", "I32": "int32", "I64": "int64"}


def checkpoint_of(case: Case) -> Checkpoint:
    """A checkpoint of these headers, opened without a file."""
    checkpoint = Checkpoint(
        Folder(Path("recorded")),
        {},
        config=case.config,
        quantization=case.config.get("quantization_config", {}),
    )
    for name, (dtype, shape) in case.headers.items():
        checkpoint.tensors[name] = Tensor(name, dtype, tuple(shape), 0, 0, "model.safetensors")
    return checkpoint


def cases_of(row: dict[str, Any]) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Each recorded case with what SGLang did: forms are made again, our own builds are recorded whole."""
    headers: Headers = {name: (dtype, tuple(shape)) for name, (dtype, shape) in row["headers"].items()}
    if row["outcomes"][0]["form"].startswith("ours"):
        yield Case("ours", Edit("as built"), row["config"], headers), row["outcomes"][0]
        return
    made = list(cases(row["name"], row["config"], headers))
    yield from zip(made, row["outcomes"], strict=True)


def predicted(held: Held) -> dict[str, Any]:
    if held.error:
        return {"error": True}
    return {
        "held": {
            DTYPES[word]: fold(n for n, w in held.weights.items() if w == word)
            for word in sorted(set(held.weights.values()) & set(DTYPES), key=DTYPES.__getitem__)
        },
        "missing": fold(held.missing),
        "unexpected": fold(held.unexpected),
    }


def real(found: dict[str, Any]) -> dict[str, Any]:
    if "error" in found:
        return {"error": True}
    return {key: found[key] for key in ("held", "missing", "unexpected")}


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['name']} {row['outcomes'][0]['form']}" for row in ROWS])
def test_what_becomes_of_every_weight_is_what_sglang_did(row: dict[str, Any]) -> None:
    for case, found in cases_of(row):
        assert predicted(hold(checkpoint_of(case))) == real(found), (case.form, case.edit)
