"""The Python API: plan, build and verify, without a terminal. What is not named in `__all__` may change without notice.

    from shardmill import api

    planned = api.plan("parent", "pipeline.toml")
    print(planned.file_bytes, planned.key)
    api.build("parent", "pipeline.toml", "child")
    verdict = api.verify("child", parent="parent")
    print(verdict.status, verdict.coverage)

Versions follow semantic versioning: within 0.x a minor version may change these names, a patch version does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.pipeline.errors import (
    BuildError,
    CheckpointError,
    PlanError,
    RecipeError,
    ShardmillError,
)
from shardmill.pipeline.manifest.lock import load_lock, lock_path
from shardmill.pipeline.plan.types import Plan
from shardmill.pipeline.recipe.read import load
from shardmill.pipeline.run import build as _build
from shardmill.pipeline.run.build import Summary
from shardmill.pipeline.run.prepare import prepare
from shardmill.pipeline.stages.job import Prepared, Settings, Watch
from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.lint import lint
from shardmill.verify.reading.source import Folder
from shardmill.verify.rules.findings import Finding, Report

__all__ = [
    "BuildError",
    "CheckpointError",
    "Finding",
    "Plan",
    "PlanError",
    "RecipeError",
    "Report",
    "Settings",
    "ShardmillError",
    "Summary",
    "build",
    "lint_checkpoint",
    "plan",
    "verify",
]


Sources = Mapping[str, str | Path]


def plan(parent: str | Path, recipe: str | Path, sources: Sources | None = None) -> Plan:
    """Names, shapes, offsets and sizes of the child of the folder `parent` by the TOML `recipe`, from headers alone.

    sources: the folder of each [[source]] whose place the recipe does not say. Raises RecipeError, PlanError or
    CheckpointError, each with every problem that it found.
    """
    return _prepared(parent, recipe, sources).plan


def build(
    parent: str | Path,
    recipe: str | Path,
    out: str | Path,
    sources: Sources | None = None,
    **settings: Any,
) -> Summary:
    """Makes or updates the child in the folder `out`; what is up to date is not made again.

    `settings` are fields of Settings (`workers`, `kernel`, `file_digests`, `passthrough` ...). Raises BuildError
    or CheckpointError with the earlier checkpoint untouched; called again, it resumes.
    """
    return _build.build(_prepared(parent, recipe, sources), Path(out), Settings(**settings), Watch())


def verify(place: str | Path, parent: str | Path | None = None) -> Report:
    """The judge's answer to "is it whole, and is it what was published?", with `parent` also "was nothing lost?".

    A Report never raises for what a checkpoint holds: `status` is the worst finding, "clean", "partial" or "not asked".
    """
    return integrity(Folder(Path(place)), Folder(Path(parent)) if parent else None)


def lint_checkpoint(place: str | Path) -> Report:
    """The judge's answer to "does it make sense?": scales, names, groups and config, without a parent."""
    return lint(Folder(Path(place)))


def _prepared(parent: str | Path, recipe: str | Path, sources: Sources | None) -> Prepared:
    path = Path(recipe)
    folders = {name: Path(folder) for name, folder in (sources or {}).items()}
    return prepare(load(path), Path(parent), load_lock(lock_path(path)), sources=folders)
