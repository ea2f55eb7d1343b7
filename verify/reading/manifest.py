"""`shardmill.manifest.json` as the judge reads it: strictly, by the published form alone.

Canonical JSON: keys sorted, no spaces, ASCII, no float, one LF at the end. `self` is the sha256 of the canonical JSON
without that key.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardmill.verify.reading import bounded_json
from shardmill.verify.reading.bounded_json import BadJsonError
from shardmill.verify.rules.findings import Finding

MANIFEST = "shardmill.manifest.json"
FORMAT = "shardmill/manifest/1"

# What a conversion says beside its counts. `source_block`: of a reblocked weight, the parent's block.
_NOT_COUNTS = ("family", "recipe", "block", "source_block")

_HEX64, _HEX32 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class FileRecord:
    bytes: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """`tensors` are digests of every tensor of the output file, `sources` of the parent tensors that were changed."""

    rewritten: bool
    tensors: dict[str, str]
    sources: dict[str, str]


@dataclass(frozen=True, slots=True)
class Conversion:
    family: str
    recipe: str
    block: tuple[int, int]
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Manifest:
    plan_key: str
    parent: dict[str, str | None]
    recipe: str
    numerics: tuple[str, ...]
    files: dict[str, FileRecord]
    shards: dict[str, ShardRecord]
    conversions: dict[str, Conversion]
    dropped: tuple[str, ...]
    renamed: dict[str, str]  # parent's name -> name here
    repairs: tuple[dict[str, Any], ...]


def canonical(value: object) -> bytes:
    return (json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True) + "\n").encode()


def parse_manifest(data: bytes) -> tuple[Manifest | None, list[Finding]]:
    """The manifest in `data`, or None with the findings that say why not."""
    try:
        value = bounded_json.loads(data)
    except BadJsonError as error:
        return None, [Finding("manifest-json", MANIFEST, "", "JSON", str(error))]
    wrong = [Finding("manifest-json", MANIFEST, "", *said) for said in _wrong_form(value)]
    if wrong:
        return None, wrong
    findings = []
    if canonical(value) != data:
        findings.append(Finding("manifest-canonical", MANIFEST, "", "sorted, compact, ASCII JSON and one LF"))
    own = hashlib.sha256(canonical({key: item for key, item in value.items() if key != "self"})).hexdigest()
    if own != value["self"]:
        findings.append(Finding("manifest-self", MANIFEST, "", own, value["self"]))
    return _manifest(value), findings


def _manifest(value: dict[str, Any]) -> Manifest:
    return Manifest(
        plan_key=value["plan_key"],
        parent=value["parent"],
        recipe=value["recipe"],
        numerics=tuple(value["numerics"]),
        files={name: FileRecord(row["bytes"], row["sha256"]) for name, row in value["files"].items()},
        shards={
            name: ShardRecord(row["rewritten"], row["tensors"], row["sources"])
            for name, row in value["shards"].items()
        },
        conversions={name: _conversion(row) for name, row in value["conversions"].items()},
        dropped=tuple(value["dropped"]),
        renamed=value["renamed"],
        repairs=tuple(value["repairs"]),
    )


def _conversion(row: dict[str, Any]) -> Conversion:
    counts = {key: item for key, item in row.items() if key not in _NOT_COUNTS}
    return Conversion(row["family"], row["recipe"], (row["block"][0], row["block"][1]), counts)


def _wrong_form(value: Any) -> Iterator[tuple[str, str]]:
    """(expected, got) for each part that is not of the form."""
    if not isinstance(value, dict):
        yield "an object", type(value).__name__
        return
    if value.get("format") != FORMAT:
        yield FORMAT, repr(value.get("format"))
        return
    for key, fits in _FORM.items():
        if key not in value:
            yield f"the key {key!r}", "none"
        elif not fits(value[key]):
            yield f"{key!r} of the form {FORMAT}", repr(value[key])[:120]
    unknown = sorted(set(value) - set(_FORM) - {"format"})
    if unknown:
        yield f"only keys of {FORMAT}", ", ".join(unknown[:5])


def _hex64(item: Any) -> bool:
    return isinstance(item, str) and _HEX64.fullmatch(item) is not None


def _hex32(item: Any) -> bool:
    return isinstance(item, str) and _HEX32.fullmatch(item) is not None


def _text(item: Any) -> bool:
    return isinstance(item, str)


def _count(item: Any) -> bool:
    return type(item) is int and 0 <= item < 1 << 63


def _texts(item: Any) -> bool:
    return isinstance(item, list) and all(isinstance(part, str) for part in item)


def _map(item: Any, fits: Any) -> bool:
    return isinstance(item, dict) and all(fits(part) for part in item.values())


def _parent(item: Any) -> bool:
    return _map(item, lambda part: part is None or _text(part)) and set(item) == {"repository", "revision"}


def _file(item: Any) -> bool:
    if not isinstance(item, dict) or set(item) != {"bytes", "sha256"}:
        return False
    return _count(item["bytes"]) and (item["sha256"] is None or _hex64(item["sha256"]))


def _shard(item: Any) -> bool:
    if not isinstance(item, dict) or not {"key", "rewritten", "tensors", "sources"} <= set(item):
        return False
    fine = _text(item["key"]) and isinstance(item["rewritten"], bool)
    return fine and _map(item["tensors"], _hex32) and _map(item["sources"], _hex32)


def _conversion_row(item: Any) -> bool:
    if not isinstance(item, dict) or not {"family", "recipe", "block"} <= set(item):
        return False
    block = item["block"]
    fine = isinstance(block, list) and len(block) == 2 and all(_count(side) and side for side in block)
    counts = (part for key, part in item.items() if key not in _NOT_COUNTS)
    return fine and _text(item["family"]) and _text(item["recipe"]) and all(map(_count, counts))


_FORM = {
    "plan_key": _text,
    "parent": _parent,
    "parent_verified": lambda item: isinstance(item, bool),
    "recipe": _text,
    "numerics": _texts,
    "algorithms": lambda item: (
        isinstance(item, dict) and item.get("tensor") == "xxh3-128" and item.get("file") in ("sha256", "none")
    ),
    "files": lambda item: _map(item, _file),
    "shards": lambda item: _map(item, _shard),
    "conversions": lambda item: _map(item, _conversion_row),
    "dropped": _texts,
    "renamed": lambda item: _map(item, _text),
    "repairs": lambda item: isinstance(item, list) and all(isinstance(part, dict) for part in item),
    "self": _hex64,
}
