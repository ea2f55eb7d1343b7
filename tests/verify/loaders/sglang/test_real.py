"""The real SGLang 0.5.23 does what is recorded, and with other models and other edits what `verify loads` says.

Needs what `make sglang-test` installs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardmill.verify.questions.loads_sglang import hold
from tests.verify.loaders.sglang.models import CLASSES
from tests.verify.loaders.sglang.test_recorded import ROWS, asked, cases_of, checkpoint_of, predicted, real

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="needs SGLang: make sglang-test"
)
REPOSITORY = Path(__file__).parents[4]
AGAIN = "python -m tests.verify.loaders.sglang.record tests/verify/loaders/sglang/recorded.json"


def record(out: Path, **more: str) -> list[dict[str, Any]]:
    """A record of today, from a process that believes in a card."""
    words = [sys.executable, "-m", "tests.verify.loaders.sglang.record", str(out), *CLASSES]
    places = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    subprocess.run(words, cwd=REPOSITORY, check=True, env=os.environ | {"PYTHONPATH": places} | more)
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    return rows


def test_sglang_does_what_is_recorded(tmp_path: Path) -> None:
    for then, now in zip(ROWS, record(tmp_path / "today.json"), strict=True):
        assert then == now, f"{now['name']}: {AGAIN}"


def test_of_models_and_edits_that_no_record_holds_loads_says_what_sglang_does(tmp_path: Path) -> None:
    differs = [
        (row["name"], case.form, case.edit)
        for row in record(tmp_path / "others.json", SGLANG_FIRST="11", SGLANG_EDITS="2")
        for case, found in cases_of(row, edited=2)
        if asked(case) and predicted(hold(checkpoint_of(case))) != real(found)
    ]
    assert differs == []
