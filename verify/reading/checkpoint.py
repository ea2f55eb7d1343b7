"""A checkpoint opened: its headers, index, config and manifest, read once and within bounds, faults gathered.

Every question begins here. What can't be read is a finding and left out, so that the rest is still judged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from shardmill.verify.reading import bounded_json
from shardmill.verify.reading.bounded_json import BadJsonError
from shardmill.verify.reading.declarations import DECLARATIONS, configs_differ, declarations_in
from shardmill.verify.reading.header import LENGTH_BYTES, Header, Tensor, header_length, parse_header
from shardmill.verify.reading.manifest import MANIFEST, Manifest, parse_manifest
from shardmill.verify.reading.source import Source, read
from shardmill.verify.reading.what_it_is import HEAD_BYTES, text_of, what_it_is
from shardmill.verify.rules.findings import Finding, Report, UnreadableError

INDEX = "model.safetensors.index.json"
INDEX_SUFFIX = ".safetensors.index.json"
SUFFIX = ".safetensors"
ONE_FILE = "model.safetensors"
# Mistral's own names beside transformers', and the variants of `save_pretrained(variant=...)`.
_COPY = re.compile(
    r"(consolidated([.-]\d{1,5}(-of-\d{1,5})?)?|model\.(fp16|bf16|fp32)(-\d{1,5}-of-\d{1,5})?)\.safetensors$"
)
TENSORS_MAX = 600_000  # of a whole checkpoint
HEADERS_BYTES_MAX = 64 << 20  # of a whole checkpoint: three times those of 150,000 tensors
FILES_MAX = 20_000  # that an index names
MANIFEST_BYTES_MAX = 40 << 20


class Index(NamedTuple):
    file: str
    weight_map: dict[str, str]  # tensor -> file, paths that leave the folder left out
    total_size: int | None


@dataclass(slots=True)
class Checkpoint:
    """What a folder says about itself. `tensors` holds each name once, where the index says if it says."""

    source: Source
    files: dict[str, int]  # path -> bytes
    headers: dict[str, Header] = field(default_factory=dict)
    index: Index | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    quantization: dict[str, Any] = field(default_factory=dict)  # the config's quantization_config
    manifest: Manifest | None = None
    elsewhere: set[str] = field(default_factory=set)  # of a parent: what a checkpoint gave that is not here
    copies: frozenset[str] = frozenset()  # files of the same weights in another form, which are not judged

    def readable(self, tensor: Tensor) -> bool:
        return self.headers[tensor.file].sound

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors.values())


def open_checkpoint(source: Source, report: Report) -> Checkpoint:
    """Reads headers, index, config and manifest; adds what is wrong with each of them to `report`."""
    checkpoint = Checkpoint(source, source.files())
    report.add(*source.findings())
    checkpoint.index = _read_index(checkpoint, report)
    checkpoint.copies = _copies(checkpoint)
    if checkpoint.copies:
        named = (
            f"{min(checkpoint.copies)} holds the same weights in another form, which the index does not name"
        )
        report.leaves_out(f"{len(checkpoint.copies):,} files beside the model", named)
    left = Left(TENSORS_MAX, HEADERS_BYTES_MAX)
    for file in _shard_files(checkpoint):
        header = _read_header(checkpoint, file, left, report)
        if header is not None:
            checkpoint.headers[file] = header
    checkpoint.tensors = _by_name(checkpoint)
    checkpoint.config = _read_object(checkpoint, "config.json", report)
    checkpoint.quantization = _quantization(checkpoint, report)
    checkpoint.manifest = _read_manifest(checkpoint, report)
    report.checks("structure")
    return checkpoint


def is_plain_path(path: str) -> bool:
    """Whether a path from an index or manifest stays in the folder and is one that a file can have."""
    if not path or "\\" in path or "\0" in path or not path.isprintable() or len(path) > 512:
        return False
    parts = PurePosixPath(path).parts
    return not path.startswith("/") and ".." not in parts and str(PurePosixPath(path)) == path


def _read_whole(checkpoint: Checkpoint, file: str, bytes_max: int) -> bytes:
    size = checkpoint.files[file]
    if size > bytes_max:
        raise BadJsonError(f"{size:,} bytes where at most {bytes_max:,} are read")
    return read(checkpoint.source, file, 0, size)


def _read_object(checkpoint: Checkpoint, file: str, report: Report) -> dict[str, Any]:
    if file not in checkpoint.files:
        return {}
    try:
        value = bounded_json.loads(_read_whole(checkpoint, file, bounded_json.BYTES_MAX), constants=True)
        if isinstance(value, dict):
            return value
        report.add(Finding("config-json", file, "", "an object", type(value).__name__))
    except BadJsonError as error:
        what = _what(checkpoint, file)
        report.add(
            Finding("not-the-file", file, "", "JSON", what)
            if what
            else Finding("config-json", file, "", "JSON", str(error))
        )
    except UnreadableError as error:
        report.add(error.finding)
    return {}


def _quantization(checkpoint: Checkpoint, report: Report) -> dict[str, Any]:
    """The quantization_config, at the top or in a part of config.json, else that of hf_quant_config.json."""
    legacy = _read_object(checkpoint, "hf_quant_config.json", report).get("quantization")
    found = next(declarations_in(checkpoint.config), ("", None))[1]
    for key in DECLARATIONS:
        value = checkpoint.config.get(key)
        if value is not None and not isinstance(value, dict):
            report.add(Finding("config-json", "config.json", "", f"{key} as an object", repr(value)[:80]))
    if isinstance(found, dict):
        if isinstance(legacy, dict):
            report.add(*configs_differ(found, legacy))
        return found
    return {"quant_method": "modelopt", **legacy} if isinstance(legacy, dict) else {}


def _read_manifest(checkpoint: Checkpoint, report: Report) -> Manifest | None:
    if MANIFEST not in checkpoint.files:
        return None
    try:
        manifest, findings = parse_manifest(_read_whole(checkpoint, MANIFEST, MANIFEST_BYTES_MAX))
    except BadJsonError as error:
        manifest, findings = None, [Finding("manifest-json", MANIFEST, "", "JSON", str(error))]
    except UnreadableError as error:
        manifest, findings = None, [error.finding]
    report.add(*findings)
    return manifest


def _read_index(checkpoint: Checkpoint, report: Report) -> Index | None:
    found = [file for file in checkpoint.files if file.endswith(INDEX_SUFFIX) and "/" not in file]
    alone = (
        len(found) == 1 and "model.safetensors" not in checkpoint.files
    )  # else it is a variant's, or left over
    file = INDEX if INDEX in found else found[0] if alone else None
    if file is None:
        return None
    try:
        value = bounded_json.loads(_read_whole(checkpoint, file, bounded_json.BYTES_MAX))
    except BadJsonError as error:
        what = _what(checkpoint, file)
        report.add(
            Finding("not-the-file", file, "", "JSON", what)
            if what
            else Finding("index-json", file, "", "JSON", str(error))
        )
        return None
    except UnreadableError as error:
        report.add(error.finding)
        return None
    return _index(file, value, report)


def _index(file: str, value: Any, report: Report) -> Index | None:
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        report.add(Finding("index-json", file, "", "weight_map: names to files", repr(weight_map)[:80]))
        return None
    paths = set(weight_map.values())
    if len(paths) > FILES_MAX:
        report.add(Finding("index-json", file, "", f"at most {FILES_MAX:,} files", f"{len(paths):,}"))
        return None
    plain = {path for path in paths if is_plain_path(path)}
    for path in sorted(paths - plain):
        report.add(Finding("index-path", file, "", "a plain file name", ascii(path[:200])))
    return Index(
        file,
        {name: shard for name, shard in weight_map.items() if shard in plain},
        _total_size(file, value.get("metadata"), report),
    )


def _total_size(file: str, metadata: Any, report: Report) -> int | None:
    if metadata is not None and not isinstance(metadata, dict):
        report.add(Finding("index-json", file, "", "metadata as an object", repr(metadata)[:80]))
        return None
    total = (metadata or {}).get("total_size")
    if total is None:
        report.add(Finding("no-total-size", file))
        return None
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    if type(total) is not int or total < 0:
        report.add(Finding("index-json", file, "", "total_size as a count of bytes", repr(total)[:80]))
        return None
    return total


def _copies(checkpoint: Checkpoint) -> frozenset[str]:
    """Publishers put a copy for another loader, or in another dtype, beside the model; a child of ours has none."""
    if MANIFEST in checkpoint.files:
        return frozenset()
    named = set(checkpoint.index.weight_map.values()) if checkpoint.index is not None else set[str]()
    if not named & checkpoint.files.keys() and ONE_FILE not in checkpoint.files:
        return frozenset()
    return frozenset(file for file in checkpoint.files if _COPY.match(file) and file not in named)


def _shard_files(checkpoint: Checkpoint) -> list[str]:
    """Files with a header to read: those at the top, and those the index or one-file form names."""
    named = set(checkpoint.index.weight_map.values()) if checkpoint.index else set()
    top = {file for file in checkpoint.files if file.endswith(SUFFIX) and "/" not in file}
    return sorted((top - checkpoint.copies) | (named & set(checkpoint.files)))


@dataclass(slots=True)
class Left:
    """What may still be read of all headers together."""

    tensors: int
    bytes: int


def _read_header(checkpoint: Checkpoint, file: str, left: Left, report: Report) -> Header | None:
    size = checkpoint.files[file]
    try:
        length = header_length(file, read(checkpoint.source, file, 0, min(LENGTH_BYTES, size)), size)
        if length > left.bytes:
            limit = f"at most {HEADERS_BYTES_MAX:,} bytes of headers in all files"
            raise UnreadableError(Finding("header-limit", file, "", limit, "more"))
        text = read(checkpoint.source, file, LENGTH_BYTES, LENGTH_BYTES + length)
        header = parse_header(file, text, size)
        left.tensors, left.bytes = left.tensors - len(header.tensors), left.bytes - length
        if left.tensors < 0:
            limit = f"at most {TENSORS_MAX:,} tensors in all files"
            raise UnreadableError(Finding("header-limit", file, "", limit, "more"))
    except UnreadableError as error:
        what = _what(checkpoint, file, text=True) if error.finding.rule.id < "SM014" else ""
        report.add(Finding("not-the-file", file, "", "a safetensors file", what) if what else error.finding)
        return None
    report.add(*header.findings)
    return header


def _what(checkpoint: Checkpoint, file: str, text: bool = False) -> str:
    """What stands in place of a safetensors file, where its first bytes say it."""
    try:
        size = checkpoint.files[file]
        if not size:
            return "an empty file"
        head = read(checkpoint.source, file, 0, min(size, HEAD_BYTES))
        return what_it_is(head) or (text_of(head) if text else "")
    except UnreadableError:
        return ""


def _by_name(checkpoint: Checkpoint) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    placed = checkpoint.index.weight_map if checkpoint.index else {}
    for file, header in checkpoint.headers.items():
        for tensor in header.tensors:
            if tensor.name not in tensors or placed.get(tensor.name) == file:
                tensors[tensor.name] = tensor
    return tensors
