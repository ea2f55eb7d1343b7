"""To add a format is to add its file and the judge's: the worked example of CONTRIBUTING, in a copy of the tree.

The files are `fp6_channel.py` beside this one and `tests/verify/forms/fp6_bytes.py`. Nothing else of the copy differs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.conftest import bell
from tests.pipeline.convert.test_convert import MODULE, parent_of, recipe

ROOT = Path(__file__).resolve().parents[3]
FORMAT, FORM = Path(__file__).parent / "fp6_channel.py", ROOT / "tests" / "verify" / "forms" / "fp6_bytes.py"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source with the two files in the places that CONTRIBUTING names."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in ("kernels", "pipeline", "verify", "runtime_patch", "src"):
        shutil.copytree(
            ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(FORMAT, copy / "pipeline" / "formats")
    shutil.copy(FORM, copy / "verify" / "formats" / "forms")
    return copy


@pytest.fixture(scope="module")
def child(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A child in the new format, its parent beside it."""
    home = tmp_path_factory.mktemp("child")
    parent = parent_of(home / "parent", {f"{MODULE}.weight": ("BF16", bell(95, 64, 128))})
    written = str(recipe(home, "fp6-channel"))
    done = shardmill(
        tree, "build", "-c", written, "--parent", parent, "--out", home / "out", "--workers", "1"
    )
    assert done.returncode == 0, done.stderr
    return home / "out"


def shardmill(tree: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """The command as the tree's own source runs it."""
    program = "from shardmill.pipeline.commands.main import main; main()"
    env = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, words)], capture_output=True, text=True, env=env, cwd=tree
    )


def judged(tree: Path, child: Path, question: str) -> int:
    parent = ("--parent", child.parent / "parent") if question == "roundtrip" else ()
    return shardmill(tree, "verify", question, child, *parent).returncode


def test_a_format_is_its_file_and_the_judges(tree: Path, child: Path) -> None:
    """With these two files a recipe converts to the format, the profile declares it, and the judge finds it clean."""
    config = json.loads((child / "config.json").read_text())["quantization_config"]
    assert config["format"] == "fp6-in-bytes"
    assert [judged(tree, child, question) for question in ("integrity", "lint", "roundtrip")] == [0, 0, 0]


def test_the_judge_decodes_it_by_itself(tree: Path, child: Path, tmp_path: Path) -> None:
    """A row of codes with the wrong sign is found by the judge's own decoder."""
    bad = shutil.copytree(child.parent, tmp_path / "bad") / "out"
    data = bytearray((bad / "model.safetensors").read_bytes())
    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    begin = 8 + int.from_bytes(data[:8], "little") + head[f"{MODULE}.weight"]["data_offsets"][0]
    codes = np.frombuffer(data, np.uint8, 64 * 128, begin)
    codes ^= np.uint8(32)
    (bad / "model.safetensors").write_bytes(data)
    assert judged(tree, bad, "roundtrip") == 1


def test_without_the_judges_file_it_is_not_clean(child: Path) -> None:
    """The tree as it is takes the codes for another format: the judge's file is what makes it known."""
    assert judged(ROOT, child, "integrity") == 1
