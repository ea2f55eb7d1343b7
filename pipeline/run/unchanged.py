"""The short way out of a build: nothing that could change its result has changed since the last one ended.

A plan is a pure function of the recipe, the lock, this code, and the parent's headers and small files. So where none
of these has another stat than when the last build ended, and no published file has, planning would only repeat
itself. Believed like every stat, and skipped like every stat under `--paranoid`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import sleep, time_ns

from shardmill.pipeline.container.filesystem import shows_later_writes, stat_or_none, wait_for_fine_clock
from shardmill.pipeline.container.header import file_stat
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.digest import key_of
from shardmill.pipeline.manifest.lock import Lock
from shardmill.pipeline.manifest.records import MANIFEST_FILE
from shardmill.pipeline.manifest.state import StatCache
from shardmill.pipeline.manifest.store import Store
from shardmill.pipeline.recipe.tables import Recipe
from shardmill.pipeline.stages.job import Settings
from shardmill.pipeline.types import Stat

_PACKAGE = Path(__file__).parents[2]


def is_unchanged(
    recipe: Recipe,
    folder: Path,
    out: Path,
    settings: Settings,
    lock: Lock | None,
    sources: Mapping[str, Path],
) -> bool:
    """Whether a build of `recipe` from `folder` into `out` would find everything as the last one left it."""
    store = Store(out)
    if settings.paranoid or store.commit_is_pending() or store.holds_leftovers():
        return False
    stats = store.load().stats
    try:
        return bool(stats.fingerprint) and stats.fingerprint == fingerprint(
            plan_inputs(recipe, folder, lock, sources), out, stats, settings
        )
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a plan is made from, before it is read."""

    digest: str  # "" where a later write of one of the files might not show in its stat
    began: int  # nanoseconds: when the stats were taken


def inputs_now(recipe: Recipe, folder: Path, lock: Lock | None, sources: Mapping[str, Path]) -> Inputs:
    """The Inputs of a plan, taken before they are read: what changes while a build is at work is then another input.

    Where a file was written within the clock's last tick, the tick is waited for.
    """
    stats = _stats_below([folder, *sources.values()]) | _stats_named(recipe)
    if wait := max((wait_for_fine_clock(stat, time_ns()) for stat in stats.values()), default=0.0):
        sleep(wait)
    began = time_ns()
    digest = plan_inputs(recipe, folder, lock, sources)
    sure = all(shows_later_writes(stat, began) for stat in stats.values())
    return Inputs(digest if sure else "", began)


def plan_inputs(recipe: Recipe, folder: Path, lock: Lock | None, sources: Mapping[str, Path]) -> str:
    """Digest of all that a plan is made from, by the stats of the files among it.

    (The hard links that a build makes of its parent's files move their ctime, and so cost the next one a plan.)
    """
    return key_of(
        {
            "code": _stats_below(_PACKAGE / name for name in ("pipeline", "kernels")),
            "recipe": recipe.model_dump(mode="json"),
            "texts": list(recipe.texts),
            "lock": lock.to_json().decode() if lock else None,
            "parent": _stats_below([folder]),
            "sources": {name: _stats_below([place]) for name, place in sources.items()},
            "named": _stats_named(recipe),
        }
    )


def fingerprint(inputs: str, out: Path, stats: StatCache, settings: Settings) -> str:
    """Digest of all that a build depends on: what it was planned from, and the published files as they are now."""
    outputs = {name: file_stat(out / name) for name in (*sorted(stats.output), MANIFEST_FILE)}
    return key_of({"inputs": inputs, "sha256": settings.file_digests, "output": outputs}) if inputs else ""


def noted(inputs: Inputs, files: Sequence[str], out: Path, stats: StatCache, settings: Settings) -> StatCache:
    """Of `stats` those that may be believed: under which every later write of the file shows.

    files: all that are published. Where one of them has no such stat, or has another by now, there is no fingerprint.
    """
    sleep(max((wait_for_fine_clock(stat, time_ns()) for stat in stats.output.values()), default=0.0))
    now = time_ns()
    parent = {name: stat for name, stat in stats.parent.items() if shows_later_writes(stat, inputs.began)}
    output = {name: stat for name, stat in stats.output.items() if shows_later_writes(stat, now)}
    kept = StatCache(parent, output)
    whole = set(output) >= set(files) and all(stat_or_none(out / name) == output[name] for name in files)
    return replace(kept, fingerprint=fingerprint(inputs.digest, out, kept, settings)) if whole else kept


def _stats_named(recipe: Recipe) -> dict[str, Stat]:
    """Path -> stat of the files that options of the recipe's stages name."""
    values = [value for table in recipe.stages.values() for value in table.options.values()]
    paths = [recipe.home / value for value in values if isinstance(value, str)]
    return {str(path): file_stat(path) for path in paths if path.is_file()}


def _stats_below(folders: Iterable[Path]) -> dict[str, Stat]:
    """Path -> stat of every file below `folders`, but for what Python and numba compile and keep there.

    Raises CheckpointError where a folder can't be listed: it is not an empty one.
    """
    return {
        str(path): stat
        for folder in folders
        if folder.is_dir()
        for root, _, names in os.walk(folder, onerror=_raise)
        if Path(root).name != "__pycache__"
        for path in (Path(root, name) for name in names)
        if (stat := stat_or_none(path))
    }


def _raise(error: OSError) -> None:
    raise CheckpointError(
        f"{error.filename}: cannot be listed: {error.strerror}; make it readable, or remove it"
    )
