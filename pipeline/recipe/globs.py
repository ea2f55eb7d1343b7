"""Globs over dotted names: `*` stands for one part, `**` for any number of parts, `{a,b}` for a choice.

`*` inside a part (`hc_*_fn`) stands for any characters but a dot. A set of globs is one lazily built automaton:
each step of a name costs one dictionary look-up whatever the number of globs, so 150,000 names take a moment.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import product
from math import prod

_BRACES = re.compile(r"\{([^{}]*)\}")
_WILDCARD = re.compile(r"\*+")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
Places = frozenset[tuple[int, int]]  # (glob, parts of it that are matched)

# A recipe is bounded like any other input: what one glob may ask for, far above what a model needs.
CHOICES_MAX = 4096  # names that its braces stand for
_ANY_PARTS_MAX = 4  # `**` in it
_STARS_MAX = 4  # `*` inside one part
_GLOB_CHARS_MAX = 4096


@lru_cache  # a recipe's globs are asked for at every module that may be fused
def expand(glob: str) -> tuple[str, ...]:
    """`a.{b,c}.d` -> (`a.b.d`, `a.c.d`). Raises ValueError where the braces don't pair or nest."""
    return tuple("".join(choice) for choice in product(*_choices(glob)))


def count(glob: str) -> int:
    """How many globs `glob` stands for. Raises ValueError as `expand` does, which need not be done for it."""
    return prod(map(len, _choices(glob)))


def _choices(glob: str) -> list[list[str]]:
    if len(glob) > _GLOB_CHARS_MAX:
        raise ValueError(f"a glob of {len(glob)} characters; {_GLOB_CHARS_MAX} is the limit, write several")
    pieces = _BRACES.split(glob)
    if any(brace in text for text in pieces for brace in "{}"):
        raise ValueError(f"unbalanced braces in {glob!r}")
    choices = [text.split(",") if i % 2 else [text] for i, text in enumerate(pieces)]
    if (whole := prod(map(len, choices))) > CHOICES_MAX:
        raise ValueError(f"the braces of {glob[:60]!r} stand for {whole} globs; {CHOICES_MAX} is the limit")
    _refuse_many_stars(glob)
    return choices


def _refuse_many_stars(glob: str) -> None:
    parts = glob.split(".")
    if parts.count("**") > _ANY_PARTS_MAX:
        raise ValueError(f"{glob[:60]!r} has {parts.count('**')} parts `**`; {_ANY_PARTS_MAX} is the limit")
    if (most := max(len(_WILDCARD.findall(part)) for part in parts)) > _STARS_MAX:
        raise ValueError(f"{glob[:60]!r} has a part with {most} wildcards; {_STARS_MAX} is the limit")


def captured(glob: str, name: str) -> tuple[str, ...] | None:
    """What the wildcards of an expanded glob stand for in `name`; None where it does not match. `**` may be ""."""
    match = _capturing(glob).fullmatch(name + ".")
    return tuple(value.removesuffix(".") for value in match.groups()) if match else None


@cache
def _capturing(glob: str) -> re.Pattern[str]:
    """Matches a name of which every part, the last one too, ends in a dot."""
    parts = (
        r"((?:[^.]*\.)*)" if part == "**" else "([^.]*)".join(map(re.escape, _WILDCARD.split(part))) + r"\."
        for part in glob.split(".")
    )
    return re.compile("".join(parts))


def filled(glob: str, values: Iterable[str]) -> str:
    """The glob with its wildcards replaced by `values`, in order; an empty `**` leaves no part.

    Law: filled(glob, captured(glob, name)) == name.
    """
    rest = iter(values)
    parts = ((part, _WILDCARD.sub(lambda _: next(rest), part)) for part in glob.split("."))
    return ".".join(name for part, name in parts if name or part != "**")


class GlobSet:
    """Many expanded globs, matched at once. A state is the set of places that a name has reached; each has a number."""

    def __init__(self, globs: Sequence[str]) -> None:
        self.globs = tuple(globs)
        self._parts = [glob.split(".") for glob in globs]
        self._patterns = [[_part_pattern(part) for part in parts] for parts in self._parts]
        self._numbers: dict[Places, int] = {}
        self._places: list[Places] = []
        self._steps: list[dict[str, int]] = []  # by state: part of a name -> next state
        self._accepted: list[list[int]] = []  # by state: globs that a name ending here matches
        self._homes: dict[str, int] = {}  # a name without its last part -> state; many names share one
        self._start = self._state((glob, 0) for glob in range(len(globs)))

    def matches(self, name: str) -> list[int]:
        """Places, in ascending order, of the globs that `name` matches."""
        return self.places((name,))[0]

    def places(self, names: Iterable[str]) -> list[list[int]]:
        """What each of `names` matches. Names that no glob tells apart share one list."""
        homes, steps, accepted = self._homes, self._steps, self._accepted
        found = []
        for name in names:
            home, dot, last = name.rpartition(".")
            state = homes.get(home) if dot else self._start
            if state is None:
                state = homes[home] = self._home(home)
            end = steps[state].get(last)
            found.append(accepted[self._step(state, last) if end is None else end])
        return found

    def _home(self, home: str) -> int:
        """The state behind the parts of `home`. Modules of one module share the way to that."""
        outer, dot, last = home.rpartition(".")
        if not dot:
            return self._walk(self._start, [home])
        if outer not in self._homes:
            self._homes[outer] = self._walk(self._start, outer.split("."))
        return self._walk(self._homes[outer], [last])

    def _walk(self, state: int, parts: Iterable[str]) -> int:
        for part in parts:
            target = self._steps[state].get(part)
            state = self._step(state, part) if target is None else target
        return state

    def _step(self, state: int, part: str) -> int:
        target = self._state(
            (glob, place if self._parts[glob][place] == "**" else place + 1)
            for glob, place in self._places[state]
            if place < len(self._parts[glob]) and self._patterns[glob][place].fullmatch(part)
        )
        self._steps[state][part] = target
        return target

    def _state(self, places: Iterable[tuple[int, int]]) -> int:
        """The number of the state in which `places` are reached, and those behind a `**` that stands for nothing."""
        reached = set()
        for glob, place in places:
            reached.add((glob, place))
            while place < len(self._parts[glob]) and self._parts[glob][place] == "**":
                place += 1
                reached.add((glob, place))
        key = frozenset(reached)
        if key not in self._numbers:
            self._numbers[key] = len(self._places)
            self._places.append(key)
            self._steps.append({})
            self._accepted.append(sorted(glob for glob, place in key if place == len(self._parts[glob])))
        return self._numbers[key]


def _part_pattern(part: str) -> re.Pattern[str]:
    return re.compile(".*" if part == "**" else ".*".join(map(re.escape, _WILDCARD.split(part))))


def nearest(glob: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The names most like `glob`, numbers folded to `*`, for a message about a glob that matches nothing."""
    folded = sorted({fold(name) for name in names})
    return difflib.get_close_matches(glob, folded, n=count, cutoff=0.5)


def fold(name: str) -> str:
    """`a.3.b.7` -> `a.*.b.*`."""
    return _NUMBER.sub("*", name)


def fused_instances(globs: Sequence[str], names: Iterable[str]) -> dict[tuple[str, ...], dict[str, str]]:
    """Where any member of a fused group stands: wildcard values -> {member: tensor name}.

    A member is a glob with its numbers folded, so that `layers.{0,1}.{gate,up}` means two members at two places.
    """
    members = [fold(glob) for glob in globs]
    matcher = GlobSet(globs)
    found: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    listed = list(names)
    for name, places in zip(listed, matcher.places(listed), strict=True):
        for place in places:
            values = captured(members[place], name)
            assert values is not None, f"{name} matches {globs[place]} but not {members[place]}"
            found[values][members[place]] = name
    return found
