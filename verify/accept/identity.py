"""Who answered: server, version, flags, checkpoint, rung, image. Every run and every row carries it.

Results bind to the checkpoint's manifest digest, so that a changed checkpoint makes them stale.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardmill.verify.accept.client import Client, MetricsError, UnreachableError, samples
from shardmill.verify.accept.protocol import digest_of

MANIFEST = "shardmill.manifest.json"
LIMIT_MIN, LIMIT_MAX = 32, 1 << 40  # of a server's context in tokens, where it says one
CACHE_FLAGS = (
    "cache_dtype",
    "enable_prefix_caching",
    "kv_cache_memory_bytes",
    "block_size",
    "mamba_cache_mode",
)


class IdentityError(ValueError):
    """A server or a checkpoint does not say who it is, or is another one. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Identity:
    """`flags` are those given by hand and those that the server's metrics show. `speculation`: a draft is on."""

    model: str
    version: str
    max_model_len: int
    flags: Mapping[str, str]
    speculation: bool
    checkpoint: str
    rung: str
    image: str

    @property
    def digest(self) -> str:
        return digest_of(asdict(self))

    def differences(self, other: Identity) -> list[str]:
        """What is not the same, for people."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{key}: {mine[key]!r} against {theirs[key]!r}" for key in mine if mine[key] != theirs[key]]


def ask_identity(
    client: Client,
    *,
    checkpoint: str = "",
    rung: str = "",
    image: str = "",
    flags: Mapping[str, str] | None = None,
) -> Identity:
    """Ask a server who it is. Raises IdentityError where it is no OpenAI-compatible one."""
    try:
        models = json.loads(client.get("/v1/models"))["data"]
        first = models[0]
        model, limit = str(first["id"]), int(first.get("max_model_len") or 0)
    except UnreachableError as error:
        raise IdentityError(f"{error}; is the server up, and is this its address without /v1?") from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError):
        raise IdentityError(
            f"{client.url}/v1/models: no list of models; is it an OpenAI-compatible server?"
        ) from None
    if not 0 <= limit < LIMIT_MAX or 0 < limit < LIMIT_MIN:
        raise IdentityError(f"{client.url}/v1/models: max_model_len is {limit}; no window of text fits it")
    try:
        page = client.get_if_there("/metrics")
        check_metrics(page, model)
        shown = _cache_flags(page)
    except UnreachableError as error:
        raise IdentityError(f"{error}; whether speculative decoding is on is read there: try again") from None
    except MetricsError as error:
        raise IdentityError(f"{client.url}/metrics: {error}") from None
    return Identity(
        model=model,
        version=_version(client),
        max_model_len=limit,
        flags=dict(sorted({**shown, **(flags or {})}.items())),
        speculation="spec_decode_num_drafts" in page,
        checkpoint=checkpoint,
        rung=rung,
        image=image,
    )


def check_metrics(page: str, model: str) -> None:
    """Raises MetricsError for the metrics of a server that serves other models than this one."""
    names = {s.labels["model_name"] for s in samples(page) if "model_name" in s.labels}
    if names and model not in names:
        raise MetricsError(
            f"the page is of {sorted(names)[0]!r:.60}, and {model!r:.60} is what the server names"
        )


def _version(client: Client) -> str:
    text = client.get_or_none("/version")
    try:
        return str(json.loads(text)["version"]) if text else "unknown"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "unknown"


def _cache_flags(page: str) -> dict[str, str]:
    info = next((s.labels for s in samples(page) if s.name == "vllm:cache_config_info"), {})
    return {name: info[name] for name in CACHE_FLAGS if name in info}


def checkpoint_digest(folder: Path) -> str:
    """The manifest's own digest, or without a manifest one of config, index and file sizes. Raises IdentityError."""
    if not folder.is_dir():
        raise IdentityError(f"{folder}: no such folder")
    manifest = folder / MANIFEST
    if manifest.is_file():
        try:
            return f"manifest:{json.loads(manifest.read_bytes())['self']}"
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise IdentityError(f"{manifest}: not a manifest with a digest of itself") from None
    names = ("config.json", "model.safetensors.index.json")
    texts = {
        n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in names if (folder / n).is_file()
    }
    sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}
    if not sizes:
        raise IdentityError(f"{folder}: neither {MANIFEST} nor .safetensors files")
    return f"files:{digest_of({'texts': texts, 'sizes': sizes})}"


def parse_identity(value: Any) -> Identity:
    """An identity from a run's JSON. Raises IdentityError."""
    if not isinstance(value, dict):
        raise IdentityError(f"identity: expected an object, got {value!r:.60}")
    try:
        identity = Identity(**value)
    except TypeError as error:
        raise IdentityError(f"identity: not as `record` writes it: {error}") from None
    for key, kind in _KINDS.items():
        if type(value[key]) is not kind:
            raise IdentityError(f"identity.{key}: expected {kind.__name__}, got {value[key]!r:.60}")
    limit = identity.max_model_len
    if not 0 <= limit < LIMIT_MAX or 0 < limit < LIMIT_MIN:
        raise IdentityError(f"identity.max_model_len: {limit} is no length of a context")
    bad = [name for name, flag in identity.flags.items() if not isinstance(flag, str)]
    if bad:
        raise IdentityError(f"identity.flags.{bad[0]}: expected a text, got {identity.flags[bad[0]]!r:.60}")
    return identity


_KINDS: Mapping[str, type] = {
    "model": str,
    "version": str,
    "max_model_len": int,
    "flags": dict,
    "speculation": bool,
    "checkpoint": str,
    "rung": str,
    "image": str,
}
