"""A run on disk: run.json says who answered what protocol, rows.jsonl holds each raw answer.

Rows are appended and synced one by one, so that an interrupted recording goes on where it stopped. Every row carries
the identity's digest: a file that mixes two servers is refused. What is not as `record` writes it is refused by file
and line: a verdict never rests on bytes that somebody changed or lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

from shardmill.verify.accept.identity import Identity, IdentityError, parse_identity
from shardmill.verify.accept.items import Item
from shardmill.verify.accept.protocol import digest_of
from shardmill.verify.accept.rows import Row, RowError, parse_row
from shardmill.verify.reading import bounded_json
from shardmill.verify.reading.atomic import write_whole
from shardmill.verify.reading.bounded_json import BadJsonError

FORMAT = "shardmill/accept-run/1"
ROW_BYTES_MAX = 512 << 20
ROW_VALUES_MAX = 8_000_000  # a window of 65,536 tokens with 20 choices each


class RunError(ValueError):
    """A run cannot be used or continued. The message names the folder, and what differs."""


@dataclass(frozen=True, slots=True)
class Head:
    """Who answered, and the digests of the protocol and of the frozen tokens."""

    identity: Identity
    protocol: str
    tokens: str


@dataclass(frozen=True, slots=True)
class Run:
    """A run as read: rows by id, the last outcome of each, and the line of rows.jsonl that holds it."""

    folder: Path
    identity: Identity
    protocol: str
    tokens: str
    notes: Mapping[str, Any]
    rows: Mapping[str, Row]
    lines: Mapping[str, int] = field(default_factory=dict)

    def place(self, id_: str) -> str:
        """Where a row stands, for errors."""
        return f"{self.folder}/rows.jsonl:{self.lines.get(id_, '?')}"

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
        _drop_incomplete_line(folder / "rows.jsonl")
        return
    folder.mkdir(parents=True, exist_ok=True)
    head = {"format": FORMAT, "identity": asdict(identity), "protocol": protocol, "tokens": tokens}
    write_whole(path, (json.dumps(head, indent=2) + "\n").encode())


def _drop_incomplete_line(path: Path) -> None:
    """Take away what a crash left of a last line, so that the next row begins on a line of its own."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)


def append_row(folder: Path, row: Row) -> None:
    """Add a row and have it on disk before the next request goes out."""
    with (folder / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row), allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_run(folder: Path) -> Run:
    """A run from disk. Raises RunError, with file and line, where a row is of another server or not a row."""
    head = read_head(folder)
    rows: dict[str, Row] = {}
    lines: dict[str, int] = {}
    for line, row in _rows(folder / "rows.jsonl"):
        place = f"{folder}/rows.jsonl:{line}"
        if row.identity != head.identity.digest:
            raise RunError(
                f"{place}: {row.id} was answered by another server than run.json names; record again"
            )
        before = rows.get(row.id)
        if before is not None and before.ok and before.request == row.request:
            raise RunError(f"{place}: {row.id} was answered on line {lines[row.id]} already; record again")
        rows[row.id], lines[row.id] = row, line
    return Run(folder, head.identity, head.protocol, head.tokens, _notes(folder), rows, lines)


def add_notes(folder: Path, **notes: Any) -> None:
    """Figures that belong to no single request, such as counters and the memory watermark. Raises RunError."""
    text = json.dumps({**_notes(folder), **notes}, indent=2, allow_nan=False)
    write_whole(folder / "notes.json", (text + "\n").encode())


def _notes(folder: Path) -> Mapping[str, Any]:
    path = folder / "notes.json"
    if not path.is_file():
        return {}
    notes = _json(path)
    try:
        for key, value in notes.items():
            for number in value.values() if isinstance(value, dict) else (value,):
                if isinstance(number, bool) or not (isinstance(number, int | float) and isfinite(number)):
                    raise RunError(f"{path}: {key!r} must be a number or a table of numbers, got {number!r}")
    except AttributeError:
        raise RunError(f"{path}: expected one JSON object, got {type(notes).__name__}") from None
    return notes  # type: ignore[no-any-return]


def _json(path: Path) -> Any:
    try:
        return bounded_json.loads(path.read_bytes())
    except (OSError, BadJsonError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from None


def read_head(folder: Path) -> Head:
    """Who answered, and what was asked, without the rows. Raises RunError."""
    path = folder / "run.json"
    if not path.is_file():
        raise RunError(f"{folder}: no run here; make one with `shardmill verify accept record`")
    head = _json(path)
    try:
        if head["format"] != FORMAT:
            raise RunError(f"{path}: format {head['format']!r}; this version reads {FORMAT!r}")
        return Head(parse_identity(head["identity"]), str(head["protocol"]), str(head["tokens"]))
    except (KeyError, TypeError) as error:
        raise RunError(f"{path}: not as `record` writes it: {error!r}") from None
    except IdentityError as error:
        raise RunError(f"{path}: {error}") from None


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Each row with its line, from 1. Raises RunError where a line is no row, or the last one is incomplete."""
    if not path.exists():
        return
    if not path.is_file():
        raise RunError(f"{path}: not a file; record again")
    try:
        with path.open("rb") as file:
            yield from ((number, _row(path, number, line)) for number, line in enumerate(_lines(file), 1))
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error}") from None


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(ROW_BYTES_MAX):
        yield line


def _row(path: Path, number: int, line: bytes) -> Row:
    if not line.endswith(b"\n"):
        raise RunError(f"{path}:{number}: an incomplete row; run `record` again, it goes on from here")
    try:
        return parse_row(bounded_json.loads(line, ROW_BYTES_MAX, ROW_VALUES_MAX))
    except (BadJsonError, RowError) as error:
        raise RunError(f"{path}:{number}: not a row: {error}; record again") from None


def stale_runs(folders: list[Path], checkpoint: str) -> list[Path]:
    """The runs whose results no longer stand for this checkpoint digest."""
    return [folder for folder in folders if read_head(folder).identity.checkpoint != checkpoint]
