"""Stage `scan`: the parent's headers, index, config and other files, and whether they agree.

Only headers and small JSON files are read. Every contradiction is refused here, by name, so that what follows
may trust a Parent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.pipeline.container.header import file_stat, read_header
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.stages.job import Checkpoint
from shardmill.pipeline.types import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, Header, Parent

_INDEX_BYTES_MAX = 1 << 28

_HF_QUANT = "hf_quant_config.json"

# Files of a parent that its child must not carry: they describe the parent alone.
_NOT_CARRIED = frozenset({"README.md", _HF_QUANT, "shardmill.manifest.json", INDEX_FILE, CONFIG_FILE})
_SIGNATURES = (".sig", ".asc", ".sigstore", ".sigstore.json", ".minisig")


def scan(checkpoint: Checkpoint) -> Parent:
    """Reads the Parent. Raises CheckpointError where its files are missing or contradict each other."""
    folder = checkpoint.folder
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is not a folder; give the parent checkpoint's folder with --parent")
    shards = sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix == ".safetensors" and not path.name.startswith(".") and path.is_file()
    )
    index = folder / INDEX_FILE
    weight_map = _weight_map(index) if index.exists() else None
    if weight_map is None and shards != [SINGLE_FILE]:
        raise CheckpointError(
            f"{folder}: has neither {INDEX_FILE} nor a single {SINGLE_FILE}; is this the parent checkpoint's folder?"
        )
    if missing := sorted(set((weight_map or {}).values()) - set(shards)):
        raise CheckpointError(
            f"{INDEX_FILE}: names {missing[0]}, which is not in {folder}{_and_more(len(missing))}; fetch it again"
        )
    # Stats come first: a shard that is replaced after its header was read has another stat when it is opened.
    stats = {shard: file_stat(folder / shard) for shard in shards}
    headers = tuple(read_header(folder / shard, shard) for shard in shards)
    owner = _owners(headers)
    if weight_map is not None:
        _agree(weight_map, owner)
    carried, left = _other_files(folder, set(shards))
    for name in carried:
        _refuse_unreadable(folder / name)
    stats |= {name: file_stat(folder / name) for name in carried}
    return Parent(folder, headers, stats, _config(folder), carried, left, single=weight_map is None)


def _and_more(count: int) -> str:
    return f", nor are {count - 1} more" if count > 1 else ""


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = _json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{path.name}: weight_map must map tensor names to file names; fetch it again")
    for file in set(weight_map.values()):
        if "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path.name}: names {file!r}, which is not a .safetensors file beside it")
    return weight_map


def _json_object(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _INDEX_BYTES_MAX:
            raise CheckpointError(
                f"{path.name}: is larger than {_INDEX_BYTES_MAX} bytes, too large for an index; fetch it again"
            )
        value = json.loads(path.read_bytes())
        json.dumps(
            value, ensure_ascii=False
        ).encode()  # fails on lone surrogates, which no file of ours can hold
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: is not valid JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name}: is not a JSON object; fetch it again")
    return value


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG_FILE).exists():
        raise CheckpointError(f"{folder}: {CONFIG_FILE} is missing; loaders require it, fetch it")
    config = _json_object(folder / CONFIG_FILE)
    if "quantization_config" not in config and (folder / _HF_QUANT).exists():
        return {**config, "quantization_config": _as_modelopt(_json_object(folder / _HF_QUANT))}
    return config


def _as_modelopt(stated: Mapping[str, Any]) -> dict[str, Any]:
    """What hf_quant_config.json says, as ModelOpt puts it into config.json today: older checkpoints have it alone."""
    listed = stated.get("quantization")
    said = dict(listed) if isinstance(listed, dict) else {}
    ignored = said.pop("exclude_modules", None)
    return {"quant_method": "modelopt", **said, "ignore": ignored if isinstance(ignored, list) else []}


def _owners(headers: tuple[Header, ...]) -> dict[str, str]:
    owner: dict[str, str] = {}
    for header in headers:
        for ref in header.tensors:
            if ref.name in owner:
                raise CheckpointError(
                    f"{ref.name}: is in two files, {owner[ref.name]} and {header.shard}; remove the stale one"
                )
            owner[ref.name] = header.shard
    return owner


def _agree(weight_map: Mapping[str, str], owner: Mapping[str, str]) -> None:
    """The index and the headers name the same tensors in the same files.

    A shard of which the index names no tensor at all is taken in: some parents publish a later file of scales
    beside an older index.
    """
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


def _refuse_unreadable(path: Path) -> None:
    """A file that the child carries is copied last; that it can't be read is told first."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be opened: {error.strerror}; make it readable, or remove it"
        ) from None


def _other_files(folder: Path, shards: set[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Files beside the shards: those that a child carries, and those that it does not, with the reason."""
    carried, left = [], {}
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in sorted(files):
            path = Path(root, file)
            name = path.relative_to(folder).as_posix()
            if name in shards or name in (INDEX_FILE, CONFIG_FILE):
                continue
            reason = _why_left(folder, path, name)
            if reason:
                left[name] = reason
            else:
                carried.append(name)
    return tuple(carried), left


def _why_left(folder: Path, path: Path, name: str) -> str | None:
    if name in _NOT_CARRIED:
        return "it describes the parent alone"
    if path.name.startswith("."):
        return "it is a dotfile"
    if path.name.endswith(_SIGNATURES):
        return "a signature does not hold for another checkpoint"
    if not path.is_file():
        return "it is not a file, or a link to nothing"
    return None if _inside(folder, path) else "it is a link that leads outside the folder"


def _inside(folder: Path, path: Path) -> bool:
    """True where `path` leads to a place inside `folder`, or inside the Hugging Face cache entry it is part of.

    That cache keeps `snapshots/<revision>/<file>` as links to `blobs/<digest>`.
    """
    home = folder.resolve()
    target = path.resolve()
    blobs = home.parent.parent / "blobs"
    return target.is_relative_to(home) or (home.parent.name == "snapshots" and target.is_relative_to(blobs))
