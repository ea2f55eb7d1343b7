"""The facts that a publication is planned from: places on a hub, local files, and files that the hub lists."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardmill.pipeline.errors import ShardmillError

_PLACE = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)(@(?P<branch>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REPOSITORY = re.compile(r"(?!\.)[\w.-]+/(?!\.)[\w.-]+")


@dataclass(frozen=True, slots=True)
class Place:
    """A branch of a model repository on the hub."""

    repository: str
    branch: str

    def __str__(self) -> str:
        return f"hf://{self.repository}@{self.branch}"


def parse_place(text: str) -> Place:
    """`hf://org/name[@branch-or-revision]`. Raises ShardmillError for anything else."""
    match = _PLACE.fullmatch(text)
    if match is None or not _REPOSITORY.fullmatch(match["repository"]):
        raise ShardmillError(f"{text}: is no place on a hub; write hf://org/name or hf://org/name@branch")
    return Place(match["repository"], match["branch"] or "main")


def refuse_commit(place: Place) -> None:
    """Raises ShardmillError where a place names a commit, which nobody can add to."""
    if _COMMIT.fullmatch(place.branch):
        raise ShardmillError(f"{place}: {place.branch} is a commit; name a branch to publish to")


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file of the checkpoint that is published. `git_oid` is git's name for its bytes, of small files alone."""

    name: str
    bytes: int
    sha256: str
    git_oid: str | None = None


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as the hub lists it. Only large files have a sha256; `copyable` ones can go to another repository."""

    name: str
    bytes: int
    sha256: str | None
    git_oid: str
    copyable: bool = False


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit."""

    repository: str
    commit: str
    files: Mapping[str, HubFile]
    private: bool = False
