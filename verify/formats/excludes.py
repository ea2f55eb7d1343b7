"""A config's exclusion list: which modules it says are left unquantized.

Three dialects: ModelOpt (`ignore` or `exclude_modules`: names, substrings, globs), DeepSeek-style fp8
(`modules_to_not_convert`, `ignored_layers`: names or substrings), compressed-tensors (`ignore`: names, `re:` patterns).
Lists are long and names many, so names that differ only in numbers are matched once, by patterns without one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import Any, NamedTuple, Self

from shardmill.verify.formats.fused import PART_NUMBER
from shardmill.verify.rules.findings import Finding

KEYS = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
PATTERNS_MAX = 50_000
GLOBS_MAX = 2_000  # of these, globs and expressions: each is compiled
REGEX_CHARS_MAX = 256
NAME_CHARS_MAX = 512
STEPS_OF_A_UNIT = 500
COST_MAX = 6_000  # of one match: an expression of three repeats meets names of up to 144 letters
WORK_MAX = 5_000_000  # names against patterns; a list that costs more is not judged to its end

# A stranger's regular expression can take exponential time: no quantified group, no back-reference, few repeats.
_UNSAFE = re.compile(r"\)[*+?{]|\\[1-9]|\(\?P=|\{")
_REPEAT = re.compile(r"(?<!\\)[*+]")
_REPEATS_MAX = 3
# A digit that may be of a layer's or an expert's number; those of conv1d and w13 belong to a word.
_NUMBER = re.compile(r"(?<![A-Za-z_\d])\d")


class Pattern(NamedTuple):
    """One entry of the list."""

    text: str
    regex: re.Pattern[str] | None  # None: a plain name, which matches itself, its children and as a substring
    repeats: int = 0  # of an expression; each may try every place of a name

    @property
    def numbered(self) -> bool:
        """Whether it may tell layers or experts apart."""
        return _NUMBER.search(self.text) is not None

    def cost(self, name: str) -> int:
        """In units of a plain match: an expression of k repeats may take len(name)^k steps."""
        return max(1, len(name) ** self.repeats // STEPS_OF_A_UNIT) if self.repeats > 1 else 1

    def matches(self, name: str) -> bool:
        if self.regex is not None:
            return self.cost(name) <= COST_MAX and self.regex.match(name) is not None
        return self.text in name


@dataclass(frozen=True, slots=True)
class Excludes:
    patterns: tuple[Pattern, ...]
    _hit: Callable[[str], bool]

    @classmethod
    def read(cls, quantization: Mapping[str, Any]) -> tuple[Self, list[Finding]]:
        findings: list[Finding] = []
        patterns: list[Pattern] = []
        for key in KEYS:
            value = quantization.get(key)
            if value is None:
                continue
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                findings.append(
                    Finding("config-json", "config.json", key, "a list of names", repr(value)[:80])
                )
                continue
            costly = [item for item in value if _is_pattern(item)]
            if len(costly) > GLOBS_MAX:
                got = f"{len(costly):,}; the rest was not looked at"
                findings.append(
                    Finding("exclude-pattern", "config.json", key, f"at most {GLOBS_MAX:,} patterns", got)
                )
            read = frozenset(costly[:GLOBS_MAX])
            for item in value[:PATTERNS_MAX]:
                if _is_pattern(item) and item not in read:
                    continue
                pattern = pattern_of(item)
                if pattern is None:
                    findings.append(
                        Finding("exclude-pattern", "config.json", item, "a pattern that can be judged")
                    )
                else:
                    patterns.append(pattern)
        return cls(tuple(patterns), _matcher(patterns)), findings

    @property
    def numbered(self) -> bool:
        """Whether some pattern tells layers or experts apart."""
        return any(pattern.numbered for pattern in self.patterns)

    def matched(self, modules: Iterable[str]) -> Iterator[str]:
        """The modules that some pattern hits under their own name."""
        return (module for module in modules if self._hit(module))

    def hits(self, module: str) -> bool:
        return self._hit(module)


def _matcher(patterns: Iterable[Pattern]) -> Callable[[str], bool]:
    loose = [p for p in patterns if not p.numbered]
    names = {p.text for p in patterns if p.numbered and p.regex is None}
    exact = [p for p in patterns if p.numbered and p.regex is not None]
    by_shape: dict[str, bool] = {}
    work = [WORK_MAX]

    def hit(module: str) -> bool:
        if len(module) > NAME_CHARS_MAX or work[0] < 0:
            return False
        if names and not names.isdisjoint(_self_and_parents(module)):
            return True
        shape = PART_NUMBER.sub("0", module)
        work[0] -= sum(pattern.cost(module) for pattern in exact)
        if shape not in by_shape:
            work[0] -= sum(pattern.cost(shape) for pattern in loose)
            by_shape[shape] = any(pattern.matches(shape) for pattern in loose)
        return by_shape[shape] or any(pattern.matches(module) for pattern in exact)

    return hit


def _self_and_parents(module: str) -> Iterator[str]:
    yield module
    while "." in module and len(module) <= NAME_CHARS_MAX:
        module = module.rpartition(".")[0]
        yield module


def _is_pattern(text: str) -> bool:
    return text.startswith("re:") or not set("*?[").isdisjoint(text)


def pattern_of(text: str) -> Pattern | None:
    if not text.startswith("re:"):
        return Pattern(text, re.compile(translate(text)) if _is_pattern(text) else None)
    source = text.removeprefix("re:")
    if len(source) > REGEX_CHARS_MAX or _UNSAFE.search(source) or len(_REPEAT.findall(source)) > _REPEATS_MAX:
        return None
    try:
        return Pattern(text, re.compile(source), len(_REPEAT.findall(source)))
    except (re.error, RecursionError, OverflowError):
        return None


def safe_regex(source: str, whole: str | None = None) -> re.Pattern[str] | None:
    """`whole`, or `source`, compiled; None where `source` is malformed or could take exponential time."""
    if pattern_of(f"re:{source}") is None:
        return None
    return re.compile(whole or source)
