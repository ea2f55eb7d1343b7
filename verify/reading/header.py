"""The judge's own reader of safetensors headers: bounded, and at least as strict as the library.

Layout of a file: u64 little-endian N, N bytes of JSON, then data that the tensors tile without hole or overlap.
What the library refuses is refused here (tests feed both). Refused here alone: duplicate names, names that are
empty, hold control characters or look like paths, bytes before the opening brace, absurd sizes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import prod
from operator import attrgetter
from typing import NamedTuple

from shardmill.verify.reading.header_scan import DIMS_MAX, METADATA, U64, RawTensor, Scan, sizes_of
from shardmill.verify.rules.findings import Finding, UnreadableError

LENGTH_BYTES = 8
HEADER_BYTES_MAX = (
    64 << 20
)  # three times all headers of a checkpoint of 150,000 tensors; the library allows 100 MB
TENSORS_MAX = 300_000  # of one file
SIZES_MAX = 1_000  # kinds of entries of one file that are remembered

Sized = tuple[str, tuple[int, ...], int]

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


class Header(NamedTuple):
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
    entries = _Entries(file, scan, data_begin)
    metadata: dict[str, str] = {}
    while (name := scan.key()) is not None:
        if name == METADATA:
            entries.name(name)
            metadata = scan.metadata()
        else:
            entries.keep(scan.entry(name))
        entries.keep_plain()
    tensors = sorted(entries.tensors, key=attrgetter("begin", "end"))
    findings = (*entries.findings, *_tiling_faults(file, tensors, data_begin, file_bytes))
    return Header(file, tuple(tensors), metadata, data_begin, findings)


class _Entries:
    """The entries of one header as they are read, and what is wrong with each."""

    def __init__(self, file: str, scan: Scan, data_begin: int) -> None:
        self.tensors: list[Tensor] = []
        self.findings: list[Finding] = []
        self._file, self._scan, self._data_begin = file, scan, data_begin
        self._names: set[str] = set()
        self._sizes: dict[tuple[str, str], Sized] = {}  # dtype and dimensions as written: few in a file

    def name(self, name: str) -> None:
        if name in self._names:
            self.findings.append(Finding("header-duplicate", self._file, name, "one entry", "two"))
        self._names.add(name)

    def keep(self, raw: RawTensor) -> None:
        self.name(raw.name)
        if not _ordinary(raw):
            self.findings.extend(_entry_faults(self._file, raw))
        self._add(raw.name, raw.dtype, raw.shape, raw.begin, raw.end)

    def keep_plain(self) -> None:
        """The next entries as long as they are spelled as every writer spells them, as nearly all are."""
        scan, names, sizes = self._scan, self._names, self._sizes
        while (match := scan.plain_member()) is not None:
            name, dtype, dims, begin, end = match.groups()
            dtype, shape, size = sizes.get((dtype, dims)) or self._sized(dtype, dims)
            first, last = int(begin), int(end)
            if last - first == size and last < U64 and _ordinary_name(name) and name not in names:
                scan.at = match.end()
                names.add(name)
                self._add(name, dtype, shape, first, last)
            else:
                self.keep(scan.plain_entry(match))

    def _add(self, name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> None:
        self.tensors.append(
            Tensor(name, dtype, shape, self._file, self._data_begin + begin, self._data_begin + end)
        )
        if len(self.tensors) > TENSORS_MAX:
            raise self._scan.fault("header-limit", f"at most {TENSORS_MAX:,} tensors", "more")

    def _sized(self, dtype: str, dims: str) -> Sized:
        """(dtype, shape, bytes); no bytes where there is something to say of such an entry."""
        shape = sizes_of(dims)
        size = prod(shape) * DTYPE_BITS.get(dtype, 0) // 8 if len(shape) <= DIMS_MAX else 0
        sized = (dtype, shape, size if _ordinary(RawTensor("-", dtype, shape, 0, size, "")) else -1)
        if len(self._sizes) < SIZES_MAX:
            self._sizes[dtype, dims] = sized
        return sized


def _ordinary_name(name: str) -> bool:
    return name.isprintable() and name[:1] not in ("", "/", "\\") and ".." not in name


def _ordinary(raw: RawTensor) -> bool:
    """Whether `_entry_faults` has nothing to say, which holds of nearly all entries."""
    span = raw.end - raw.begin
    return (
        _ordinary_name(raw.name)
        and not raw.extra
        and 0 < span < U64 >> 3
        and len(raw.shape) <= DIMS_MAX
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
