"""What a publication does with each file: decided from listings alone, so that a dry run tells the very same.

A file is kept where the branch has its bytes under its name, copied where the repository or the parent's has them
under any name, found where the hub holds them without a name (an interrupted publication sent them), else sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Literal

from shardmill.pipeline.manifest.records import MANIFEST_FILE
from shardmill.pipeline.publish.facts import HubFile, Listing, LocalFile
from shardmill.pipeline.types import CONFIG_FILE, INDEX_FILE, README_FILE, SINGLE_FILE

Way = Literal["keep", "copy", "found", "send"]

# A commit lists them at its end in this order: what makes a loader take the folder for a checkpoint comes last.
_LAST = (CONFIG_FILE, README_FILE, MANIFEST_FILE, SINGLE_FILE, INDEX_FILE)


@dataclass(frozen=True, slots=True)
class Source:
    """Where the hub has a file that is copied."""

    repository: str
    commit: str
    name: str


@dataclass(frozen=True, slots=True)
class Step:
    """What becomes of one file."""

    file: LocalFile
    way: Way
    source: Source | None = None


@dataclass(frozen=True, slots=True)
class Publication:
    """Every step, in the commit's order, and the files that the branch loses."""

    steps: tuple[Step, ...]
    deleted: tuple[HubFile, ...]

    def of(self, way: Way) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.way == way)

    def bytes(self, way: Way) -> int:
        return sum(step.file.bytes for step in self.of(way))

    @property
    def changes_nothing(self) -> bool:
        return not self.deleted and all(step.way == "keep" for step in self.steps)

    @property
    def candidates(self) -> tuple[LocalFile, ...]:
        """What would be sent, unless the hub turns out to hold it."""
        return tuple(step.file for step in self.of("send"))


def plan_publication(files: Sequence[LocalFile], here: Listing | None, parent: Listing | None) -> Publication:
    """`here` is the branch as it is, None where there is none yet; `parent` the parent's commit."""
    names = {file.name for file in files}
    steps = tuple(_step(file, here, parent) for file in sorted(files, key=_order))
    held = here.files if here else {}
    deleted = tuple(
        file for name, file in sorted(held.items()) if name not in names and not _is_the_hubs(name)
    )
    return Publication(steps, deleted)


def with_found(plan: Publication, held: Collection[str]) -> Publication:
    """The plan once it is known which sha256s the hub holds already."""
    steps = tuple(
        replace(step, way="found") if step.way == "send" and step.file.sha256 in held else step
        for step in plan.steps
    )
    return replace(plan, steps=steps)


def _order(file: LocalFile) -> tuple[int, str]:
    if file.name in _LAST:
        return (2 + _LAST.index(file.name), file.name)
    return (0 if file.name.endswith(".safetensors") else 1, file.name)


def _step(file: LocalFile, here: Listing | None, parent: Listing | None) -> Step:
    held = here.files.get(file.name) if here else None
    if held is not None and _is_same(file, held):
        return Step(file, "keep")
    source = next(_sources(file, here, parent), None)
    return Step(file, "copy", source) if source else Step(file, "send")


def _is_same(file: LocalFile, held: HubFile) -> bool:
    return held.sha256 == file.sha256 if held.sha256 else held.git_oid == file.git_oid


def _sources(file: LocalFile, here: Listing | None, parent: Listing | None) -> Iterator[Source]:
    """Places of the same large file: in the repository itself, then in the parent's, the same name first."""
    for listing, elsewhere in ((here, False), (parent, True)):
        same = (
            held
            for held in (listing.files.values() if listing else ())
            if held.sha256 == file.sha256 and (held.copyable or not elsewhere)
        )
        for held in sorted(same, key=lambda held: (held.name != file.name, held.name)):
            assert listing is not None
            yield Source(listing.repository, listing.commit, held.name)


def _is_the_hubs(name: str) -> bool:
    """Dotfiles at the top are the repository's own (.gitattributes says which files are large)."""
    return PurePosixPath(name).parts[0].startswith(".")
