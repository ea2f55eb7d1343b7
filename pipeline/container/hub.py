"""A parent on a Hugging Face hub: `hf://org/repo[@revision]`, read by ranges, so that it never lies on this disk.

Its sparse mirror is a folder with its small files whole and its shards as holes that begin with their true headers. So
scanning and planning see an ordinary checkpoint; only a Source, asked for a shard's bytes, fetches them. A mirror is
made for a commit, whose bytes can't change, and is kept for the next time.
"""

from __future__ import annotations

import json
import os
import re
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from shardmill.pipeline.container.header import HEADER_BYTES_MAX
from shardmill.pipeline.errors import CheckpointError, ShardmillError

if TYPE_CHECKING:
    from shardmill.pipeline.container.ranges import RemoteFile

HUB_FILE = ".shardmill-hub.json"  # in a sparse mirror: where its shards are; written last
_HEAD_BYTES = 1 << 20
_PLACE = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
# Weights in other formats, which no safetensors loader reads.
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5", ".ot", ".safetensors")


def sparse_mirror(place: str) -> Path:
    """The sparse mirror of the repository at `place`, made where there is none. Raises ShardmillError in a sentence."""
    match = _PLACE.fullmatch(place)
    if match is None:
        raise ShardmillError(f"{place}: is no repository; write hf://org/repo or hf://org/repo@revision")
    repository, revision = match["repository"], match["revision"]
    api = _hub_api(place)
    try:
        info = api.model_info(repository, revision=revision, files_metadata=True)
    except Exception as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ShardmillError(f"{place}: the hub answers: {said[:200]}") from None
    folder = _cache() / repository.replace("/", "--") / str(info.sha)
    if not (folder / HUB_FILE).exists():
        sizes = {file.rfilename: file.size for file in info.siblings or () if _is_wanted(file.rfilename)}
        _make(folder, repository, f"{api.endpoint}/{repository}/resolve/{info.sha}", sizes)
    return folder


def other_commit(folder: Path, repository: str | None, revision: str | None) -> str | None:
    """Why the sparse mirror in `folder` is not the parent that a recipe pins; None where it is, or is no mirror."""
    noted = folder / HUB_FILE
    if not noted.exists():
        return None
    found = json.loads(noted.read_text())["repository"], folder.name
    for pinned, here, what in zip((repository, revision), found, ("repository", "revision"), strict=True):
        if pinned not in (None, here):
            return f"the recipe's parent has the {what} {pinned}, the hub's is {here}; name the one that is meant"
    return None


def _hub_api(place: str) -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise ShardmillError(f"{place}: needs huggingface_hub; pip install 'shardmill[hub]'") from None
    from shardmill.pipeline.container.ranges import hub_address

    return HfApi(endpoint=hub_address())


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "shardmill" / "hub"


def _is_wanted(name: str) -> bool:
    """Shards at the top and small files; no dotfiles, no path that leads elsewhere, no weights of another kind."""
    path = PurePosixPath(name)
    plain = (
        not path.is_absolute() and "\\" not in name and not any(part.startswith(".") for part in path.parts)
    )
    return plain and (_is_shard(name) or not name.endswith(_OTHER_WEIGHTS))


def _is_shard(name: str) -> bool:
    return "/" not in name and name.endswith(".safetensors")


def _make(folder: Path, repository: str, base: str, sizes: dict[str, int | None]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if missing := [name for name, size in sizes.items() if size is None]:
        raise ShardmillError(f"{repository}: the hub names no size for {missing[0]}; try again")
    shards = {name: int(size or 0) for name, size in sizes.items() if _is_shard(name)}
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(lambda item: _place_hole(folder / item[0], _url(base, item[0]), item[1]), shards.items())
        )
    for name in sizes:
        if name not in shards:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(_fetch(_url(base, name), 0, int(sizes[name] or 0)))
    (folder / HUB_FILE).write_text(
        json.dumps({"repository": repository, "base": base, "shards": sorted(shards)})
    )


def _place_hole(path: Path, url: str, size: int) -> None:
    """A file of the shard's size: its header, and a hole for its data."""
    head = _fetch(url, 0, min(size, _HEAD_BYTES))
    length = 8 + int.from_bytes(head[:8], "little")
    if length > min(size, HEADER_BYTES_MAX + 8):
        raise CheckpointError(f"{url}: its header claims {length} bytes of {size}; it is no safetensors file")
    if length > len(head):
        head += _fetch(url, len(head), length)
    with path.open("wb") as file:
        file.write(head[:length])
        file.truncate(size)


def _url(base: str, name: str) -> str:
    return f"{base}/{urllib.parse.quote(name)}"


def _fetch(url: str, begin: int, end: int) -> bytes:
    from shardmill.pipeline.container.ranges import RemoteFile

    data = bytearray(end - begin)
    with RemoteFile(url, end) as source:
        source.read_into(memoryview(data), begin)
    return bytes(data)


def hub_bytes(path: Path) -> RemoteFile | None:
    """The bytes of a sparse mirror's shard; None where `path` is an ordinary file."""
    noted = path.with_name(HUB_FILE)
    if not noted.exists():
        return None
    from shardmill.pipeline.container.ranges import (
        RemoteFile,  # with all of HTTP, which a folder's build can do without
    )

    facts = json.loads(noted.read_text())
    return (
        RemoteFile(_url(facts["base"], path.name), path.stat().st_size)
        if path.name in facts["shards"]
        else None
    )
