"""A parent on a Hugging Face hub: `hf://org/repo[@revision]`, read by ranges, so that it never lies on this disk.

Its sparse mirror is a folder in the user's cache: small files whole, shards as holes that begin with their true
headers, all else as holes. So scanning and planning see an ordinary checkpoint, and only a Source, asked for bytes,
fetches them. A mirror is made for a commit, whose bytes can't change, and is kept for the next time. What the hub
says is checked: names, sizes, ranges, ETags, and the sha256 that it states for files that are fetched whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from shardmill.pipeline.container.header import HEADER_BYTES_MAX
from shardmill.pipeline.container.regular import read_regular
from shardmill.pipeline.container.side_files import SIDE_FILE_BYTES_MAX, SideFiles, module_folders
from shardmill.pipeline.errors import CheckpointError, MissingExtraError, ShardmillError
from shardmill.pipeline.types import README_FILE

if TYPE_CHECKING:
    from shardmill.pipeline.container.read_ahead import ReadAhead

HUB_FILE = ".shardmill-hub.json"  # in a sparse mirror: where its bytes are; written last
_HEAD_BYTES = 1 << 20
_FILE_BYTES_MAX = 1 << 44  # 16 TiB: beyond any shard
_PLACE = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REPOSITORY = re.compile(r"(?!\.)[\w.-]+/(?!\.)[\w.-]+")


@dataclass(frozen=True)
class Mirror:
    """What a mirror's note says: where the bytes are, which files are holes, which digests the hub states."""

    repository: str
    base: str
    holes: frozenset[str]
    sha256: Mapping[str, str]

    @classmethod
    def of(cls, folder: Path) -> Mirror | None:
        """The Mirror in `folder`; None where its note is absent or damaged."""
        try:
            value = json.loads(read_regular(folder / HUB_FILE))
            texts = [value["repository"], value["base"], *value["holes"], *value["sha256"].values()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        if not all(isinstance(text, str) for text in texts):
            return None
        return cls(value["repository"], value["base"], frozenset(value["holes"]), value["sha256"])


def sparse_mirror(place: str) -> Path:
    """The sparse mirror of the repository at `place`, made where there is none. Raises ShardmillError in a sentence."""
    match = _PLACE.fullmatch(place)
    if match is None or not _REPOSITORY.fullmatch(match["repository"]):
        raise ShardmillError(f"{place}: is no repository; write hf://org/repo or hf://org/repo@revision")
    repository, revision = match["repository"], match["revision"]
    api = _hub_api(place)
    try:
        info = api.model_info(repository, revision=revision, files_metadata=True)
    except Exception as error:
        raise ShardmillError(f"{place}: {_refusal(error, str(api.endpoint))}") from None
    commit = str(info.sha)
    if not _COMMIT.fullmatch(commit):
        raise ShardmillError(f"{place}: the hub names the commit {commit[:80]!r}, which is no commit hash")
    folder = _cache() / repository.replace("/", "--") / commit
    if Mirror.of(folder) is None:
        files = [file for file in info.siblings or () if _is_plain(file.rfilename)]
        sizes = {file.rfilename: _size(place, file.rfilename, file.size) for file in files}
        digests = {file.rfilename: file.lfs.sha256 for file in files if getattr(file, "lfs", None)}
        _make(folder, repository, f"{api.endpoint}/{repository}/resolve/{commit}", sizes, digests)
    return folder


def _refusal(error: Exception, endpoint: str) -> str:
    """What the hub said, and where to look: a private repository answers as one that is not there."""
    kind, status = type(error).__name__, getattr(getattr(error, "response", None), "status_code", None)
    if kind == "RevisionNotFoundError":
        return f"the repository at {endpoint} has no such revision; name a branch, a tag or a commit"
    if status in (401, 403, 404):
        return f"no such repository at {endpoint}, or it is not for you to see: correct the name, or set HF_TOKEN"
    said = (str(error).strip().splitlines() or [kind])[0]
    if status is None:
        return f"the hub at {endpoint} cannot be reached: {said[:200]}; HF_ENDPOINT names another"
    return f"the hub at {endpoint} answers: {said[:200]}; HF_ENDPOINT names another"


def _size(place: str, name: str, size: Any) -> int:
    if type(size) is not int or not 0 <= size <= _FILE_BYTES_MAX:
        raise ShardmillError(
            f"{place}: the hub states the size {size!r} for {name}; expected a number of bytes"
        )
    return size


def other_commit(folder: Path, repository: str | None, revision: str | None) -> str | None:
    """Why the sparse mirror in `folder` is not the parent that a recipe pins; None where it is, or is no mirror."""
    mirror = Mirror.of(folder) if _mirror_root(folder / HUB_FILE) else None
    if mirror is None:
        return None
    found = mirror.repository, folder.name
    for pinned, here, what in zip((repository, revision), found, ("repository", "revision"), strict=True):
        if pinned not in (None, here):
            return f"the recipe pins the {what} {pinned} but the hub has {here}; set one of them"
    return None


def origin_of(folder: Path) -> tuple[str, str] | None:
    """(repository, commit) of the sparse mirror in `folder`; None for any other folder."""
    mirror = Mirror.of(folder) if _mirror_root(folder / HUB_FILE) else None
    return (mirror.repository, folder.name) if mirror else None


def sha256_stated(path: Path) -> str | None:
    """What the hub states of a file whose bytes only it has; None of every other."""
    root = _mirror_root(path)
    mirror = Mirror.of(root) if root else None
    if root is None or mirror is None:
        return None
    name = path.relative_to(root).as_posix()
    return mirror.sha256.get(name) if name in mirror.holes else None


def place_of(folder: Path) -> str:
    """What a user calls the parent in `folder`: its place on the hub, or the folder."""
    origin = origin_of(folder)
    return f"hf://{origin[0]}@{origin[1]}" if origin else str(folder)


def _hub_api(place: str) -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise MissingExtraError(f"{place}: needs huggingface_hub; pip install huggingface_hub") from None
    from shardmill.pipeline.container.ranges import hub_address

    return HfApi(endpoint=hub_address())


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "shardmill" / "hub"


def _is_plain(name: str) -> bool:
    """No path that leads elsewhere, no control characters."""
    path = PurePosixPath(name)
    safe = not path.is_absolute() and ".." not in path.parts and "\\" not in name and name.isprintable()
    return safe and path.name != HUB_FILE


def _make(
    folder: Path, repository: str, base: str, sizes: Mapping[str, int], digests: Mapping[str, str]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    first = [name for name in ("modules.json",) if name in sizes]
    for name in first:
        _place_whole(folder, base, name, sizes[name], digests)
    modules = _modules(folder / "modules.json")
    weights = [name for name in sizes if _holds_weights(name, modules)]
    rule = SideFiles(modules=modules, code=frozenset(name for name in sizes if name.endswith(".py")))
    whole = [
        name
        for name in sizes
        if name not in weights and name not in first and _is_looked_at(name, sizes[name], rule)
    ]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: _place_head(folder / name, _url(base, name), sizes[name]), weights))
        list(pool.map(lambda name: _place_whole(folder, base, name, sizes[name], digests), whole))
    holes = [name for name in sizes if name not in whole and name not in first]
    for name in set(holes) - set(weights):
        _place_hole(folder / name, b"", sizes[name])
    note = {
        "repository": repository,
        "base": base,
        "holes": sorted(holes),
        "sha256": dict(sorted(digests.items())),
    }
    _write_note(folder / HUB_FILE, json.dumps(note).encode())


def _modules(path: Path) -> frozenset[str]:
    try:
        return module_folders(json.loads(read_regular(path))) if path.exists() else frozenset()
    except (ValueError, RecursionError):
        return frozenset()


def _holds_weights(name: str, modules: Iterable[str]) -> bool:
    """Whether a file's header is looked at: shards at the top, and those of a sentence model's modules."""
    folder = str(PurePosixPath(name).parent)
    return name.endswith(".safetensors") and (folder == "." or folder in modules)


def _is_looked_at(name: str, size: int, rule: SideFiles) -> bool:
    """Whether a file is fetched whole: the JSON that decides, and what a child gets."""
    top_json = name == README_FILE or ("/" not in name and name.endswith(".json"))
    return size <= SIDE_FILE_BYTES_MAX and (top_json or rule.why_left(name, size) is None)


def _place_whole(folder: Path, base: str, name: str, size: int, digests: Mapping[str, str]) -> None:
    if size > SIDE_FILE_BYTES_MAX:
        raise CheckpointError(f"{base}/{name}: the hub states {size} bytes, too large for such a file")
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    data = _fetch(_url(base, name), 0, size, size)
    refuse_other_digest(name, hashlib.sha256(data).hexdigest(), digests)
    target.write_bytes(data)


def refuse_other_digest(name: str, sha256: str, stated: Mapping[str, str]) -> None:
    """Raises CheckpointError where the hub states another sha256 for the file `name`."""
    if stated.get(name, sha256) != sha256:
        raise CheckpointError(
            f"{name}: its bytes have the sha256 {sha256}, the hub states {stated[name]}; fetch it again"
        )


def _place_head(path: Path, url: str, size: int) -> None:
    """A file of the shard's size: its header, and a hole for its data."""
    head = _fetch(url, 0, min(size, _HEAD_BYTES), size)
    length = 8 + int.from_bytes(head[:8], "little")
    if length > min(size, HEADER_BYTES_MAX + 8):
        length = len(head)  # no safetensors file; whoever reads its header says what it is
    if length > len(head):
        head += _fetch(url, len(head), length, size)
    _place_hole(path, head[:length], size)


def _place_hole(path: Path, head: bytes, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)


def _write_note(path: Path, data: bytes) -> None:
    """Whole or not at all: a mirror without a note is made again."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _url(base: str, name: str) -> str:
    return f"{base}/{urllib.parse.quote(name)}"


def _fetch(url: str, begin: int, end: int, size: int) -> bytes:
    from shardmill.pipeline.container.ranges import RemoteFile

    data = bytearray(end - begin)
    with RemoteFile(url, size, end) as source:
        source.read_into(memoryview(data), begin)
    return bytes(data)


def _mirror_root(path: Path) -> Path | None:
    """The sparse mirror that the file at `path` is in; None for any folder outside the cache, whatever lies in it."""
    cache = _cache()
    if not path.is_relative_to(cache):
        return None
    parts = path.relative_to(cache).parts
    return cache / parts[0] / parts[1] if len(parts) > 2 else None


def hub_bytes(path: Path, connections: int | None = None) -> ReadAhead | None:
    """The bytes of a hole in a sparse mirror; None where `path` is an ordinary file. Raises CheckpointError where a
    folder says that it is a mirror and is not in the cache, since its files are holes or somebody's trap.
    """
    root = _mirror_root(path)
    if root is None:
        if path.with_name(HUB_FILE).exists():
            raise CheckpointError(
                f"{path.with_name(HUB_FILE)}: only the cache {_cache()} holds mirrors of a hub; remove this file if "
                f"the folder's shards are whole, or set XDG_CACHE_HOME"
            )
        return None
    mirror = Mirror.of(root)
    if mirror is None:
        raise CheckpointError(f"{root}: its note {HUB_FILE} is damaged; run the command again with hf://")
    name = path.relative_to(root).as_posix()
    if name not in mirror.holes:
        return None
    # With all of HTTP, which a folder's build lacks.
    from shardmill.pipeline.container.read_ahead import CONNECTIONS, ReadAhead

    return ReadAhead(_url(mirror.base, name), path.stat().st_size, connections or CONNECTIONS)
