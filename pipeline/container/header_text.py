"""A header's text, read in one pass where it is written as the library writes it, and weighed before it is read if not.

JSON of a few bytes can take a hundred times as much memory once it is read: `[]` takes 64. So text that is large and
not in the usual form is first counted through: a table of tensors has two lists an object and few commas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import repeat
from sys import intern

from shardmill.pipeline.types import TensorRef

LARGE_BYTES = 1 << 20  # of a text that is counted through first
_DIMENSIONS = 64  # of a tensor, on average: more than any has
_METADATA_MAX = 100_000  # pairs

_NUMBER = r"(?:[1-9][0-9]{0,17}+|0)"  # below 2^63
_USUAL = re.compile(
    r'"([^"\\\x00-\x1f]*+)":\{"dtype":"([A-Z0-9_]++)","shape":\[([0-9,]*+)\],'
    rf'"data_offsets":\[({_NUMBER}),({_NUMBER})\]\}}([,}}])'
)
_SIDES = re.compile(rf"(?:{_NUMBER}(?:,{_NUMBER}){{0,63}}+)?")
_COLUMNS = _USUAL.groups + 1  # of what `split` makes: what stands before a match, then its groups
_METADATA = re.compile(r'\{"__metadata__":(\{(?:"[^"\\\x00-\x1f]*+":"[^"\\\x00-\x1f]*+",?){0,64}+\})([,}])')
_STRETCH = re.compile(rb'([^"]*+)(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|\Z)', re.S)


def usual_tensors(text: str, shard: str) -> tuple[list[TensorRef], Mapping[str, str]] | None:
    """The tensors in their order and the metadata; None where the text is not in the usual form to its end."""
    head = _METADATA.match(text)
    metadata = json.loads(head[1]) if head else {}
    parts = _USUAL.split(text[head.end() if head else 1 :])
    between, names, dtypes, sides, begins, ends, after = (parts[place::_COLUMNS] for place in range(_COLUMNS))
    closed = [*(head[2] if head else ""), *after]
    if "".join(between).strip(" ") or any(between[:-1]) or closed[-1:] != ["}"] or "}" in closed[:-1]:
        return None
    written = set(sides)  # a checkpoint has few shapes
    if not all(map(_SIDES.fullmatch, written)):
        return None
    shapes = {each: tuple(map(int, each.split(","))) if each else () for each in written}
    refs = map(
        TensorRef,
        names,
        map(intern, dtypes),
        map(shapes.__getitem__, sides),
        repeat(shard),
        map(int, begins),
        map(int, ends),
    )
    once = set(names)
    return (list(refs), metadata) if len(once) == len(names) and "__metadata__" not in once else None


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
