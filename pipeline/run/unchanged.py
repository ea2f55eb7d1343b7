"""The short way out of a build: nothing that could change its result has changed since the last one ended.

A plan is a pure function of the recipe, the lock, this code, and the parent's headers and small files. So where none
of these has another stat than when the last build ended, and no published file has, planning would only repeat
itself. Believed like every stat, and skipped like every stat under `--paranoid`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from shardmill.pipeline.container.header import file_stat
from shardmill.pipeline.manifest.digest import key_of
from shardmill.pipeline.manifest.lock import Lock
from shardmill.pipeline.manifest.records import MANIFEST_FILE
from shardmill.pipeline.manifest.store import StatCache, Store
from shardmill.pipeline.recipe.tables import Recipe
from shardmill.pipeline.stages.job import Settings
from shardmill.pipeline.types import Stat

_PACKAGE = Path(__file__).parents[2]


def is_unchanged(recipe: Recipe, folder: Path, out: Path, settings: Settings, lock: Lock | None) -> bool:
    """Whether a build of `recipe` from `folder` into `out` would find everything as the last one left it."""
    store = Store(out)
    if settings.paranoid or store.commit_is_pending() or store.holds_leftovers():
        return False
    stats = store.load().stats
    try:
        return bool(stats.fingerprint) and stats.fingerprint == fingerprint(
            plan_inputs(recipe, folder, lock), out, stats, settings
        )
    except OSError:
        return False


def plan_inputs(recipe: Recipe, folder: Path, lock: Lock | None) -> str:
    """Digest of all that a plan is made from, by the stats of the files among it.

    Taken before they are read: what changes while a build is at work is then another input to the next one.
    (So the hard links that a build makes of its parent's files, which move their ctime, cost the next one a plan.)
    """
    return key_of(
        {
            "code": _stats_below(_PACKAGE / name for name in ("pipeline", "kernels")),
            "recipe": recipe.model_dump(mode="json"),
            "texts": list(recipe.texts),
            "lock": lock.to_json().decode() if lock else None,
            "parent": _stats_below([folder]),
            "named": _stats_named(recipe),
        }
    )


def fingerprint(inputs: str, out: Path, stats: StatCache, settings: Settings) -> str:
    """Digest of all that a build depends on: what it was planned from, and the published files as they are now."""
    outputs = {name: file_stat(out / name) for name in (*sorted(stats.output), MANIFEST_FILE)}
    return key_of({"inputs": inputs, "sha256": settings.file_digests, "output": outputs})


def _stats_named(recipe: Recipe) -> dict[str, Stat]:
    """Path -> stat of the files that options of the recipe's stages name."""
    values = [value for table in recipe.stages.values() for value in table.options.values()]
    paths = [recipe.home / value for value in values if isinstance(value, str)]
    return {str(path): file_stat(path) for path in paths if path.is_file()}


def _stats_below(folders: Iterable[Path]) -> dict[str, Stat]:
    """Path -> stat of every file below `folders`, but for what Python and numba compile and keep there."""
    return {
        str(Path(root, name)): file_stat(Path(root, name))
        for folder in folders
        for root, _, names in os.walk(folder)
        for name in names
        if Path(root).name != "__pycache__" and Path(root, name).is_file()
    }
