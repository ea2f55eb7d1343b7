"""The judge's own reader of safetensors headers: bounded, and at least as strict as the library.

Layout of a file: u64 little-endian N, N bytes of JSON, then data that the tensors tile without hole or overlap.
What the library refuses is refused here (tests feed both). Refused here alone: duplicate names, names that are
empty, hold control characters or look like paths, bytes before the opening brace, absurd sizes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from shardmill.verify.reading.header_scan import METADATA, U64, RawTensor, Scan
from shardmill.verify.rules.findings import Finding, UnreadableError

LENGTH_BYTES = 8
HEADER_BYTES_MAX = (
    64 << 20
)  # three times all headers of a checkpoint of 150,000 tensors; the library allows 100 MB
TENSORS_MAX = 300_000  # of one file

# Bits of an element, as the library defines them.
DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
    "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


class Tensor(NamedTuple):
    """One tensor of a file: `begin` and `end` are bytes from the start of the *file*."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.begin

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors of one file in the order of their bytes. If not `sound`, its data must not be interpreted."""

    file: str
    tensors: tuple[Tensor, ...]
    metadata: dict[str, str]
    data_begin: int
    findings: tuple[Finding, ...]

    @property
    def sound(self) -> bool:
        return not any(finding.severity == "error" for finding in self.findings)


def header_length(file: str, head: bytes, file_bytes: int) -> int:
    """N, from the first 8 bytes of a file. Raises UnreadableError when the file can't hold such a header."""
    if len(head) < LENGTH_BYTES:
        raise UnreadableError(
            Finding("header-length", file, "", f"{LENGTH_BYTES} bytes or more", f"{file_bytes} bytes")
        )
    length = int(struct.unpack("<Q", head[:LENGTH_BYTES])[0])
    room = file_bytes - LENGTH_BYTES
    if length > room:
        raise UnreadableError(
            Finding("header-length", file, "", f"a header of at most {room:,} bytes", f"{length:,}")
        )
    if length > HEADER_BYTES_MAX:
        limit = f"a header of at most {HEADER_BYTES_MAX:,} bytes"
        raise UnreadableError(Finding("header-limit", file, "", limit, f"{length:,}"))
    return length


def parse_header(file: str, header: bytes, file_bytes: int) -> Header:
    """The header of `file` from its JSON bytes. Raises UnreadableError where the JSON gives nothing to go on with."""
    try:
        scan = Scan(file, header.decode("utf-8"))
    except UnicodeDecodeError as error:
        got = f"byte 0x{header[error.start]:02x} at {error.start}"
        raise UnreadableError(Finding("header-json", file, "", "UTF-8", got)) from None
    data_begin = LENGTH_BYTES + len(header)
    findings: list[Finding] = []
    tensors: list[Tensor] = []
    metadata: dict[str, str] = {}
    names: set[str] = set()

    def keep(raw: RawTensor) -> None:
        if raw.name in names:
            findings.append(Finding("header-duplicate", file, raw.name, "one entry", "two"))
        names.add(raw.name)
        begin, end = data_begin + raw.begin, data_begin + raw.end
        tensors.append(Tensor(raw.name, raw.dtype, raw.shape, file, begin, end))
        if not _ordinary(raw):
            findings.extend(_entry_faults(file, raw))
        if len(tensors) > TENSORS_MAX:
            raise scan.fault("header-limit", f"at most {TENSORS_MAX:,} tensors", "more")

    while (name := scan.key()) is not None:
        if name == METADATA:
            if name in names:
                findings.append(Finding("header-duplicate", file, name, "one entry", "two"))
            names.add(name)
            metadata = scan.metadata()
        else:
            keep(scan.entry(name))
        for raw in scan.plain_members():
            keep(raw)
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    findings += _tiling_faults(file, tensors, data_begin, file_bytes)
    return Header(file, tuple(tensors), metadata, data_begin, tuple(findings))


def _ordinary(raw: RawTensor) -> bool:
    """Whether `_entry_faults` has nothing to say, which holds of nearly all entries."""
    name, span = raw.name, raw.end - raw.begin
    return (
        name.isprintable()
        and name[:1] not in ("", "/", "\\")
        and ".." not in name
        and not raw.extra
        and 0 < span < U64 >> 3
        and prod(raw.shape) * DTYPE_BITS.get(raw.dtype, 0) == 8 * span
    )


def _entry_faults(file: str, raw: RawTensor) -> Iterator[Finding]:
    name = raw.name
    if not name or not name.isprintable() or _leads_elsewhere(name):
        yield Finding("tensor-name", file, name, "a printable dotted name", ascii(name[:80]))
    if raw.extra:
        yield Finding("header-extra-field", file, name, "dtype, shape, data_offsets", raw.extra)
    if raw.dtype not in DTYPE_BITS:
        yield Finding("unknown-dtype", file, name, "a dtype of safetensors", raw.dtype)
        return
    elements = 1
    for dim in raw.shape:
        elements *= dim
        if elements >= U64:  # as the library: an overflow on the way counts, even if a later size is 0
            break
    bits, span = elements * DTYPE_BITS[raw.dtype], raw.end - raw.begin
    if bits == 8 * span and bits < U64:
        return
    said = f"{raw.dtype} {list(raw.shape)}"
    if bits >= U64:
        yield Finding("size-mismatch", file, name, "fewer than 2^64 bits", said)
    else:
        need = f"{bits / 8:,g} bytes" if bits % 8 else f"{bits // 8:,} bytes"
        yield Finding("size-mismatch", file, name, f"{need} for {said}", f"{span:,} bytes")


def _leads_elsewhere(name: str) -> bool:
    """Whether a name is a path from a root, or upwards, with slashes of either kind."""
    return name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/")


def _tiling_faults(file: str, tensors: list[Tensor], data_begin: int, file_bytes: int) -> Iterator[Finding]:
    place = data_begin
    for tensor in tensors:
        slug = "overlap" if tensor.begin < place else "hole" if tensor.begin > place else ""
        if slug:
            expected, got = place - data_begin, tensor.begin - data_begin
            yield Finding(slug, file, tensor.name, f"begin at byte {expected:,} of the data", f"byte {got:,}")
        place = max(place, tensor.end)
    if place > file_bytes:
        yield Finding("truncated-file", file, "", f"{place:,} bytes", f"{file_bytes:,} bytes")
    elif place < file_bytes:
        yield Finding("trailing-bytes", file, "", f"{place:,} bytes", f"{file_bytes:,} bytes")
