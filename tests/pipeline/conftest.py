"""The micro parent and the tiny toy parent, each made once; tests that change a parent copy it first."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from shardmill.pipeline.toy.sizes import SIZES
from shardmill.pipeline.toy.write import toy_headers
from shardmill.pipeline.toy.write import write_parent as write_toy
from tests.pipeline.parents import build, published, write_parent

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What outlasts a power cut no test can see, and a busy disk makes waiting for it dear.

    That all is synced, and when, is asserted in test_atomic.
    """
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """A micro parent of one's own."""
    return write_parent(tmp_path / "parent")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a build of the micro parent publishes: name -> bytes."""
    folder = tmp_path_factory.mktemp("reference")
    build(write_parent(folder / "parent"), folder / "out")
    return published(folder / "out")


@pytest.fixture
def built(parent: Path, tmp_path: Path) -> Path:
    """The micro parent's checkpoint, built."""
    build(parent, tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy parent of size tiny. Nobody writes to it."""
    folder = tmp_path_factory.mktemp("tiny") / "parent"
    write_toy(folder, SIZES["tiny"], toy_headers(SIZES["tiny"]), lambda count: None)
    return folder


@pytest.fixture(scope="session")
def tiny_built(tiny: Path) -> Path:
    build(tiny, tiny.parent / "out", ROOT / "pipeline.toml")
    return tiny.parent / "out"


@pytest.fixture
def twin(parent: Path, tmp_path: Path) -> Path:
    """A copy of the micro parent at another place."""
    return Path(shutil.copytree(parent, tmp_path / "elsewhere" / "twin"))
