"""Which kernel encodes a build's weights, and what its user hears of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import shardmill.kernels
from shardmill.pipeline.plan.types import ShardPlan
from shardmill.pipeline.stages.job import Settings

SMALL_BYTES = 64 << 20  # numpy encodes as much in less time than numba takes to start


def chosen(settings: Settings, bytes_read: int) -> Settings:
    """The settings with a kernel named where "auto" has little to read: the bytes are the same, the wait is shorter."""
    if settings.kernel == "auto" and bytes_read <= SMALL_BYTES:
        return replace(settings, kernel="numpy")
    return settings


def tell_of_compiling(settings: Settings, todo: Sequence[ShardPlan], tell: Callable[[str], None]) -> None:
    """Says why nothing moves yet, where numba will encode and keeps no machine code of an earlier build."""
    encodes = any(piece.part == "codes" for shard in todo for piece in shard.pieces)
    if encodes and settings.kernel != "numpy" and find_spec("numba") and not _is_compiled():
        tell("compiling the kernel numba, once: its machine code is kept for later builds")


def _is_compiled() -> bool:
    """Whether numba's cache holds the kernel for this Python. Importing numba to ask would take a second."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return any(
        next(folder.rglob(f"block_fp8_numba._codes-*.{python}.nbi"), None) is not None
        for folder in _cache_folders()
    )


def _cache_folders() -> Iterator[Path]:
    """Where numba keeps machine code: $NUMBA_CACHE_DIR alone, else beside the source or in the user's cache folder."""
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(named)
        return
    yield from (Path(folder) / "__pycache__" for folder in shardmill.kernels.__path__)
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"
