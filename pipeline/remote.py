"""A parent on a Hugging Face hub: `hf://org/repo[@revision]`, read by ranges, so that it never lies on this disk.

Its shadow is a folder with its small files whole and its shards as holes that begin with their true headers. So
scanning and planning see an ordinary checkpoint; only a Source, asked for a shard's bytes, fetches them. A shadow is
made for a commit, whose bytes can't change, and is kept for the next time.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PurePosixPath
from time import sleep
from typing import Any

from pipeline.container import HEADER_BYTES_MAX
from pipeline.errors import CheckpointError, ShardmillError

HUB_FILE = ".shardmill-hub.json"  # in a shadow: where its shards are; written last
WINDOW_BYTES = (
    64 << 20
)  # one request asks for so much, which a connection that is kept alive serves in one go
_HEAD_BYTES = 1 << 20
_SKIPPED_BYTES_MAX = 1 << 20  # a gap that is read and thrown away rather than asked around
_TRIES = 5
_PLACE = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
# Weights in other formats, which no safetensors loader reads.
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5", ".ot", ".safetensors")


class _Redirect(urllib.request.HTTPRedirectHandler):
    """Follows a hub to where it keeps its files, but hands the token to no other host."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        found = super().redirect_request(req, fp, code, msg, headers, newurl)
        if (
            found is not None
            and urllib.parse.urlsplit(newurl).netloc != urllib.parse.urlsplit(req.full_url).netloc
        ):
            found.remove_header("Authorization")
        return found


_opener = urllib.request.build_opener(_Redirect)


def shadow(place: str) -> Path:
    """The shadow of the repository at `place`, made where there is none. Raises ShardmillError in a sentence."""
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
    """Why the shadow in `folder` is not the parent that a recipe pins; None where it is, or is no shadow."""
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
    return HfApi(endpoint=_hub_address())


def _hub_address() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


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
    data = bytearray(end - begin)
    with HubBytes(url, end) as source:
        source.read_into(memoryview(data), begin)
    return bytes(data)


def hub_bytes(path: Path) -> HubBytes | None:
    """The bytes of a shadow's shard; None where `path` is an ordinary file."""
    noted = path.with_name(HUB_FILE)
    if not noted.exists():
        return None
    facts = json.loads(noted.read_text())
    return (
        HubBytes(_url(facts["base"], path.name), path.stat().st_size)
        if path.name in facts["shards"]
        else None
    )


class HubBytes:
    """A remote file of `size` bytes, read at offsets. Reading on where the last read ended costs no new request."""

    def __init__(self, url: str, size: int) -> None:
        self.url, self.size = url, size
        self._answer: HTTPResponse | None = None
        self._at = self._end = 0  # the open answer's next byte, and where it ends

    def __enter__(self) -> HubBytes:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        if self._answer is not None:
            self._answer.close()
        self._answer = None

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fills `target` with the bytes at `offset`. Raises CheckpointError after several tries."""
        done, failures = 0, 0
        while done < len(target):
            try:
                done += self._some(target[done:], offset + done)
                failures = 0
            except (OSError, HTTPException) as error:
                self.close()
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                failures += 1
                if failures == _TRIES or _is_final(error):
                    raise CheckpointError(
                        f"{self.url}: byte {offset + done} cannot be fetched: {error}; build again to go on"
                    ) from None
                sleep(0.2 * 2**failures)

    def _some(self, target: memoryview, offset: int) -> int:
        """Puts at least one byte into `target` and says how many."""
        answer = self._answer_at(offset)
        count = answer.readinto(target[: self._end - offset])
        if not count:
            raise HTTPException(f"the answer ends at byte {offset}, before byte {self._end}")
        self._at += count
        return count

    def _answer_at(self, offset: int) -> HTTPResponse:
        """An answer whose next byte is the one at `offset`."""
        if self._answer is not None and self._at < self._end:
            gap = offset - self._at
            if 0 <= gap <= min(_SKIPPED_BYTES_MAX, self._end - self._at - 1):
                if gap:
                    self._at += len(self._answer.read(gap))
                if self._at == offset:
                    return self._answer
        self.close()
        self._at, self._end = offset, min(offset + WINDOW_BYTES, self.size)
        request = urllib.request.Request(self.url, headers=_headers(self.url))
        request.add_header("Range", f"bytes={offset}-{self._end - 1}")
        answer: HTTPResponse = _opener.open(request, timeout=60)
        self._answer = answer
        if answer.status != 206 and not (answer.status == 200 and offset == 0):
            raise HTTPException(f"the hub answers {answer.status} to a range")
        return answer


def _headers(url: str) -> dict[str, str]:
    """What the hub's own library sends. The token in it goes to the hub alone: a parent's folder may hold a file that
    makes it look like a shadow, and name any host.
    """
    try:
        from huggingface_hub.utils import build_hf_headers
    except ImportError:
        return {}
    kept: Iterable[tuple[str, Any]] = build_hf_headers().items()
    at_hub = urllib.parse.urlsplit(url)[:2] == urllib.parse.urlsplit(_hub_address())[:2]  # scheme and host
    return {name: str(value) for name, value in kept if at_hub or name.lower() != "authorization"}


def _is_final(error: Exception) -> bool:
    """Whether another try is in vain: the hub understood and refused."""
    return isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500 and error.code != 429
