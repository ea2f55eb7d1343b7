"""A header's text, read in one pass where it is written as the library writes it, and weighed before it is read if not.

JSON of a few bytes can take a hundred times as much memory once it is read: `[]` takes 64. So text that is large and
not in the usual form is first counted through: a table of tensors has two lists an object and few commas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from shardmill.pipeline.types import Shape

LARGE_BYTES = 1 << 20  # of a text that is counted through first
_DIMENSIONS = 64  # of a tensor, on average: more than any has
_METADATA_MAX = 100_000  # pairs

Entry = tuple[str, str, Shape, int, int]  # name, dtype, shape, begin, end

_NUMBER = rb"(?:0|[1-9][0-9]{0,17})"  # below 2^63
_USUAL = re.compile(
    rb'"([^"\\\x00-\x1f]*+)":\{"dtype":"([A-Z0-9_]++)","shape":\[((?:%b(?:,%b){0,63}+)?)\],'
    rb'"data_offsets":\[(%b),(%b)\]\}([,}])' % ((_NUMBER,) * 4)
)
_METADATA = re.compile(rb'\{"__metadata__":(\{(?:"[^"\\\x00-\x1f]*+":"[^"\\\x00-\x1f]*+",?){0,64}+\})([,}])')
_STRETCH = re.compile(rb'([^"]*+)(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|\Z)', re.S)


def usual_entries(text: bytes) -> tuple[list[Entry], Mapping[str, str]] | None:
    """The entries in their order and the metadata; None where the text is not in the usual form to its end."""
    head = _METADATA.match(text)
    metadata = json.loads(head[1]) if head else {}
    end = head.end() if head else 1
    entries: list[Entry] = []
    closed = bool(head and head[2] == b"}")
    shapes: dict[bytes, Shape] = {}
    for match in _matches(_USUAL, text, end):
        name, dtype, sides, first, last, after = match.groups()
        shape = shapes.get(sides)
        if shape is None:
            shape = shapes[sides] = tuple(map(int, sides.split(b","))) if sides else ()
        entries.append((name.decode(), dtype.decode(), shape, int(first), int(last)))
        if after == b"}":
            closed, end = True, match.end()
            break
    if not closed or text[end:].strip(b" ") or text[:1] != b"{":
        return None
    names = {entry[0] for entry in entries}
    return (entries, metadata) if len(names) == len(entries) and "__metadata__" not in names else None


def why_no_table(text: bytes) -> str | None:
    """Why a large text can be no table of tensors, found without reading it as JSON; None where it may be one."""
    objects = lists = commas = seen = 0
    for plain, end in _stretches(text):
        seen = end
        objects, lists, commas = (
            objects + plain.count(b"{"),
            lists + plain.count(b"["),
            commas + plain.count(b","),
        )
        tensors = max(0, objects - 1)
        if lists > 2 * tensors or commas > _METADATA_MAX + (4 + _DIMENSIONS) * tensors:
            return f"it has {lists} lists and {commas} commas for {tensors} objects"
        if lists < 2 * (tensors - 2):
            return f"it has {tensors} objects and {lists} lists; a tensor has two"
    if seen < len(text):
        return f"a string after byte {seen} has no end"
    return None


def _stretches(text: bytes) -> Iterator[tuple[bytes, int]]:
    """(what stands before a string, where that string ends), to the end of the text."""
    for match in _matches(_STRETCH, text, 0):
        yield match[1], match.end()
        if match.end() == len(text):
            return


def _matches(pattern: re.Pattern[bytes], text: bytes, begin: int) -> Iterator[re.Match[bytes]]:
    """Matches that follow one another without a gap, from `begin` on; as re.Scanner has them."""
    return iter(pattern.scanner(text, begin).match, None)  # type: ignore[attr-defined]
