"""Receipt and Manifest: what was made from what. No time, host, path or duration is in either.

Law: `Manifest.from_json(m.to_json()) == m`, and `to_json` is canonical, so equal manifests have equal bytes.
What is written has format 2; format 1, which lacks families and the recipe's text, is read for ever.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.digest import TENSOR_ALGORITHM, canonical, key_of
from shardmill.pipeline.types import SCALE_SUFFIXES, FamilySummary

MANIFEST_FORMAT = "shardmill/manifest/2"
FORMAT_1 = "shardmill/manifest/1"
MANIFEST_FILE = "shardmill.manifest.json"
STATE_FOLDER = ".shardmill"  # in the output folder, never published

Counts = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one shard turned out to be."""

    file: str
    key: str  # of the ShardPlan that it fulfils
    rewritten: bool
    file_bytes: int
    sha256: str | None
    tensors: Mapping[str, str]  # output tensor -> digest of its data
    sources: Mapping[str, str]  # parent tensor -> digest, for those whose bytes were changed
    counts: Mapping[str, Counts] = field(default_factory=dict)  # weight -> what its numerics counted
    repairs: tuple[Mapping[str, Any], ...] = ()
    values: Mapping[str, Counts] = field(
        default_factory=dict
    )  # tensor -> what is odd about it: nan, inf, zero, empty

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Receipt:
        """The receipt of fields that `as_json` gave. Raises what a wrong form raises."""
        receipt = cls(**{**fields, "repairs": tuple(fields["repairs"])})
        texts = (
            receipt.file,
            receipt.key,
            *receipt.tensors,
            *receipt.tensors.values(),
            *receipt.sources.values(),
        )
        numbers = (
            number
            for counts in (*receipt.counts.values(), *receipt.values.values())
            for number in counts.values()
        )
        if not all(isinstance(text, str) for text in texts) or type(receipt.file_bytes) is not int:
            raise ValueError("its texts or its size have another type")
        if not all(type(number) is int for number in numbers) or not isinstance(receipt.sha256, str | None):
            raise ValueError("its counts or its sha256 have another type")
        if not all(isinstance(repair, dict) for repair in receipt.repairs):
            raise ValueError("its repairs have another type")
        return receipt


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and sha256 of a published file; the sha256 is None where none was wanted."""

    bytes: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A receipt as the manifest keeps it; size and sha256 are under `files`."""

    key: str
    rewritten: bool
    tensors: Mapping[str, str]
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ConversionRecord:
    """How a weight was converted: by which numerics, to which block, and what these counted."""

    family: str
    numerics: str  # e.g. "amax/1"
    block: tuple[int, int]
    counts: Counts = field(default_factory=dict)
    source_block: tuple[int, int] | None = None  # of a weight that was reblocked, the parent's block

    def as_json(self) -> dict[str, Any]:
        source = {"source_block": list(self.source_block)} if self.source_block else {}
        named = {"family": self.family, "numerics": self.numerics, "block": list(self.block)}
        return {**self.counts, **named, **source}

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> ConversionRecord:
        counts = dict(fields)
        family, numerics, (rows, cols) = (counts.pop(key) for key in ("family", "numerics", "block"))
        source = counts.pop("source_block", None)
        return cls(family, numerics, (rows, cols), counts, (source[0], source[1]) if source else None)


@dataclass(frozen=True, slots=True)
class RecipeRecord:
    """The recipe: its name and its whole TOML text, then that of each recipe that it extends; none in format 1."""

    name: str
    layers: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        layers = [{"toml": text, "sha256": hashlib.sha256(text.encode()).hexdigest()} for text in self.layers]
        return {"name": self.name, "layers": layers}

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> RecipeRecord:
        record = cls(fields["name"], tuple(layer["toml"] for layer in fields["layers"]))
        if record.as_json() != fields:
            raise ValueError("the sha256 of a recipe's text is not the one beside it")
        return record


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """Another checkpoint than the parent, and what it gave: the parent's name of each tensor -> its own name there."""

    repository: str | None
    revision: str | None
    tensors: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that can be proven about a published checkpoint, written beside it."""

    plan_key: str
    parent: Mapping[str, str | None]  # repository, revision
    parent_verified: bool
    recipe: RecipeRecord
    numerics: tuple[str, ...]
    algorithms: Mapping[str, str]
    files: Mapping[str, FileRecord]
    shards: Mapping[str, ShardRecord]
    conversions: Mapping[str, ConversionRecord]
    families: tuple[FamilySummary, ...] = ()  # in the recipe's order; none in format 1
    dropped: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    repairs: tuple[Mapping[str, Any], ...] = ()
    values: Mapping[str, Counts] = field(
        default_factory=dict
    )  # output tensor -> NaN, Inf, zeros that it holds
    sources: Mapping[str, SourceRecord] = field(default_factory=dict)  # other checkpoints that gave tensors
    format: str = MANIFEST_FORMAT  # that it was read from

    def to_json(self) -> bytes:
        body = {
            "format": MANIFEST_FORMAT,
            "plan_key": self.plan_key,
            "parent": dict(self.parent),
            "parent_verified": self.parent_verified,
            "recipe": self.recipe.as_json(),
            "numerics": sorted(self.numerics),
            "algorithms": dict(self.algorithms),
            "files": {name: {"bytes": f.bytes, "sha256": f.sha256} for name, f in self.files.items()},
            "shards": {name: _shard_fields(shard) for name, shard in self.shards.items()},
            "conversions": {name: record.as_json() for name, record in self.conversions.items()},
            "families": [asdict(family) for family in self.families],
            "dropped": sorted(self.dropped),
            "renamed": dict(self.renamed),
            "repairs": [dict(repair) for repair in self.repairs],
            **({"values": {name: dict(odd) for name, odd in self.values.items()}} if self.values else {}),
            **(
                {"sources": {name: asdict(each) for name, each in self.sources.items()}}
                if self.sources
                else {}
            ),
        }
        return canonical({**body, "self": key_of(body)})

    @classmethod
    def from_json(cls, text: bytes, origin: str = MANIFEST_FILE) -> Manifest:
        """Reads a manifest; raises CheckpointError where it is not one, or not the one that it was."""
        try:
            body = json.loads(text)
            claimed = body.pop("self")
            manifest = _parsed(dict(body))
            intact = key_of(body) == claimed
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{origin}: not a manifest of this version ({error}); delete it to build anew"
            ) from error
        if not intact:
            raise CheckpointError(f"{origin}: was edited since it was written; delete it to build anew")
        return manifest

    def input_digest(self, shard: str, tensor: str) -> str | None:
        """Digest of the parent's `tensor` that went into output file `shard`.

        A tensor that was passed on has the digest of its output; the changed ones are listed apart.
        """
        record = self.shards[shard]
        if tensor in record.sources:
            return record.sources[tensor]
        if tensor not in self.renamed and self._is_new_scale(tensor):
            return None
        return record.tensors.get(self.renamed.get(tensor, tensor))

    def _is_new_scale(self, tensor: str) -> bool:
        """Whether the output's tensor of this name holds a converted weight's scales: the parent's was dropped."""
        return any(
            tensor.endswith(suffix) and tensor.removesuffix(suffix) in self.conversions
            for suffix in SCALE_SUFFIXES
        )


def _parsed(body: dict[str, Any]) -> Manifest:
    """The manifest of a body of either format, without its `self`. Raises what a wrong form raises."""
    if body["format"] == FORMAT_1:
        body = _from_format_1(body)
    elif body["format"] != MANIFEST_FORMAT:
        raise ValueError(f"its format is neither {MANIFEST_FORMAT} nor {FORMAT_1}")
    for key in ("numerics", "dropped", "repairs"):
        body[key] = tuple(body[key])
    body["recipe"] = RecipeRecord.parse(body["recipe"])
    body["files"] = {name: FileRecord(**fields) for name, fields in body["files"].items()}
    body["shards"] = {name: ShardRecord(**fields) for name, fields in body["shards"].items()}
    body["conversions"] = {
        name: ConversionRecord.parse(fields) for name, fields in body["conversions"].items()
    }
    body["families"] = tuple(_family(fields) for fields in body["families"])
    if outside := [name for name in body["files"] if leads_outside(name)]:
        raise ValueError(f"it names {outside[0]!r}, which leads out of the folder")
    if not all(isinstance(odd, dict) for odd in body.get("values", {}).values()):
        raise ValueError("its `values` have another form")
    body["sources"] = {name: _source(fields) for name, fields in body.get("sources", {}).items()}
    return Manifest(**body)


# Numerics whose name alone has changed since a manifest of format 1 was written.
_RESPELLED = {"dequantise/1": "dequantize/1"}


def _from_format_1(body: dict[str, Any]) -> dict[str, Any]:
    """The same in the form of format 2: a conversion's `recipe` is its numerics, the recipe is a name alone."""
    conversions = {}
    for name, fields in body["conversions"].items():
        numerics = fields["recipe"]
        rest = {key: value for key, value in fields.items() if key != "recipe"}
        conversions[name] = {**rest, "numerics": _RESPELLED.get(numerics, numerics)}
    return {
        **body,
        "recipe": {"name": body["recipe"], "layers": []},
        "numerics": sorted(_RESPELLED.get(name, name) for name in body["numerics"]),
        "conversions": conversions,
        "families": [],
    }


def _source(fields: Mapping[str, Any]) -> SourceRecord:
    record = SourceRecord(**fields)
    if not all(isinstance(text, str) for pair in record.tensors.items() for text in pair):
        raise ValueError("its `sources` have another form")
    return record


def _family(fields: Mapping[str, Any]) -> FamilySummary:
    block = fields["block"]
    return FamilySummary(**{**fields, "block": tuple(block) if block is not None else None})


def leads_outside(name: object) -> bool:
    """Whether a name read from a file is none of a published file: it leads out of the folder, or into its state."""
    if not isinstance(name, str) or "\0" in name:
        return True
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or not path.parts or path.parts[0] == STATE_FOLDER


def _shard_fields(shard: ShardRecord) -> dict[str, Any]:
    return {
        "key": shard.key,
        "rewritten": shard.rewritten,
        "tensors": dict(shard.tensors),
        "sources": dict(shard.sources),
    }


def manifest_algorithms(file_algorithm: str) -> dict[str, str]:
    return {"tensor": TENSOR_ALGORITHM, "file": file_algorithm}
