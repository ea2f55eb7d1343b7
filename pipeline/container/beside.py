"""The files beside the shards, read as far as needed: which go along, why the others don't, and whether they are whole.

For the stage `scan`. `side_files` decides by name; this module walks the folder, reads the JSON that
decides, and refuses what is empty, truncated or a pointer: a child with half a tokenizer fails when served.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmill.pipeline.container.header import read_header
from shardmill.pipeline.container.recognize import HEAD_BYTES, LFS_POINTER, json_problem, looks_like
from shardmill.pipeline.container.regular import open_regular, read_regular
from shardmill.pipeline.container.side_files import (
    SideFiles,
    code_named,
    copies_in,
    module_folders,
    relative_imports,
)
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.types import CONFIG_FILE, INDEX_FILE, LeftFile

_JSON_PARSED_BYTES_MAX = 1 << 20  # a larger one is looked at from both ends alone
_CODE_BYTES_MAX = 1 << 20


def side_files(
    folder: Path, shards: Collection[str], carry: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, LeftFile]]:
    """Files beside the shards: those that a child gets, and those that it does not, with the reason.

    Raises CheckpointError where one that a child gets can't be read or is not whole.
    """
    found = {name: path for name, path in _walk(folder) if name not in shards and name not in _OURS}
    sizes = {name: path.stat().st_size for name, path in found.items() if path.is_file()}
    modules = module_folders(_json_or_none(folder / "modules.json"))
    rule = SideFiles(tuple(carry), _code(folder, sizes), modules, copies_in(sizes, modules))
    homes = {(folder / shard).resolve().parent for shard in shards}
    carried: list[str] = []
    left: dict[str, LeftFile] = {}
    for name, path in found.items():
        reason = (None if name in sizes else _WHAT_ELSE[path.is_dir()]) or rule.why_left(
            name, sizes.get(name, 0)
        )
        reason = reason or _why_elsewhere(folder, path, homes)
        if reason:
            left[name] = LeftFile(reason, sizes.get(name, 0))
        else:
            carried.append(name)
    for name in carried:
        _refuse_unsound(folder / name, name)
    return tuple(carried), left


_OURS = (INDEX_FILE, CONFIG_FILE, ".shardmill-hub.json")  # the child gets its own; a mirror's note is ours


def _walk(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every file and every link to a folder below `folder`, by relative POSIX path, in order; no dotted folders."""
    for root, folders, files in os.walk(folder, onerror=_refuse_unlisted):
        links = [name for name in folders if Path(root, name).is_symlink()]
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted([*files, *links]):
            path = Path(root, name)
            yield path.relative_to(folder).as_posix(), path


def _refuse_unlisted(error: OSError) -> None:
    raise CheckpointError(
        f"{error.filename}: cannot be listed: {error.strerror}; make it readable, or remove it"
    )


_WHAT_ELSE = {True: "it is a link to a folder", False: "it is not a file, or a link to nothing"}


def _why_elsewhere(folder: Path, path: Path, homes: set[Path]) -> str | None:
    target = path.resolve()
    if target.is_relative_to(folder.resolve()) or target.parent in homes:
        return None  # a hub's cache keeps all files of a snapshot as links into one folder of blobs
    return "it is a link that leads to another folder than the shards' links do"


def _json_or_none(path: Path) -> Any:
    try:
        return json.loads(read_regular(path, _JSON_PARSED_BYTES_MAX)) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None  # refused below, by name, if it goes along


def _code(folder: Path, sizes: Mapping[str, int]) -> frozenset[str]:
    """The .py files that go along."""
    configs = [_json_or_none(folder / name) for name in sizes if name.endswith("config.json")]
    configs.append(_json_or_none(folder / CONFIG_FILE))
    sources = {
        name: read_regular(folder / name).decode("utf-8", "replace")
        for name, size in sizes.items()
        if name.endswith(".py") and size <= _CODE_BYTES_MAX
    }
    imports = {name: relative_imports(source) for name, source in sources.items()}
    return code_named([each for each in configs if isinstance(each, dict)], imports)


def _refuse_unsound(path: Path, name: str) -> None:
    """A file that the child gets is copied last; that it is not whole is said first."""
    try:
        size = path.stat().st_size
        with os.fdopen(open_regular(path), "rb") as file:
            head = file.read(HEAD_BYTES)
            file.seek(max(size - HEAD_BYTES, 0))
            tail = file.read(HEAD_BYTES)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be opened: {error.strerror}; make it readable, or remove it"
        ) from None
    if head.startswith(LFS_POINTER):
        raise CheckpointError(f"{name}: is {looks_like(head, size)}")
    if name.endswith(".safetensors"):
        read_header(path, name)
    if name.endswith(".json") and (problem := _json_problem(path, size, head, tail)):
        raise CheckpointError(f"{name}: {problem}")


def _json_problem(path: Path, size: int, head: bytes, tail: bytes) -> str | None:
    if size <= _JSON_PARSED_BYTES_MAX:
        return json_problem(read_regular(path))
    begins = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    whole = {b"{": b"}", b"[": b"]"}.get(begins)
    if whole is None:
        return f"is {looks_like(head, size) or 'no JSON object'}"
    return None if tail.rstrip().endswith(whole) else "is truncated; fetch it again"
