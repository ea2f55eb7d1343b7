"""The files of a folder that hold weights: index, headers, and whether they agree.

Only headers and the index are read. Every contradiction is refused by name.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardmill.pipeline.container.header import file_stat, read_header
from shardmill.pipeline.container.recognize import instead_of_checkpoint, json_problem
from shardmill.pipeline.container.regular import read_regular
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.types import INDEX_FILE, SINGLE_FILE, Consumed, Header, Stat

_INDEX_BYTES_MAX = 1 << 28


def weight_files(
    folder: Path, also: Sequence[str] = (), consumed: Mapping[str, Consumed] = MappingProxyType({})
) -> tuple[tuple[Header, ...], dict[str, Stat], bool]:
    """(headers in order of file name, file -> its stat, whether it is one file without an index).

    The index decides which files hold weights, or the single model.safetensors where there is no index; `also` names
    further ones. Of those in `consumed` that are gone the header that was kept is read. Raises CheckpointError where
    files are missing or contradict each other.
    """
    index = folder / INDEX_FILE
    weight_map = _weight_map(index) if index.exists() or index.is_symlink() else None
    gone = {file: each for file, each in consumed.items() if not (folder / file).exists()}
    shards = _shards(folder, weight_map, also, gone)
    # Stats come first: a shard that is replaced after its header was read has another stat when it is opened.
    stats = {shard: gone[shard].stat if shard in gone else file_stat(folder / shard) for shard in shards}
    headers = tuple(
        read_header(gone[shard].head if shard in gone else folder / shard, shard) for shard in shards
    )
    owner = _owners(headers)
    if weight_map is not None:
        _agree(weight_map, owner)
    return headers, stats, weight_map is None


def _shards(
    folder: Path, weight_map: Mapping[str, str] | None, also: Sequence[str], gone: Collection[str]
) -> list[str]:
    """The files that hold weights, in order of name. A build has consumed those in `gone`, and kept their headers."""
    named = {SINGLE_FILE} if weight_map is None else set(weight_map.values())
    if weight_map is None and SINGLE_FILE not in gone and not (folder / SINGLE_FILE).exists():
        raise CheckpointError(f"{folder}: {instead_of_checkpoint(folder)}")
    missing = sorted(name for name in named if name not in gone and not (folder / name).is_file())
    if missing:
        raise CheckpointError(
            f"{INDEX_FILE}: names {missing[0]}, which is not in {folder}{_and_more(len(missing))}; fetch it again"
        )
    return sorted(named | {name for name in also if name in gone or (folder / name).is_file()})


def _and_more(count: int) -> str:
    return f", nor are {count - 1} more" if count > 1 else ""


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or set(map(type, weight_map.values())) - {str}:
        raise CheckpointError(f"{path.name}: weight_map must map tensor names to file names; fetch it again")
    for file in set(weight_map.values()):
        if "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path.name}: names {file!r}, which is not a .safetensors file beside it")
    return weight_map


def json_object(path: Path) -> dict[str, Any]:
    try:
        data = read_regular(path, _INDEX_BYTES_MAX + 1)
        if len(data) > _INDEX_BYTES_MAX:
            raise CheckpointError(
                f"{path.name}: is larger than {_INDEX_BYTES_MAX} bytes, too large for such a file; fetch it again"
            )
        value = json.loads(data)
        if b"\\" in data or not data.isascii():
            # Fails on lone surrogates, which no file of ours can hold: an escape or json.loads lets them in.
            json.dumps(value, ensure_ascii=False).encode()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        problem = json_problem(data) or f"is not valid JSON ({error}); fetch it again"
        raise CheckpointError(f"{path.name}: {problem}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name}: is not a JSON object; fetch it again")
    return value


def _owners(headers: tuple[Header, ...]) -> dict[str, str]:
    """Tensor -> the file that holds it. Raises CheckpointError where two do."""
    owner = {ref.name: header.shard for header in headers for ref in header.tensors}
    if len(owner) < sum(len(header.tensors) for header in headers):
        files = Counter(ref.name for header in headers for ref in header.tensors)
        twice = next(name for name, count in files.items() if count > 1)
        first, second, *_ = (
            header.shard for header in headers for ref in header.tensors if ref.name == twice
        )
        raise CheckpointError(f"{twice}: is in two files, {first} and {second}; remove the stale one")
    return owner


def _agree(weight_map: Mapping[str, str], owner: Mapping[str, str]) -> None:
    """The index and the headers name the same tensors in the same files; of a file in `also` it may name none."""
    if weight_map == owner:
        return
    for name, file in weight_map.items():
        if owner.get(name) != file:
            held = f"it is in {owner[name]}" if name in owner else "no shard holds it"
            raise CheckpointError(
                f"{INDEX_FILE}: says that {name} is in {file}, but {held}; fetch both again"
            )
    indexed = set(weight_map.values())
    for name, file in owner.items():
        if file in indexed and name not in weight_map:
            raise CheckpointError(f"{file}: holds {name}, which {INDEX_FILE} does not name; fetch both again")
