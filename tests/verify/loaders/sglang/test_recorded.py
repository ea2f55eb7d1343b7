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
from shardmill.verify.questions.unasked import UnaskedError
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.source import Folder
from tests.verify.loaders.cases import Edit, fold
from tests.verify.loaders.sglang.forms import Case, cases
from tests.verify.loaders.sglang.models import CLASSES, unfold_headers, widened

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


def cases_of(row: dict[str, Any], edited: int = 1) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Each recorded case with what SGLang did: forms are made again, our own builds are recorded whole."""
    config, headers = row["config"], unfold_headers(row["headers"])
    if row["name"].endswith("ours"):
        yield Case("ours", Edit("as built"), config, headers), row["outcomes"][0]
        return
    if row["name"].endswith("wide"):
        config, headers = widened(config, headers)
    yield from zip(cases(row["name"], config, headers, edited), row["outcomes"], strict=True)


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
        if asked(case):
            assert predicted(hold(checkpoint_of(case))) == real(found), (case.form, case.edit)


def asked(case: Case) -> bool:
    """Whether the table follows the declaration; where it does not, that is said by name."""
    try:
        hold(checkpoint_of(case))
    except UnaskedError as error:
        return "no table of what SGLang 0.5.23 makes of" not in str(error)
    return True


def test_the_record_holds_27_architectures_and_what_is_not_followed_is_named() -> None:
    kinds = {row["config"]["model_type"] for row in ROWS}
    assert kinds == set(CLASSES)
    every = [case for row in ROWS for case, _ in cases_of(row)]
    unasked = {(case.config["model_type"], case.form) for case in every if not asked(case)}
    assert {kind for kind, _ in unasked} == {"mixtral", "gpt_oss"}
    assert len(every) > 1000
