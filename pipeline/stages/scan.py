"""Stage `scan`: the parent's headers, index, config and other files, and whether they agree.

Only headers and small JSON files are read. Every contradiction is refused here, by name, so that what follows
may trust a Parent.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmill.pipeline.container.beside import side_files
from shardmill.pipeline.container.card import front_matter
from shardmill.pipeline.container.header import file_stat, read_header
from shardmill.pipeline.container.recognize import instead_of_checkpoint, json_problem
from shardmill.pipeline.container.regular import read_regular
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.stages.job import Checkpoint
from shardmill.pipeline.types import CONFIG_FILE, INDEX_FILE, README_FILE, SINGLE_FILE, Header, Parent

_INDEX_BYTES_MAX = 1 << 28
_CARD_BYTES_MAX = 1 << 18  # a model card's front matter is at its start

_HF_QUANT = "hf_quant_config.json"


def scan(checkpoint: Checkpoint) -> Parent:
    """Reads the Parent. Raises CheckpointError where its files are missing or contradict each other.

    The index decides which files hold weights, or the single model.safetensors where there is no index. The recipe's
    `[parent] also` names further files, which some parents publish beside an older index.
    """
    folder = checkpoint.folder
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is not a folder; give the parent checkpoint's folder with --parent")
    index = folder / INDEX_FILE
    weight_map = _weight_map(index) if index.exists() or index.is_symlink() else None
    gone = {file: each for file, each in checkpoint.consumed.items() if not (folder / file).exists()}
    shards = _shards(folder, weight_map, checkpoint.recipe.parent.also, gone)
    # Stats come first: a shard that is replaced after its header was read has another stat when it is opened.
    stats = {shard: gone[shard].stat if shard in gone else file_stat(folder / shard) for shard in shards}
    headers = tuple(
        read_header(gone[shard].head if shard in gone else folder / shard, shard) for shard in shards
    )
    owner = _owners(headers)
    if weight_map is not None:
        _agree(weight_map, owner)
    carried, left = side_files(folder, shards, checkpoint.recipe.output.carry)
    stats |= {name: file_stat(folder / name) for name in carried}
    card = front_matter(_text(folder / README_FILE))
    return Parent(
        folder,
        headers,
        stats,
        _config(folder),
        carried,
        left,
        single=weight_map is None,
        consumed={shard: gone[shard].is_pinned for shard in shards if shard in gone},
        card=card,
    )


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
    weight_map = _json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{path.name}: weight_map must map tensor names to file names; fetch it again")
    for file in set(weight_map.values()):
        if "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path.name}: names {file!r}, which is not a .safetensors file beside it")
    return weight_map


def _json_object(path: Path) -> dict[str, Any]:
    try:
        data = read_regular(path, _INDEX_BYTES_MAX + 1)
        if len(data) > _INDEX_BYTES_MAX:
            raise CheckpointError(
                f"{path.name}: is larger than {_INDEX_BYTES_MAX} bytes, too large for such a file; fetch it again"
            )
        if problem := json_problem(data):
            raise CheckpointError(f"{path.name}: {problem}")
        value = json.loads(data)
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


def _text(path: Path) -> str:
    """The start of a text file that may be missing, unreadable or no text."""
    try:
        return read_regular(path, _CARD_BYTES_MAX).decode("utf-8", errors="replace")
    except OSError:
        return ""


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
    """The index and the headers name the same tensors in the same files; of a file in `also` it may name none."""
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
