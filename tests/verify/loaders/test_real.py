"""The real transformers 5.24 does with 40 random models what is recorded, and so what `verify loads` says of them.

Needs the extra `loaders`: `make loaders-test`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.verify.loaders.cases import models

pytest.importorskip("transformers", reason="needs the extra `loaders`")
pytest.importorskip("compressed_tensors", reason="needs the extra `loaders`")
pytest.importorskip("torch", reason="needs the extra `loaders`")

pytestmark = pytest.mark.filterwarnings("ignore")
RECORD = Path(__file__).with_name("recorded.json")


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None)


@pytest.mark.parametrize(("name", "config"), list(models()), ids=[name for name, _ in models()])
def test_transformers_does_what_was_recorded(
    name: str, config: dict[str, object], tmp_path: Path, on_a_card: None
) -> None:
    from tests.verify.loaders.record import record

    recorded = [row for row in json.loads(RECORD.read_text()) if row["name"] == name]
    afresh = json.loads(json.dumps(list(record(name, config, tmp_path))))
    for old, new in zip(recorded, afresh, strict=True):
        assert [_bare(found) for found in new["outcomes"]] == [_bare(found) for found in old["outcomes"]]


def _bare(found: dict[str, object]) -> dict[str, object]:
    """Without the loader's own words."""
    return {key: value for key, value in found.items() if key != "said"}
