"""To add a format is to add its file: the worked example of docs/formats.md, built with."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shardmill.pipeline import formats as folder
from tests.kernels.conftest import bell
from tests.pipeline.convert.test_convert import MODULE, arrays_of, decoded, parent_of, recipe
from tests.pipeline.parents import build

EXAMPLE = Path(__file__).parent / "worked_example.py"


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example's file in a folder that the package of formats looks into."""
    (tmp_path / "more").mkdir()
    shutil.copy(EXAMPLE, tmp_path / "more" / "int6_channel.py")
    monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path / "more")])
    folder.formats.cache_clear()
    yield
    folder.formats.cache_clear()
    sys.modules.pop(f"{folder.__name__}.int6_channel", None)


@pytest.mark.usefixtures("added")
def test_a_format_is_one_file(tmp_path: Path) -> None:
    """With its file alone, a recipe converts to it, its profile declares it, and it decodes to near the parent."""
    source = bell(95, 64, 128)
    parent = parent_of(tmp_path / "parent", {f"{MODULE}.weight": ("BF16", source)})
    build(parent, tmp_path / "out", recipe(tmp_path, "int6-channel"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["num_bits"] == 6
    weights = decoded(arrays_of(tmp_path / "out"), MODULE, "int6-channel", "compressed-tensors")
    parents = (source.astype(np.uint32) << 16).view(np.float32)
    assert 0 < np.linalg.norm(weights - parents) / np.linalg.norm(parents) < 0.05
