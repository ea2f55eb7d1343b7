"""`shardmill.manifest.json` as the judge reads it: strictly, by the published form alone.

Canonical JSON: keys sorted, no spaces, ASCII, no float, one LF at the end. `self` is the sha256 of the canonical JSON
without that key. Format 2 has the families and the recipe's text, which format 1 lacks; a conversion's numerics are
called `recipe` in format 1.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shardmill.verify.reading import bounded_json
from shardmill.verify.reading.bounded_json import BadJsonError
from shardmill.verify.rules.findings import Finding

MANIFEST = "shardmill.manifest.json"
FORMAT_1, FORMAT_2 = "shardmill/manifest/1", "shardmill/manifest/2"

_BLOCKS = ("block", "source_block")  # of a conversion; `source_block`, of a reblocked weight, is the parent's

_HEX64, _HEXES = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]*+")


class FileRecord(NamedTuple):
    bytes: int
    sha256: str | None


class ShardRecord(NamedTuple):
    """`tensors` are digests of every tensor of the output file, `sources` of the parent tensors that were changed."""

    rewritten: bool
    tensors: dict[str, str]
    sources: dict[str, str]


class Conversion(NamedTuple):
    family: str
    numerics: str
    block: tuple[int, int]
    counts: dict[str, int]


class FamilyRecord(NamedTuple):
    """A family of the recipe: what was done with its tensors, why, and their bytes before and after."""

    name: str
    action: str
    reason: str | None
    tensors: int
    bytes_before: int
    bytes_after: int  # without the scales
    scale_bytes: int
    block: tuple[int, int] | None


class SourceRecord(NamedTuple):
    """Another checkpoint than the parent, and what it gave: the parent's name of a tensor -> its own name there."""

    repository: str | None
    revision: str | None
    tensors: dict[str, str]


class Manifest(NamedTuple):
    plan_key: str
    parent: dict[str, str | None]
    parent_verified: bool
    recipe: str  # its name
    recipe_digests: tuple[str, ...]  # sha256 of its TOML and of each recipe that it extends; none in format 1
    numerics: tuple[str, ...]
    files: dict[str, FileRecord]
    shards: dict[str, ShardRecord]
    conversions: dict[str, Conversion]
    families: tuple[FamilyRecord, ...]  # none in format 1
    dropped: tuple[str, ...]
    renamed: dict[str, str]  # parent's name -> name here
    repairs: tuple[dict[str, Any], ...]
    algorithms: dict[str, str]
    self_digest: str
    sources: dict[str, SourceRecord]
    transposed: frozenset[str] = frozenset()  # families whose weights the parent stores with axes exchanged

    @property
    def hashes_files(self) -> bool:
        """Whether it says that every file's sha256 is in it."""
        return self.algorithms["file"] == "sha256"


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
    form = canonical(value)
    if form != data:
        findings.append(Finding("manifest-canonical", MANIFEST, "", "sorted, compact, ASCII JSON and one LF"))
    own = hashlib.sha256(_without_self(value, form)).hexdigest()
    if own != value["self"]:
        findings.append(Finding("manifest-self", MANIFEST, "", own, value["self"]))
    for layer in value["recipe"]["layers"] if value["format"] == FORMAT_2 else []:
        if (text_digest := hashlib.sha256(layer["toml"].encode()).hexdigest()) != layer["sha256"]:
            findings.append(
                Finding("manifest-self", MANIFEST, "", text_digest, f"{layer['sha256']} of the recipe")
            )
    return _manifest(value), findings


def _without_self(value: dict[str, Any], form: bytes) -> bytes:
    """The canonical JSON without the key `self`, which is no key's last: `shards` comes behind it."""
    member = f'"self":"{value["self"]}",'.encode()
    if form.count(member) == 1:
        return form.replace(member, b"")
    return canonical({key: item for key, item in value.items() if key != "self"})


def _manifest(value: dict[str, Any]) -> Manifest:
    new = value["format"] == FORMAT_2
    return Manifest(
        plan_key=value["plan_key"],
        parent=value["parent"],
        parent_verified=value["parent_verified"],
        recipe=value["recipe"]["name"] if new else value["recipe"],
        recipe_digests=tuple(layer["sha256"] for layer in value["recipe"]["layers"]) if new else (),
        numerics=tuple(value["numerics"]),
        files={name: FileRecord(row["bytes"], row["sha256"]) for name, row in value["files"].items()},
        shards={
            name: ShardRecord(row["rewritten"], row["tensors"], row["sources"])
            for name, row in value["shards"].items()
        },
        conversions={
            name: _conversion(row, _NUMERICS[value["format"]]) for name, row in value["conversions"].items()
        },
        families=tuple(_family(row) for row in value["families"]) if new else (),
        dropped=tuple(value["dropped"]),
        renamed=value["renamed"],
        repairs=tuple(value["repairs"]),
        algorithms=value["algorithms"],
        self_digest=value["self"],
        transposed=frozenset(_transposed(value["recipe"]["layers"])) if new else frozenset(),
        sources={name: SourceRecord(**row) for name, row in value.get("sources", {}).items()},
    )


def _transposed(layers: list[dict[str, str]]) -> Iterator[str]:
    for layer in layers:
        if "transposed" not in layer["toml"] and "\\u" not in layer["toml"].lower():  # nor spelled by escapes
            continue
        import tomllib

        try:
            families = tomllib.loads(layer["toml"]).get("family", [])
        except (tomllib.TOMLDecodeError, RecursionError):
            continue
        for family in families if isinstance(families, list) else []:
            if isinstance(family, dict) and family.get("transposed") is True:
                yield str(family.get("name", ""))


_NUMERICS = {FORMAT_1: "recipe", FORMAT_2: "numerics"}  # the key of a conversion that names its numerics


def _conversion(row: dict[str, Any], numerics: str) -> Conversion:
    counts = {key: item for key, item in row.items() if key not in ("family", numerics, *_BLOCKS)}
    return Conversion(row["family"], row[numerics], (row["block"][0], row["block"][1]), counts)


def _family(row: dict[str, Any]) -> FamilyRecord:
    block = row["block"]
    return FamilyRecord(**{**row, "block": (block[0], block[1]) if block is not None else None})


def _wrong_form(value: Any) -> Iterator[tuple[str, str]]:
    """(expected, got) for each part that is not of the form."""
    if not isinstance(value, dict):
        yield "an object", type(value).__name__
        return
    written = value.get("format")
    form = _FORMS.get(written) if isinstance(written, str) else None
    if form is None:
        yield f"{FORMAT_1} or {FORMAT_2}", repr(written)[:120]
        return
    for key, fits in form.items():
        if key not in value:
            yield f"the key {key!r}", "none"
        elif not fits(value[key]):
            yield f"{key!r} of the form {written}", repr(value[key])[:120]
    if "values" in value and not _map(value["values"], _odd_values):
        yield "'values': NaN, Inf and zeros by tensor", repr(value["values"])[:120]
    if "sources" in value and not _map(value["sources"], _source):
        yield "'sources': repository, revision and tensors by name", repr(value["sources"])[:120]
    unknown = sorted(set(value) - set(form) - {"format", "values", "sources"})
    if unknown:
        yield f"only keys of {written}", ", ".join(unknown[:5])


def _odd_values(item: Any) -> bool:
    """What a tensor that was passed on holds: counts of NaN and Inf, or that it is empty or all zeros."""
    return (
        isinstance(item, dict)
        and set(item) <= {"nan", "inf", "zero", "empty"}
        and all(map(_count, item.values()))
    )


def _hex64(item: Any) -> bool:
    return isinstance(item, str) and _HEX64.fullmatch(item) is not None


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


def _source(item: Any) -> bool:
    if not isinstance(item, dict) or set(item) != {"repository", "revision", "tensors"}:
        return False
    named = all(item[key] is None or _text(item[key]) for key in ("repository", "revision"))
    return named and _map(item["tensors"], _text)


def _file(item: Any) -> bool:
    if not isinstance(item, dict) or set(item) != {"bytes", "sha256"}:
        return False
    return _count(item["bytes"]) and (item["sha256"] is None or _hex64(item["sha256"]))


def _shard(item: Any) -> bool:
    if not isinstance(item, dict) or not {"key", "rewritten", "tensors", "sources"} <= set(item):
        return False
    fine = _text(item["key"]) and isinstance(item["rewritten"], bool)
    return fine and _digests(item["tensors"]) and _digests(item["sources"])


def _digests(item: Any) -> bool:
    """Whether it is a table of xxh3-128 digests. Tens of thousands of them are looked at as one text."""
    if not isinstance(item, dict) or not all(type(part) is str and len(part) == 32 for part in item.values()):
        return False
    return _HEXES.fullmatch("".join(item.values())) is not None


def _block(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2 and all(_count(side) and side for side in item)


def _conversion_row(item: Any, numerics: str) -> bool:
    if not isinstance(item, dict) or not {"family", numerics, "block"} <= set(item):
        return False
    counts = (part for key, part in item.items() if key not in ("family", numerics, *_BLOCKS))
    fine = (
        all(_block(item[key]) for key in _BLOCKS if key in item)
        and _text(item["family"])
        and _text(item[numerics])
    )
    return fine and all(map(_count, counts))


def _family_row(item: Any) -> bool:
    if not isinstance(item, dict) or set(item) != set(FamilyRecord._fields):
        return False
    sizes = (item[key] for key in ("tensors", "bytes_before", "bytes_after", "scale_bytes"))
    fine = _text(item["name"]) and _text(item["action"]) and all(map(_count, sizes))
    return fine and all(
        item[key] is None or fits(item[key]) for key, fits in (("reason", _text), ("block", _block))
    )


def _recipe(item: Any) -> bool:
    if not isinstance(item, dict) or set(item) != {"name", "layers"} or not isinstance(item["layers"], list):
        return False
    return _text(item["name"]) and all(_layer(layer) for layer in item["layers"])


def _layer(item: Any) -> bool:
    if not isinstance(item, dict) or set(item) != {"toml", "sha256"} or not _hex64(item["sha256"]):
        return False
    return _text(item["toml"]) and not any("\ud800" <= sign <= "\udfff" for sign in item["toml"])


_FORM_OF_BOTH: dict[str, Callable[[Any], bool]] = {
    "plan_key": _text,
    "parent": _parent,
    "parent_verified": lambda item: isinstance(item, bool),
    "numerics": _texts,
    "algorithms": lambda item: (
        isinstance(item, dict) and item.get("tensor") == "xxh3-128" and item.get("file") in ("sha256", "none")
    ),
    "files": lambda item: _map(item, _file),
    "shards": lambda item: _map(item, _shard),
    "dropped": _texts,
    "renamed": lambda item: _map(item, _text),
    "repairs": lambda item: isinstance(item, list) and all(isinstance(part, dict) for part in item),
    "self": _hex64,
}

_FORMS: dict[str, dict[str, Callable[[Any], bool]]] = {
    FORMAT_1: {
        **_FORM_OF_BOTH,
        "recipe": _text,
        "conversions": lambda item: _map(item, lambda row: _conversion_row(row, "recipe")),
    },
    FORMAT_2: {
        **_FORM_OF_BOTH,
        "recipe": _recipe,
        "conversions": lambda item: _map(item, lambda row: _conversion_row(row, "numerics")),
        "families": lambda item: isinstance(item, list) and all(map(_family_row, item)),
    },
}
