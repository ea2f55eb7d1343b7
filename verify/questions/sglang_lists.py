"""How SGLang 0.5.23 matches the names of an exclusion list: each method against a module's name in a way of its own.

`fp8` by runs of whole words (is_layer_skipped in quantization/utils.py), ModelOpt by globs (modelopt_quant.py),
compressed-tensors by whole words at the end (compressed_tensors/utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shardmill.verify.formats.excludes import GLOBS_MAX, safe_regex
from shardmill.verify.formats.sglang_modules import PACKED, Family
from shardmill.verify.questions.unasked import UnaskedError

MLA_PARTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
Matches = Callable[[str], bool]


class RefusedError(Exception):
    """SGLang raises while it builds or loads this."""


def listed_under(quantization: Mapping[str, Any], *keys: str) -> list[str]:
    """The list under the first of `keys` that is there."""
    value = next((quantization[key] for key in keys if key in quantization), None)
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def renamed(names: Iterable[str], family: Family) -> list[str]:
    return [rename(name, family) for name in names]


def rename(name: str, family: Family) -> str:
    """Its mapper: one rule of each kind at most, the longest that hits."""
    for kind in ("in", "begin", "end"):
        rules = sorted((rule for rule in family.renames if rule[0] == kind), key=lambda rule: -len(rule[1]))
        for _, old, new in rules:
            if kind == "in" and old in name:
                name = name.replace(old, new, 1)
            elif kind == "begin" and name.startswith(old):
                name = new + name.removeprefix(old)
            elif kind == "end" and name.endswith(old):
                name = name.removesuffix(old) + new
            else:
                continue
            break
    return name


def every_part(name: str, packed: Mapping[str, tuple[str, ...]], hits: Matches) -> bool | None:
    """Whether the parts of a fused module are hit, None where it is no fused module. Raises where they differ."""
    last = name.rpartition(".")[2]
    if last not in packed:
        return None
    found = {hits(name.replace(last, part)) for part in packed[last]}
    if len(found) > 1:
        raise RefusedError(f"{name}: some of its parts are excluded and some are not")
    return found.pop()


def is_skipped(name: str, listed: list[str], packed: Mapping[str, tuple[str, ...]]) -> bool:
    """Its rule for `fp8`: an entry hits as a run of whole words of the name; of experts also as a longer name."""
    last = name.rpartition(".")[2]
    plain = frozenset(listed)

    def hits(asked: str) -> bool:
        words = asked.split(".")
        runs = (".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1))
        return any(run in plain for run in runs)

    parts = every_part(name, packed if last in packed else PACKED, hits)
    if parts is not None:
        return parts
    return hits(name) or ("experts" in name and any(name in each for each in listed if "experts" in each))


def by_glob(listed: list[str]) -> Matches:
    """Its rule for ModelOpt: a glob of the whole name or of one of its words; the MLA's parts also within a word."""
    plain = frozenset(name for name in listed if "*" not in name)
    if sum("*" in name for name in listed) > GLOBS_MAX:
        raise UnaskedError(f"config.json excludes by more than {GLOBS_MAX:,} globs")
    globs = [
        compile_safely(name.replace(".", r"\.").replace("*", ".*"), name) for name in listed if "*" in name
    ]
    tails = {name.rpartition(".")[2] for name in listed} & set(MLA_PARTS)

    def hits(name: str) -> bool:
        names = {name, name.removeprefix("language_model."), *name.split(".")}
        if not plain.isdisjoint(names) or any(glob.fullmatch(each) for glob in globs for each in names):
            return True
        return any(tail in name.rpartition(".")[2] for tail in tails)

    return hits


def by_suffix(listed: list[str]) -> Callable[..., bool]:
    """Its rule for compressed-tensors: whole words at the end of a name, or `re:` at its beginning."""
    plain = frozenset(name for name in listed if not name.startswith("re:"))
    expressions = [
        compile_safely(name.removeprefix("re:"), name) for name in listed if name.startswith("re:")
    ]

    def hits(name: str, suffixes: bool = True) -> bool:
        words = name.split(".")
        ends = {".".join(words[i:]) for i in range(len(words) if suffixes else 1)}
        return not plain.isdisjoint(ends) or (suffixes and any(each.match(name) for each in expressions))

    return hits


def compile_safely(expression: str, pattern: str) -> re.Pattern[str]:
    """Raises UnaskedError for an expression that could run for ever."""
    compiled = safe_regex(pattern.removeprefix("re:"), expression)
    if compiled is None:
        raise UnaskedError(f"config.json excludes by {pattern[:60]!r}, which is too costly to be judged")
    return compiled
