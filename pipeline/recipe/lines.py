"""Where a problem of a recipe is: the file, and the line of the table or key that it is about."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

Place = tuple[str | int, ...]  # e.g. ("family", 0, "block")

_HEAD = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")  # [table] or [[table]]
_KEY = re.compile(r"\s*[\"']?([\w-]+)[\"']?\s*=")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a table or key of a recipe was written: the file, its text, and the table's place among its like there."""

    path: Path
    text: str
    number: int = 0


def located(origin: Origin, place: Place, message: str) -> str:
    """`message` after the file, the line and the name of what is at `place`."""
    line = _line_of(origin.text, place)
    where = _spelled(origin.text, place)
    return f"{origin.path}{f':{line}' if line else ''}: {where + ': ' if where else ''}{message}"


def _spelled(text: str, place: Place) -> str:
    """("output", "profile") -> `output.profile`; ("family", 0, "block") -> `family 'attention': block`, by its name."""
    if len(place) > 1 and isinstance(place[1], int):
        tables = tomllib.loads(text).get(str(place[0]))
        table = tables[place[1]] if isinstance(tables, list) and place[1] < len(tables) else {}
        if isinstance(table, dict) and isinstance(name := table.get("name"), str):
            return ": ".join([f"{place[0]} {name!r}", ".".join(map(str, place[2:]))]).removesuffix(": ")
    return ".".join(map(str, place))


def _line_of(text: str, place: Place) -> int | None:
    """The line (from 1) of the deepest table or key on the way to `place` that the TOML's text shows."""
    lines: dict[Place, int] = {}
    table: Place = ()
    count = Counter[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if head := _HEAD.match(line):
            names = tuple(part.strip(" \t\"'") for part in head[2].split("."))
            table = (*names, count[head[2]]) if head[1] == "[[" else names
            count[head[2]] += head[1] == "[["
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault((*table, key[1]), number)
    return next((lines[place[:depth]] for depth in range(len(place), 0, -1) if place[:depth] in lines), None)
