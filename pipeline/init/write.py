"""A recipe as TOML text, with a head that says what it comes to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardmill.pipeline.plan.types import Plan

_WIDTH = 116


@dataclass(frozen=True, slots=True)
class FamilyText:
    name: str
    match: tuple[str, ...]
    block: tuple[int, int] | None
    source_block: tuple[int, int] | None
    expect: int
    reason: str | None
    to: str | None = None
    source: str | None = None
    drop: bool = False
    transposed: bool = False
    unstack: bool = False
    lossless: bool = False
    numerics: str | None = None
    why_numerics: str = "scales that survive a loader's cast to BF16"


@dataclass(frozen=True, slots=True)
class FusedText:
    name: str
    match: str
    runtime_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ParallelText:
    axis: str
    shares: int | None
    match: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AliasText:
    prefix: str
    alias: str


@dataclass(frozen=True, slots=True)
class RecipeText:
    """All that a recipe's text says, but for the tensor-parallel sizes."""

    name: str
    model: str
    repository: str | None
    revision: str | None
    profile: str
    families: tuple[FamilyText, ...]
    fused: tuple[FusedText, ...]
    parallel: tuple[ParallelText, ...]
    aliases: tuple[AliasText, ...]
    loaders: tuple[str, ...] = ()
    unread: str = (
        ""  # why not all loaders of the profile can read it: plan refuses until `loaders` says who must
    )


def recipe_toml(recipe: RecipeText, sizes: Sequence[int], plan: Plan | None) -> str:
    """The text of pipeline.toml; `sizes` are the tensor-parallel sizes that it promises, `plan` what it comes to."""
    lines = [*_head(recipe, plan), "format = 1", f"name = {_quoted(recipe.name)}", ""]
    if recipe.repository:
        lines += ["[parent]", f"repository = {_quoted(recipe.repository)}"]
        lines += [f"revision = {_quoted(recipe.revision)}"] if recipe.revision else []
        lines.append("")
    lines += ["[output]", f"profile = {_quoted(recipe.profile)}"]
    lines += _loaders(recipe)
    lines += [f"tensor_parallel = {list(sizes)}   # the result must load at these sizes"]
    for family in recipe.families:
        lines += ["", *_family(family)]
    for group in recipe.fused:
        lines += ["", "[[fused]]", f"name = {_quoted(group.name)}", f"match = {_quoted(group.match)}"]
        lines += [f"runtime_names = {json.dumps(group.runtime_names)}"] if group.runtime_names else []
    for split in recipe.parallel:
        lines += ["", "[[parallel]]", f"axis = {_quoted(split.axis)}"]
        lines += (
            [f"shares = {split.shares}   # KV heads; with more ranks they are replicated"]
            if split.shares
            else []
        )
        lines += _match(split.match)
    for alias in recipe.aliases:
        lines += ["", "[[alias]]", f"prefix = {_quoted(alias.prefix)}", f"alias = {_quoted(alias.alias)}"]
    return "\n".join(lines) + "\n"


def _head(recipe: RecipeText, plan: Plan | None) -> Iterator[str]:
    yield f"# {recipe.repository or recipe.model}: drafted by `shardmill init` from headers and config.json."
    yield "# Every tensor matches one family; `shardmill plan` shows what it comes to before any byte is written."
    if plan:
        before = sum(family.bytes_before for family in plan.families)
        yield f"# Tensor bytes: {before:,} -> {plan.tensor_bytes:,}; {len(plan.conversions):,} weights convert."
        for at in plan.loads:
            if at.reason:
                yield f"# Not at tensor-parallel size {at.tensor_parallel}: {at.reason}."


def _loaders(recipe: RecipeText) -> Iterator[str]:
    if recipe.unread:
        yield f"# Plan refuses this: {recipe.unread}."
        yield f"# Remove the # where that is no matter:\n# loaders = {json.dumps(list(recipe.loaders))}"
    elif recipe.loaders:
        yield f"loaders = {json.dumps(list(recipe.loaders))}   # who must read the result"


def _family(family: FamilyText) -> Iterator[str]:
    yield "[[family]]"
    yield f"name = {_quoted(family.name)}"
    yield from _match(family.match)
    if family.to:
        yield 'action = "convert"'
        yield f"to = {_quoted(family.to)}"
        if family.numerics:
            yield f"numerics = {_quoted(family.numerics)}   # {family.why_numerics}"
        if family.source:
            yield f"source = {_quoted(family.source)}"
        if family.block:
            yield f"block = {list(family.block)}"
        if family.transposed:
            yield "transposed = true"
        if family.lossless:
            yield "lossless = true   # a block that does not decode to the parent's numbers is refused"
        if family.unstack:
            yield "unstack = true   # one tensor an expert, as makers publish them"
    elif family.source_block:
        yield 'action = "dequantize"'
        yield f"source_block = {list(family.source_block)}"
    elif family.block:
        yield 'action = "quantize"'
        yield f"block = {list(family.block)}"
        if family.numerics:
            yield f"numerics = {_quoted(family.numerics)}   # {family.why_numerics}"
    else:
        yield f'action = "{"drop" if family.drop else "keep"}"'
        yield f"reason = {_quoted(family.reason or '')}"
        return
    yield f"expect = {family.expect}"


def _match(globs: Iterable[str]) -> Iterator[str]:
    listed = [_quoted(glob) for glob in globs]
    if len(listed) == 1 and len(listed[0]) < _WIDTH:
        yield f"match = {listed[0]}"
    else:
        yield "match = ["
        yield from (f"    {glob}," for glob in listed)
        yield "]"


def _quoted(text: str | None) -> str:
    return json.dumps(text, ensure_ascii=False)
