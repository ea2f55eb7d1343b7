"""Which kernel a build takes by itself, and what it says before numba compiles."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardmill.pipeline.run import kernel
from shardmill.pipeline.stages.job import Settings
from tests.pipeline.parents import prepare


@pytest.mark.parametrize(
    ("asked", "size", "taken"),
    [
        ("auto", kernel.SMALL_BYTES, "numpy"),
        ("auto", kernel.SMALL_BYTES + 1, "auto"),
        ("numba", 1, "numba"),
        ("numpy", 1 << 40, "numpy"),
    ],
)
def test_a_small_build_takes_numpy_unless_a_kernel_is_named(asked: str, size: int, taken: str) -> None:
    """Numba takes seconds to start, and both give the same bytes."""
    assert kernel.chosen(Settings(kernel=asked), size).kernel == taken


@pytest.mark.parametrize(("asked", "says"), [("auto", True), ("numba", True), ("numpy", False)])
def test_a_build_that_compiles_first_says_so(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, says: bool
) -> None:
    """Only where numba will encode, and only until its machine code lies in the cache."""
    pytest.importorskip("numba", reason="needs the extra `fast`")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    shards = prepare(parent).plan.shards
    told: list[str] = []
    kernel.tell_of_compiling(Settings(kernel=asked), shards, told.append)
    assert [line.partition(",")[0] for line in told] == ["compiling the kernel numba"] * says
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    (tmp_path / f"block_fp8_numba._codes-75.{python}.nbi").touch()
    kernel.tell_of_compiling(Settings(kernel=asked), shards, told.append)
    assert len(told) == says


def test_a_build_without_codes_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no shard is made there is nothing to wait for."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    told: list[str] = []
    kernel.tell_of_compiling(Settings(kernel="numba"), (), told.append)
    assert told == []
