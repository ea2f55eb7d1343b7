"""A run on disk: run.json says who answered what protocol, rows.jsonl holds each raw answer.

Rows are appended and synced one by one, so that a cut recording goes on where it stopped. Every row carries the
identity's digest: a file that mixes two servers is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardmill.verify.accept.identity import Identity, IdentityError, parse_identity
from shardmill.verify.accept.items import Item
from shardmill.verify.accept.protocol import digest_of
from shardmill.verify.reading.atomic import write_whole

FORMAT = "shardmill/accept-run/1"


class RunError(ValueError):
    """A run cannot be used or continued. The message names the folder, and what differs."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request's outcome: the raw answer, or how it failed after so many attempts."""

    id: str
    kind: str
    request: str
    identity: str
    answer: Mapping[str, Any] | None
    failure: str | None
    detail: str
    attempts: int
    seconds: float

    @property
    def ok(self) -> bool:
        return self.failure is None


@dataclass(frozen=True, slots=True)
class Head:
    """Who answered, and the digests of the protocol and of the frozen tokens."""

    identity: Identity
    protocol: str
    tokens: str


@dataclass(frozen=True, slots=True)
class Run:
    """A run as read: rows by id, the last outcome of each."""

    folder: Path
    identity: Identity
    protocol: str
    tokens: str
    notes: Mapping[str, Any]
    rows: Mapping[str, Row]

    def of(self, kind: str, phase: str = "") -> list[Row]:
        """The rows of a kind, optionally of one phase ("before" or "after" the soak)."""
        return [r for r in self.rows.values() if r.kind == kind and (not phase or f"/{phase}" in r.id)]


def request_digest(item: Item) -> str:
    """Digest of what is asked: a row is reused only for the very same request."""
    return digest_of({"path": item.path, "body": dict(item.body)})


def start_run(folder: Path, identity: Identity, protocol: str, tokens: str) -> None:
    """Create a run, or make sure that the one there is of the same server, protocol and tokens.

    Raises RunError otherwise: answers of two servers are never mixed and a stale run is never continued.
    """
    path = folder / "run.json"
    if path.exists():
        there = read_head(folder)
        differences = there.identity.differences(identity)
        differences += (
            [f"protocol: {there.protocol} against {protocol}"] if there.protocol != protocol else []
        )
        differences += [f"tokens: {there.tokens} against {tokens}"] if there.tokens != tokens else []
        if differences:
            raise RunError(
                f"{folder}: holds a run of another server or protocol ({'; '.join(differences)}); use another folder"
            )
        _drop_cut_line(folder / "rows.jsonl")
        return
    folder.mkdir(parents=True, exist_ok=True)
    head = {"format": FORMAT, "identity": asdict(identity), "protocol": protocol, "tokens": tokens}
    write_whole(path, (json.dumps(head, indent=2) + "\n").encode())


def _drop_cut_line(path: Path) -> None:
    """Take away what a crash left of a last line, so that the next row begins on a line of its own."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)


def append_row(folder: Path, row: Row) -> None:
    """Add a row and have it on disk before the next request goes out."""
    with (folder / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_run(folder: Path) -> Run:
    """A run from disk. Raises RunError where it is none, or where a row is of another identity."""
    head = read_head(folder)
    rows: dict[str, Row] = {}
    for row in _rows(folder):
        if row.identity != head.identity.digest:
            raise RunError(
                f"{folder}: row {row.id} was answered by another server than run.json names; record again"
            )
        rows[row.id] = row
    notes_path = folder / "notes.json"
    notes = json.loads(notes_path.read_text(encoding="utf-8")) if notes_path.is_file() else {}
    return Run(folder, head.identity, head.protocol, head.tokens, notes, rows)


def add_notes(folder: Path, **notes: Any) -> None:
    """Figures that belong to no single request, such as counters and the memory watermark."""
    path = folder / "notes.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    write_whole(path, (json.dumps({**old, **notes}, indent=2) + "\n").encode())


def read_head(folder: Path) -> Head:
    """Who answered, and what was asked, without the rows. Raises RunError."""
    try:
        head = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if head["format"] != FORMAT:
            raise RunError(f"{folder}: format {head['format']!r}; this version reads {FORMAT!r}")
        return Head(parse_identity(head["identity"]), str(head["protocol"]), str(head["tokens"]))
    except FileNotFoundError:
        raise RunError(f"{folder}: no run here; make one with `shardmill verify accept record`") from None
    except (OSError, ValueError, KeyError, TypeError, IdentityError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{folder}/run.json: cannot be read: {error}") from None


def _rows(folder: Path) -> Iterator[Row]:
    """Whole lines only: the last one may have been cut by a crash, and is asked again."""
    path = folder / "rows.jsonl"
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                try:
                    yield Row(**json.loads(line))
                except (ValueError, TypeError) as error:
                    raise RunError(f"{path}: a line is not a row: {error}") from None


def stale_runs(folders: list[Path], checkpoint: str) -> list[Path]:
    """The runs whose results no longer stand for this checkpoint digest."""
    return [folder for folder in folders if read_head(folder).identity.checkpoint != checkpoint]
