"""What a manifest may say of names and of its parent, held to the parent that was given.

A renaming keeps a tensor's place: its numbers (layer, expert) stay, and no tensor takes the name of another one of the
parent, whole or within its block (gate for up). Else the "renaming" exchanges weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.manifest import MANIFEST, Manifest
from shardmill.verify.reading.parents import Parents, own_place
from shardmill.verify.reading.source import Folder, Source
from shardmill.verify.rules.findings import Finding, Report

_NUMBER = re.compile(r"\d+")
_HUB = re.compile(r"^hf://([^@]+)@([0-9a-f]{40})$")
_CACHED = re.compile(r"models--(.+?)--(.+)")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def rename_faults(manifest: Manifest, parent: Checkpoint) -> Iterator[Finding]:
    taken: dict[str, str] = {}
    for old, new in manifest.renamed.items():
        first = taken.setdefault(new, old)
        if first != old:
            yield Finding("rename-exchanges", MANIFEST, old, f"a name of its own, not that of {first}", new)
        if new != old and new in parent.tensors:
            yield Finding("rename-exchanges", MANIFEST, old, "a name that the parent lacks", new)
        elif _NUMBER.findall(old) != _NUMBER.findall(new) or _anothers_place(old, new, parent):
            yield Finding("rename-exchanges", MANIFEST, old, "the same layer, expert and module", new)


def _anothers_place(old: str, new: str, parent: Checkpoint) -> bool:
    """Whether the end of the new name is that of another tensor of the old one's block."""
    before, after = old.split("."), new.split(".")
    return any(
        before[-parts:] != after[-parts:] and ".".join([*before[:-parts], *after[-parts:]]) in parent.tensors
        for parts in (1, 2, 3)
        if len(before) > parts and len(after) >= parts
    )


def claim_faults(manifest: Manifest, source: Source, report: Report) -> Iterator[Finding]:
    """The parents that the manifest names against what the given places say of themselves, where they say something."""
    own = manifest.parent.get("repository"), manifest.parent.get("revision")
    yield from _claim(*own, own_place(source), report, "the parent")
    others = source.others if isinstance(source, Parents) else {}
    for name, record in manifest.sources.items():
        if name in others:
            yield from _claim(record.repository, record.revision, others[name], report, f"source {name}")


def _claim(
    repository: str | None, revision: str | None, source: Source, report: Report, what: str
) -> Iterator[Finding]:
    """`what`: whose name it is, as "the parent"."""
    if not repository and not revision:
        return
    if revision is not None and (not _COMMIT.fullmatch(revision) or not revision.strip("0")):
        yield Finding("parent-differs", MANIFEST, "", "a commit of 40 hexadecimal digits", revision)
        return
    name, commit = _identity(source)
    if name and repository and name != repository:
        yield Finding("parent-differs", MANIFEST, "", f"{name}, as the given parent says", repository)
    elif commit and revision and commit != revision:
        yield Finding("parent-differs", MANIFEST, "", f"{commit}, the given parent's commit", revision)
    elif not commit:
        claimed = f"{repository or 'a checkpoint'}@{revision or '?'}"
        report.leaves_out(
            f"{what}'s name", f"the manifest says {claimed}, and {source.where} does not say which it is"
        )


def _identity(source: Source) -> tuple[str, str]:
    """(repository, commit) of a hub place or of a folder that a hub's client made, "" where it does not say."""
    match = _HUB.match(source.where)
    if match is not None:
        return match[1], match[2]
    if not isinstance(source, Folder):
        return "", ""
    root = source.root.absolute()
    cached = _CACHED.fullmatch(root.parent.parent.name)
    if cached is not None and root.parent.name == "snapshots" and _COMMIT.fullmatch(root.name):
        return f"{cached[1]}/{cached[2]}", root.name
    return "", _downloaded_commit(root)


def _downloaded_commit(root: Path) -> str:
    """The commit in the first line of what `hf download --local-dir` writes beside config.json."""
    record = root / ".cache" / "huggingface" / "download" / "config.json.metadata"
    try:
        with record.open("rb") as file:
            first = file.read(41).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return first if _COMMIT.fullmatch(first) else ""
