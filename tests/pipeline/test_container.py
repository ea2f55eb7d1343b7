"""The safetensors container: its law, the library as an oracle, and a zoo of hostile headers."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from shardmill.pipeline.container.header import header_bytes, lay_out, parse_header, read_header
from shardmill.pipeline.container.header_text import LARGE_BYTES
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.types import DTYPE_BITS, DTYPE_RANK, Header
from tests.pipeline.parents import LIBRARY_NAMES, library_bytes

CHARACTERS = st.characters(blacklist_categories=("Cs",))
NAMES = st.text(CHARACTERS, min_size=0, max_size=8).filter(lambda name: name != "__metadata__")
METADATA = st.dictionaries(st.text(CHARACTERS, max_size=5), st.text(CHARACTERS, max_size=5), max_size=3)


@st.composite
def tensors(draw: st.DrawFn, dtypes: list[str]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> (dtype, shape, data): 0-d, empty and odd shapes, any names."""
    found = {}
    for name in draw(st.lists(NAMES, unique=True, max_size=6)):
        dtype = draw(st.sampled_from(dtypes))
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        if dtype in ("F4", "F6_E2M3", "F6_E3M2"):
            shape = (*shape, 4 * draw(st.integers(0, 2)))
        bits = DTYPE_BITS[dtype] * prod(shape)
        found[name] = (dtype, shape, draw(st.binary(min_size=bits // 8, max_size=bits // 8)))
    return found


def ours(held: dict[str, tuple[str, tuple[int, ...], bytes]], metadata: dict[str, str]) -> bytes:
    header = lay_out([(name, dtype, shape) for name, (dtype, shape, _) in held.items()], "s", metadata)
    return header_bytes(header) + b"".join(held[ref.name][2] for ref in header.tensors)


@given(tensors(list(LIBRARY_NAMES)), st.sampled_from([{}, {"format": "pt"}, {'"\\\n\x1f\x7f☃': "é\u2028"}]))
def test_our_bytes_are_those_that_the_library_writes(
    held: dict[str, tuple[str, tuple[int, ...], bytes]], metadata: dict[str, str]
) -> None:
    """For every dtype, name and shape that it can write, with one metadata key at most (with two it is random)."""
    assert ours(held, metadata) == library_bytes(held, metadata)


@given(tensors(list(DTYPE_BITS)), METADATA)
def test_a_header_parsed_from_its_own_bytes_is_the_same_header(
    held: dict[str, tuple[str, tuple[int, ...], bytes]], metadata: dict[str, str]
) -> None:
    """parse_header(header_bytes(h)) == h, digests and place of the data included."""
    header = lay_out([(name, dtype, shape) for name, (dtype, shape, _) in held.items()], "s", metadata)
    data = header_bytes(header)
    assert int.from_bytes(data[:8], "little") == len(data) - 8 == header.data_begin - 8
    assert header.data_begin % 8 == 0
    assert parse_header(data[8:], "s") == header


@given(tensors(list(LIBRARY_NAMES)), METADATA)
def test_the_library_reads_what_we_write(
    held: dict[str, tuple[str, tuple[int, ...], bytes]], metadata: dict[str, str]
) -> None:
    found = {
        name: (view["dtype"], tuple(view["shape"]), bytes(view["data"]))
        for name, view in deserialize(ours(held, metadata))
    }
    assert found == held


def test_the_order_of_dtypes_is_the_librarys() -> None:
    """One tensor of each dtype, named against the order: the library lays them out by descending rank."""
    order = sorted(LIBRARY_NAMES, key=lambda dtype: DTYPE_RANK[dtype])
    held = {f"{place:02d}": (dtype, (2,), bytes(DTYPE_BITS[dtype] // 4)) for place, dtype in enumerate(order)}
    data = library_bytes(held)
    entries = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert [entry["dtype"] for entry in entries.values()] == order[::-1]


def test_data_stay_aligned_to_their_elements() -> None:
    """Whatever the mix, each tensor begins at a multiple of its element's bytes."""
    header = lay_out([(f"{i}{dtype}", dtype, (4 * i,)) for i in range(3) for dtype in DTYPE_BITS], "s", {})
    for ref in header.tensors:
        assert (header.data_begin + ref.begin) % max(1, DTYPE_BITS[ref.dtype] // 8) == 0


def entry(begin: Any = 0, end: Any = 4, dtype: Any = "U8", shape: Any = (4,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def framed(text: bytes, data: bytes = bytes(4)) -> bytes:
    return len(text).to_bytes(8, "little") + text + data


def header_of(**entries: Any) -> bytes:
    return json.dumps(entries).encode()


ZOO: dict[str, tuple[bytes, str]] = {
    "no bytes at all": (b"", "too few"),
    "seven bytes": (bytes(7), "too few"),
    "a length beyond the file": (framed(header_of(a=entry()))[:40], "claims"),
    "a length of 2^64 - 1": (b"\xff" * 8 + b"{}", "claims"),
    "an empty header": (framed(b""), "no safetensors file"),
    "no JSON": (framed(b"PK\x03\x04xxxx"), "must begin with"),
    "a byte order mark": (framed(b"\xef\xbb\xbf" + header_of(a=entry())), "must begin with"),
    "UTF-16": (framed(header_of(a=entry()).decode().encode("utf-16")), "must begin with"),
    "UTF-16 without a mark": (framed(header_of(a=entry()).decode().encode("utf-16-le")), "not valid"),
    "bytes that are no UTF-8": (framed(b'{"\xff":1}'), "not valid"),
    "a lone surrogate in a name": (framed(b'{"\\ud800":' + header_of(a=entry())[6:]), "surrogate"),
    "a lone surrogate in the metadata": (framed(b'{"__metadata__":{"a":"\\udfff"}}', b""), "surrogate"),
    "leading space": (framed(b"  " + header_of(a=entry())), "must begin with"),
    "an array": (framed(b"[]"), "must begin with"),
    "text after the object": (framed(header_of(a=entry()) + b"x"), "not valid JSON"),
    "deep nesting": (framed(b'{"a":' * 100_000), "not valid JSON"),
    "a key that stands twice": (framed(b'{"a":1,"a":2}'), "is there twice"),
    "a dtype that stands twice": (
        framed(b'{"a":{"dtype":"U8","dtype":"I8"}}'),
        "is there twice",
    ),
    "metadata that is no object": (framed(header_of(__metadata__=[1])), "__metadata__"),
    "metadata with a number": (framed(header_of(__metadata__={"a": 1})), "__metadata__"),
    "an entry that is no object": (framed(header_of(a=3)), "must hold exactly"),
    "an entry that is a list": (framed(header_of(a=[])), "must hold exactly"),
    "an entry that is null": (framed(header_of(a=None)), "must hold exactly"),
    "an entry without a dtype": (
        framed(header_of(a={"shape": [4], "data_offsets": [0, 4]})),
        "must hold exactly",
    ),
    "an entry with a fourth key": (framed(header_of(a={**entry(), "x": 1})), "must hold exactly"),
    "three offsets": (framed(header_of(a={**entry(), "data_offsets": [0, 2, 4]})), "must hold exactly"),
    "offsets that are text": (framed(header_of(a={**entry(), "data_offsets": "04"})), "must hold exactly"),
    "a shape that is text": (framed(header_of(a=entry(0, 1, shape="")), bytes(1)), "must hold exactly"),
    "a shape that is an object": (framed(header_of(a=entry(0, 1, shape={})), bytes(1)), "must hold exactly"),
    "a negative offset": (framed(header_of(a=entry(-4, 0))), "must hold exactly"),
    "a fractional offset": (framed(header_of(a=entry(0, 4.0))), "must hold exactly"),
    "an offset that is true": (
        framed(header_of(a=entry(False, True, shape=[1])), bytes(1)),
        "must hold exactly",
    ),
    "an offset of NaN": (framed(header_of(a=entry(0, float("nan")))), "must hold exactly"),
    "a negative side": (framed(header_of(a=entry(0, 4, shape=[-2, -2]))), "must hold exactly"),
    "a side beyond 64 bits": (framed(header_of(a=entry(0, 0, shape=[0, 1 << 64])), b""), "must hold exactly"),
    "a number of 5,000 digits": (
        framed(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b"]}}"),
        "not valid JSON",
    ),
    "a side with a leading zero": (
        framed(b'{"a":{"dtype":"U8","shape":[04],"data_offsets":[0,4]}}'),
        "not valid",
    ),
    "an offset with a leading zero": (
        framed(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,04]}}'),
        "not valid",
    ),
    "a shape with an empty side": (
        framed(b'{"a":{"dtype":"U8","shape":[4,,1],"data_offsets":[0,4]}}'),
        "not valid",
    ),
    "no comma between tensors": (
        framed(
            b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]} "b":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}}'
        ),
        "not valid",
    ),
    "an unknown dtype": (framed(header_of(a=entry(dtype="Q4"))), "not one that safetensors knows"),
    "a dtype that is a list": (framed(header_of(a=entry(dtype=["U8"]))), "not one that safetensors knows"),
    "half a byte": (framed(header_of(a=entry(0, 1, dtype="F4", shape=[1])), bytes(1)), "ends inside a byte"),
    "offsets that the shape contradicts": (framed(header_of(a=entry(0, 4, shape=[3]))), "takes 3 bytes"),
    "offsets in reverse": (framed(header_of(a=entry(4, 0))), "takes 4 bytes"),
    "an overlap": (framed(header_of(a=entry(), b=entry(2, 6)), bytes(6)), "overlap"),
    "two tensors in one place": (framed(header_of(a=entry(), b=entry())), "overlap"),
    "a hole": (framed(header_of(a=entry(), b=entry(6, 10)), bytes(10)), "hole"),
    "a hole at the start": (framed(header_of(a=entry(4, 8)), bytes(8)), "hole"),
    "a file cut short": (framed(header_of(a=entry()), bytes(3)), "truncated"),
    "bytes after the data": (framed(header_of(a=entry()), bytes(5)), "no tensor owns"),
}


@pytest.mark.parametrize("kind", ZOO)
def test_a_hostile_header_is_refused_in_one_sentence(kind: str, tmp_path: Path) -> None:
    """Whatever a file holds, the answer is one line that names it, never a traceback."""
    data, words = ZOO[kind]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as refused:
        read_header(path, "x.safetensors")
    message = str(refused.value)
    assert words in message
    assert message.startswith("x.safetensors: ")
    assert "\n" not in message
    assert len(message) < 1000


STRICTER = {
    "an entry with a fourth key",
    "leading space",
}  # the format forbids them, the library lets them pass


@pytest.mark.parametrize("kind", sorted(ZOO.keys() - STRICTER))
def test_what_we_refuse_the_library_refuses(kind: str) -> None:
    with pytest.raises(SafetensorError):
        deserialize(ZOO[kind][0])


def test_a_header_bomb_is_refused_quickly() -> None:
    """A hundred thousand names of which the last stands twice cost one pass."""
    text = ",".join(f'"{place}":1' for place in [*range(100_000), 99_999])
    with pytest.raises(CheckpointError, match="'99999' is there twice"):
        parse_header(b"{" + text.encode() + b"}", "s")


BOMBS = {
    "empty lists": b'{"a":[' + b"[]," * 700_000 + b"[]]}",
    "empty objects": b"{" + b",".join(b'"%d":{}' % place for place in range(200_000)) + b"}",
    "strings": b"{" + b",".join(b'"%d":""' % place for place in range(200_000)) + b"}",
    "metadata": b'{"__metadata__":{' + b",".join(b'"%d":""' % place for place in range(200_000)) + b"}}",
    "a shape": b'{"a":{"dtype":"U8","shape":[1' + b",1" * 1_000_000 + b'],"data_offsets":[0,1]}}',
    "a string without an end": b'{"a' + b"[" * 2_000_000,
    "escapes": b'{"' + b"\\n" * 1_000_000 + b'":' + b"[" * 200_000,
}


@pytest.mark.parametrize("kind", sorted(BOMBS))
def test_a_bomb_is_not_read_as_json(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large text that can be no table of tensors is counted through and refused; no object is made of it."""
    assert len(BOMBS[kind]) > LARGE_BYTES
    monkeypatch.setattr("json.loads", None)
    with pytest.raises(CheckpointError, match="its header is no table of tensors"):
        parse_header(BOMBS[kind], "s")


def test_a_large_header_in_another_form_is_read() -> None:
    """Spaces, escapes and another order of keys change nothing, whatever the size."""
    names = [f"layers.{place}.é" for place in range(15_000)]
    usual = header_bytes(lay_out([(name, "U8", (2, 3)) for name in names], "s", {"a": '[{"}]'}))[8:]
    other = json.dumps(
        {name: dict(reversed(value.items())) for name, value in json.loads(usual).items()}, indent=1
    ).encode()
    assert min(len(usual), len(other)) > LARGE_BYTES
    first, second = parse_header(usual, "s"), parse_header(other, "s")
    assert (first.tensors, first.metadata) == (second.tensors, second.metadata)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"x\.safetensors: cannot be read"):
        read_header(tmp_path / "nowhere", "x.safetensors")


def test_a_hole_cannot_be_born() -> None:
    """A Header whose tensors do not tile the data does not exist, wherever it comes from."""
    header = lay_out([("a", "U8", (4,)), ("b", "U8", (4,))], "s", {})
    with pytest.raises(CheckpointError, match="a hole"):
        Header("s", header.tensors[1:], {}, 8)
