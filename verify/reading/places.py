"""Remote sources: a plain http(s) folder, and a repository of a Hugging Face hub at a pinned commit."""

from __future__ import annotations

import re
import urllib.parse
from typing import Any

from shardmill.verify.reading import bounded_json
from shardmill.verify.reading.checkpoint import INDEX, MANIFEST_BYTES_MAX, is_plain_path
from shardmill.verify.reading.manifest import MANIFEST
from shardmill.verify.reading.remote import Address, RemoteReader
from shardmill.verify.rules.findings import Finding, UnreadableError

# A plain web server can't be listed: these names are asked for, and those that index and manifest name.
KNOWN = (
    INDEX,
    "model.safetensors",
    MANIFEST,
    "config.json",
    "hf_quant_config.json",
    "generation_config.json",
)
SHARDS_MAX = 20_000

_COMMIT = re.compile(r"[0-9a-f]{40}")


class PlaceError(Exception):
    """A remote place that can't be asked at all; the text is a sentence for people."""


class Remote:
    """Files behind an address. `digests` are sha256 that the place itself states."""

    remote = True

    def __init__(
        self, where: str, address: Address, sizes: dict[str, int], digests: dict[str, str], listed: bool
    ) -> None:
        self.where, self.address, self.digests, self.listed = where, address, digests, listed
        self._sizes = dict(sorted(sizes.items()))
        self._findings: list[Finding] = []

    @property
    def transferred(self) -> int:
        return self.address.transferred

    def note(self, finding: Finding) -> None:
        self._findings.append(finding)

    def files(self) -> dict[str, int]:
        return self._sizes

    def findings(self) -> list[Finding]:
        return self._findings

    def open(self, file: str) -> RemoteReader:
        return RemoteReader(self.address, file, self._sizes[file])


def web_folder(url: str) -> Remote:
    """The checkpoint in the folder (or the one .safetensors file) at an http(s) address. Raises PlaceError."""
    parts = urllib.parse.urlsplit(url)
    base, only = url, None
    if parts.path.endswith(".safetensors"):
        head, _, only = parts.path.rpartition("/")
        base = urllib.parse.urlunsplit((parts.scheme, parts.netloc, head, "", ""))
    address = Address(base)
    names = [urllib.parse.unquote(only)] if only else list(KNOWN)
    try:
        sizes = {name: size for name in names if (size := address.size(name)) is not None}
        for listing in (INDEX, MANIFEST):
            for name in _named(address, sizes, listing):
                size = address.size(name) if name not in sizes else None
                if size is not None:
                    sizes[name] = size
    except UnreadableError as error:
        raise PlaceError(f"{url}: {error.finding.file}: {error.finding.got}.") from None
    return Remote(url, address, sizes, {}, listed=False)


def _named(address: Address, sizes: dict[str, int], listing: str) -> list[str]:
    """The plain paths that an index or manifest names; [] where it can't be read (opening it will say why)."""
    if sizes.get(listing, MANIFEST_BYTES_MAX) >= MANIFEST_BYTES_MAX:
        return []
    try:
        value: Any = bounded_json.loads(address.keep(listing, sizes[listing]))
    except bounded_json.BadJsonError:
        return []
    if not isinstance(value, dict):
        return []
    named = value.get("weight_map") if listing == INDEX else value.get("files")
    if not isinstance(named, dict):
        return []
    paths = named.values() if listing == INDEX else named
    return sorted({path for path in paths if isinstance(path, str) and is_plain_path(path)})[:SHARDS_MAX]


def hub_repository(place: str, endpoint: str | None = None) -> Remote:
    """`hf://org/repo@revision`: listed by huggingface_hub, read at the commit that the revision names now.

    A revision that is no commit is resolved, and the resolution recorded as a finding. Raises PlaceError.
    """
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import build_hf_headers
    except ImportError:
        raise PlaceError(
            f"{place}: needs huggingface_hub; `pip install huggingface_hub` brings it."
        ) from None
    name, _, revision = place.removeprefix("hf://").partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise PlaceError(f"{place}: write hf://org/repo@revision.")
    api = HfApi(endpoint=endpoint)
    try:
        info = api.model_info(name, revision=revision or None, files_metadata=True)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise PlaceError(f"{place}: the hub at {api.endpoint} answered: {lines[0][:200]}") from None
    commit = info.sha or ""
    if not _COMMIT.fullmatch(commit):
        raise PlaceError(f"{place}: the hub named no commit, so nothing can be pinned.")
    siblings = info.siblings or []
    files = {file.rfilename: file.size for file in siblings if _listed(file.rfilename)}
    if unknown := [name for name, size in files.items() if size is None]:
        raise PlaceError(f"{place}: the hub states no size for {unknown[0]}; ask a hub that does.")
    digests = {file.rfilename: file.lfs.sha256 for file in siblings if file.lfs is not None}
    headers = {key: str(value) for key, value in build_hf_headers().items()}
    base = f"{api.endpoint}/{name}/resolve/{commit}"
    remote = Remote(f"hf://{name}@{commit}", Address(base, headers), files, digests, listed=True)
    if revision != commit:
        said = revision or "no revision given"
        remote.note(Finding("revision-resolved", "", "", "a commit", f"{said}: {commit} now"))
    return remote


def _listed(path: str) -> bool:
    return is_plain_path(path) and not any(part.startswith(".") for part in path.split("/"))
