"""Names that differ in numbers alone, and the globs that say exactly a set of them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from shardmill.pipeline.recipe.globs import fold

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

# The order in which a person names them; others follow by name.
_ORDER = [f"{part}_proj" for part in ("q", "k", "v", "b", "f_a", "g_a", "q_a", "gate", "up", "down")] + [
    "weight",
    "weight_scale",
    "weight_scale_inv",
    "bias",
]


def numbers(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in _NUMBER.findall(name))


def by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    """Folded name -> the names that fold to it."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found[fold(name)].append(name)
    return found


def globs_for(chosen: Iterable[str], patterns: Mapping[str, list[str]]) -> list[str]:
    """Globs that match `chosen` and none of the other names in `patterns`; few, and as a person would write them."""
    exact: list[str] = []
    for pattern, names in by_pattern(chosen).items():
        inside = set(names)
        exact += _exact(pattern, names, [name for name in patterns[pattern] if name not in inside])
    return sorted(_braced(exact))


def _exact(pattern: str, names: list[str], others: list[str]) -> list[str]:
    """Globs for `names`, which share `pattern` with `others`: distinguished by a number, or one by one."""
    if not others:
        return [pattern]
    inside, outside = [numbers(name) for name in names], [numbers(name) for name in others]
    for place in range(len(inside[0])):
        values = {found[place] for found in inside}
        if not values & {found[place] for found in outside}:
            return [_with_choice(pattern, place, sorted(values))]
    return names


def _with_choice(pattern: str, place: int, values: list[int]) -> str:
    parts = pattern.split(".")
    at = [i for i, part in enumerate(parts) if part == "*"][place]
    parts[at] = str(values[0]) if len(values) == 1 else "{" + ",".join(map(str, values)) + "}"
    return ".".join(parts)


def _braced(globs: list[str]) -> list[str]:
    """Globs that differ in one dotted part become one with a choice; the last part that varies goes first."""
    longest = max((glob.count(".") for glob in globs), default=0)
    for back in range(1, longest + 2):
        groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for glob in globs:
            parts = glob.split(".")
            at = len(parts) - back
            if at < 0 or any(mark in parts[at] for mark in "*{"):
                groups[(glob,)].append(glob)
            else:
                groups[(*parts[:at], "\0", *parts[at + 1 :])].append(parts[at])
        globs = [
            key[0] if "\0" not in key else ".".join(key).replace("\0", _choice(parts))
            for key, parts in groups.items()
        ]
    return globs


def _choice(parts: list[str]) -> str:
    """`k_proj`, `q_proj` -> `{q,k}_proj`."""
    if len(parts) == 1:
        return parts[0]
    ordered = sorted(parts, key=lambda part: (_ORDER.index(part) if part in _ORDER else len(_ORDER), part))
    end = "_proj" if all(part.endswith("_proj") and part != "_proj" for part in parts) else ""
    return "{" + ",".join(part.removesuffix(end) for part in ordered) + "}" + end
