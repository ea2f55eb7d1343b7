"""The real transformers 5.24 does with 42 random models, built afresh by both profiles, what `verify loads` says.

Needs the extra `loaders`: `make loaders-test`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.verify.loaders.cases import models
from tests.verify.loaders.test_recorded import ROWS, cases, predicted

pytest.importorskip("transformers", reason="needs the extra `loaders`")
pytest.importorskip("compressed_tensors", reason="needs the extra `loaders`")
pytest.importorskip("torch", reason="needs the extra `loaders`")

pytestmark = pytest.mark.filterwarnings("ignore")
AGAIN = "python -m tests.verify.loaders.record tests/verify/loaders/recorded.json"


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None)


@pytest.mark.parametrize(("name", "config"), list(models()), ids=[name for name, _ in models()])
def test_transformers_does_what_loads_says_of_todays_builds(
    name: str, config: dict[str, Any], tmp_path: Path, on_a_card: None
) -> None:
    from tests.verify.loaders.record import record

    for row in json.loads(json.dumps(list(record(name, config, tmp_path)))):
        for found, held in cases(row):
            assert predicted(held) == _bare(found), (row["profile"], found["edit"])
        before = next(old for old in ROWS if (old["name"], old["profile"]) == (name, row["profile"]))
        if row["config"] != before["config"]:
            pytest.fail(f"{name} is built otherwise than when it was recorded: {AGAIN}")


def _bare(found: dict[str, Any]) -> dict[str, Any]:
    """What transformers did, without the edit and its own words."""
    return {key: value for key, value in found.items() if key not in ("edit", "said")}
