"""A delta as it is written: which files of the old checkpoint it needs, and how each file of the new one is made.

Law: `Delta.from_bytes(d.to_bytes()) == d`. The record is canonical JSON in an xz container, since the names of a large
checkpoint's tensors are most of it. The bytes that the old checkpoint lacks are beside it, in `files/` (whole files)
and `tensors/` (the data of new tensors, one after the other).
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from shardmill.pipeline.delta.child import PRIVATE
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.digest import canonical, key_of
from shardmill.pipeline.manifest.records import MANIFEST_FILE, leads_outside

DELTA_FORMAT = "shardmill/delta/1"
DELTA_FILE = "delta.json.xz"
RECORD_BYTES_MAX = 1 << 30  # unpacked; that of a checkpoint with 200,000 tensors has some 50 MB

How = Literal["same", "whole", "patch", "shard"]


@dataclass(frozen=True, slots=True)
class Needed:
    """A file of the old checkpoint that is read: its size, and of a shard the sha256 of its header."""

    bytes: int
    header: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent tensors of a new shard that one place holds: a file of the old checkpoint, or the delta (None)."""

    file: str | None
    tensors: tuple[str, ...]  # by their names at that place


@dataclass(frozen=True, slots=True)
class NewFile:
    """How one file of the new checkpoint is made.

    same: `source` is it. whole: `files/NAME` of the delta is it. patch: `patch` is applied to the JSON file `source`.
    shard: the header is `header_text`, or that of `source`, and `runs` are its data.
    """

    how: How
    bytes: int
    sha256: str | None  # None of a shard whose manifest has none
    source: str | None = None
    patch: Any = None
    header: str | None = None  # sha256 of a shard's header
    header_text: str | None = None
    runs: tuple[Run, ...] = ()
    digests: Mapping[str, str] | None = None  # tensor -> digest, of those that the delta holds


@dataclass(frozen=True, slots=True)
class Changes:
    """What changed, for people: names of tensors, and files that the new checkpoint has no more."""

    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    renamed: Mapping[str, str] | None = None  # old name -> new name
    removed_files: tuple[str, ...] = ()
    renamed_files: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    old_manifest: str  # sha256 of the old checkpoint's manifest file
    new_manifest: str
    needs: Mapping[str, Needed]
    files: Mapping[str, NewFile]
    changes: Changes

    def to_bytes(self) -> bytes:
        body = {"format": DELTA_FORMAT, **asdict(self)}
        return lzma.compress(canonical({**body, "self": key_of(body)}), preset=2)

    @classmethod
    def from_bytes(cls, data: bytes, origin: str) -> Delta:
        """Reads a delta's record. Raises CheckpointError where it is none, or was edited."""
        try:
            body = json.loads(_unpacked(data))
            claimed = body.pop("self")
            if body["format"] != DELTA_FORMAT:
                raise ValueError(f"its format is not {DELTA_FORMAT}")
            if key_of(body) != claimed:
                raise ValueError("it was edited since it was written")
            return _parsed(body)
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            EOFError,
            lzma.LZMAError,
            RecursionError,
        ) as error:
            raise CheckpointError(
                f"{origin}: is not a delta of this version ({error}); fetch or make it again"
            ) from None


def _unpacked(data: bytes) -> bytes:
    decompressor = lzma.LZMADecompressor(format=lzma.FORMAT_XZ)
    text = decompressor.decompress(data, RECORD_BYTES_MAX)
    if not decompressor.eof:
        raise ValueError(f"it is truncated, or unpacks to more than {RECORD_BYTES_MAX} bytes")
    return text


def _parsed(body: Mapping[str, Any]) -> Delta:
    files = {name: _new_file(name, fields) for name, fields in body["files"].items()}
    needs = {name: _needed(name, fields) for name, fields in body["needs"].items()}
    if MANIFEST_FILE not in files:
        raise ValueError(f"it makes no {MANIFEST_FILE}")
    for name in (*files, *needs):
        _refuse_outside(name)
    _refuse_folders(files)
    for name, file in files.items():
        used = {run.file for run in file.runs if run.file} | ({file.source} if file.source else set())
        if missing := used - set(needs):
            raise ValueError(f"{name} is made from {min(missing)}, whose size is not stated")
    old, new = (_text(body[key], key) for key in ("old_manifest", "new_manifest"))
    return Delta(old, new, needs, files, _changes(body["changes"]))


def _changes(fields: Mapping[str, Any]) -> Changes:
    lists = {key: value for key, value in fields.items() if isinstance(value, list)}
    tables = {key: value for key, value in fields.items() if isinstance(value, dict)}
    for text in (*(each for value in lists.values() for each in value), *_both(tables.values())):
        _text(text, "changes")
    kept: dict[str, Any] = {**fields, **{key: tuple(value) for key, value in lists.items()}}
    changes = Changes(**kept)
    if not all(
        isinstance(getattr(changes, key), tuple) for key in ("changed", "added", "removed", "removed_files")
    ):
        raise ValueError("its changes are no lists of names")
    if not all(isinstance(each, dict | None) for each in (changes.renamed, changes.renamed_files)):
        raise ValueError("its renamed names are no table")
    return changes


def _both(tables: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    for table in tables:
        yield from table.keys()
        yield from table.values()


def _text(value: Any, what: str) -> str:
    """`value`, which must be a text that can be written. Raises ValueError where it is none."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is {value!r:.40}, expected a text")
    value.encode()  # UnicodeEncodeError, a ValueError, where half of a surrogate pair is in it
    return value


def _needed(name: str, fields: Mapping[str, Any]) -> Needed:
    needed = Needed(**fields)
    if type(needed.bytes) is not int or needed.bytes < 0:
        raise ValueError(f"{name} is needed with {needed.bytes!r:.40} bytes")
    if needed.header is not None:
        _text(needed.header, f"{name}: header")
    return needed


def _new_file(name: str, fields: dict[str, Any]) -> NewFile:
    runs = tuple(_run(name, run) for run in fields["runs"])
    file = NewFile(**{**fields, "runs": runs})
    if file.how not in ("same", "whole", "patch", "shard"):
        raise ValueError(f"{name} is made by {file.how!r:.40}, which this version does not know")
    for key in ("sha256", "source", "header", "header_text"):
        if (value := getattr(file, key)) is not None:
            _text(value, f"{name}: {key}")
    if file.header_text is not None and file.how != "shard":
        raise ValueError(f"{name} has a header and is made by {file.how}")
    if (file.source is None) is not (file.how == "whole" or file.header_text is not None):
        raise ValueError(f"{name} must have one source")
    if file.how == "patch" and (name, file.source) != (MANIFEST_FILE, MANIFEST_FILE):
        raise ValueError(f"{name} is a patch of {file.source}, and manifests alone are patched")
    if type(file.bytes) is not int or file.bytes < 0 or (file.sha256 is None and file.header is None):
        raise ValueError(f"{name} lacks a size or a digest")
    for tensor, digest in (file.digests or {}).items():
        _text(tensor, f"{name}: a tensor")
        _text(digest, f"{name}: {tensor}")
    return file


def _run(name: str, fields: Mapping[str, Any]) -> Run:
    file, tensors = fields["file"], fields["tensors"]
    if not isinstance(tensors, list):
        raise ValueError(f"{name} has a run of {tensors!r:.40}, expected a list of tensors")
    where = None if file is None else _text(file, f"{name}: a run")
    return Run(where, tuple(_text(tensor, f"{name}: a tensor") for tensor in tensors))


def _refuse_outside(name: str) -> None:
    _text(name, "a file")
    if leads_outside(name) or PurePosixPath(name).as_posix() != name:
        raise ValueError(f"it names {name!r}, which leads out of the folder")
    if name.split("/")[0] in PRIVATE:
        raise ValueError(f"it names {name!r}, which no checkpoint publishes")


def _refuse_folders(files: Iterable[str]) -> None:
    """Raises ValueError where one file's name is a folder of another's."""
    folders = {folder.as_posix(): name for name in files for folder in PurePosixPath(name).parents}
    if taken := folders.keys() & set(files):
        raise ValueError(f"it names {min(taken)}, which is a folder of {folders[min(taken)]}")
