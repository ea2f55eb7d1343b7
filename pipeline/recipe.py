"""The recipe: pipeline.toml read into values that cannot be wrong in themselves.

All problems of a recipe are gathered before any is told, each with the line where it stands. Whether the recipe
fits a parent is the plan's question, not this room's. Only the TOML files are read here.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pipeline.errors import RecipeError
from pipeline.globs import expand
from pipeline.types import (
    SCALE_SUFFIXES,
    Action,
    BlockShape,
    Copy,
    Dequantise,
    Drop,
    QuantizeBlock,
    Reblock,
    TensorRef,
)

Text = Annotated[str, Field(min_length=1)]
Globs = Annotated[tuple[Text, ...], Field(min_length=1)]


class _Table(BaseModel):
    """A TOML table: unknown keys are refused, values are not coerced."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class _Matching(_Table):
    match: Globs

    @field_validator("match", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return _one_or_many(value)

    @field_validator("match")
    @classmethod
    def _paired(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for glob in value:
            expand(glob)
        return value

    def globs(self) -> list[str]:
        return [glob for written in self.match for glob in expand(written)]


class Parent(_Table):
    """Where the parent is published. A revision is a full commit hash, so that it can't move."""

    repository: str | None = None
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None


class Output(_Table):
    """What is written, and at which tensor-parallel sizes it must load."""

    profile: Literal["modelopt-mixed", "fp8", "compressed-tensors"] = "modelopt-mixed"
    tensor_parallel: tuple[Annotated[int, Field(ge=1)], ...] = (1,)


Block = tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]

# action -> the keys that it needs; of `block` and `source_block` it knows no other
_NEEDS = {
    "quantize": ("block", "expect"),
    "dequantise": ("source_block", "expect"),
    "reblock": ("source_block", "block", "expect"),
    "keep": ("reason",),
    "drop": ("reason",),
}


class Family(_Matching):
    """Tensors of one kind and what is done with them. A keep or drop needs a reason, a conversion its count.

    A family that starts from the parent's block FP8 (dequantise, reblock) matches the weights and their scales;
    `expect` counts the weights.
    """

    name: Text
    action: Literal["quantize", "dequantise", "reblock", "keep", "drop"]
    block: Block | None = None
    source_block: Block | None = None  # the parent's
    numerics: str = "amax/1"
    expect: Annotated[int, Field(ge=0)] | None = None
    reason: Text | None = None

    @model_validator(mode="after")
    def _complete(self) -> Family:
        needed = _NEEDS[self.action]
        if absent := [f"`{key}`" for key in needed if getattr(self, key) is None]:
            hint = ", the number of its tensors" if "`expect`" in absent else ""
            raise ValueError(f"a family with action {self.action!r} needs {' and '.join(absent)}{hint}")
        for key in ("block", "source_block"):
            if key not in needed and getattr(self, key) is not None:
                raise ValueError(f"`{key}` has no meaning with action {self.action!r}")
        if self.action == "reblock" and not _divides(self.block, self.source_block):
            raise ValueError(
                f"blocks of {self.source_block} do not divide into blocks of {self.block}; only a smaller block "
                f"keeps every number: dequantise first, then quantise"
            )
        return self

    def deed(self, ref: TensorRef, scale_suffix: str = "_scale_inv") -> Action:
        """The Action that the family's tensor `ref` gets; new scales are named by `scale_suffix`."""
        block = BlockShape(*self.block) if self.block else None
        source = BlockShape(*self.source_block) if self.source_block else None
        if self.action == "keep":
            return Copy()
        if self.action == "quantize" and block:
            return QuantizeBlock(block, self.numerics, scale_suffix)
        if ref.name.endswith(SCALE_SUFFIXES):
            return Drop()  # what it says goes into its weight, or into new scales
        if self.action == "dequantise" and source:
            return Dequantise(source)
        if self.action == "reblock" and source and block:
            return Reblock(source, block, scale_suffix)
        return Drop()


def _divides(block: Block | None, source: Block | None) -> bool:
    assert block is not None
    assert source is not None
    return all(whole % part == 0 for whole, part in zip(source, block, strict=True))


class Fused(_Matching):
    """Weights that a runtime fuses into one module, in its order. The braces of `match` name the members."""

    name: Text
    runtime_names: tuple[Text, ...] = ()  # what runtimes call the fused module: its last dotted part

    def members(self) -> set[str]:
        """The members' own module names, e.g. {"gate_proj", "up_proj"}."""
        return {glob.removesuffix(".weight").rpartition(".")[2] for glob in self.globs()}


class Parallel(_Matching):
    """Weights whose rows or columns a runtime deals out over its tensor-parallel ranks."""

    axis: Literal["rows", "columns"]


class StageTable(_Table):
    """One stage of the DAG: what it needs. Its further keys are its own options."""

    model_config = ConfigDict(extra="allow", frozen=True)
    needs: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class Alias(_Table):
    """Modules that a runtime builds under a second prefix (a draft model) are listed in config.json under both."""

    prefix: Text
    alias: Text


class Recipe(_Table):
    """The whole of pipeline.toml."""

    format: Literal[1]
    name: Text
    parent: Parent = Parent()
    output: Output = Output()
    stages: dict[str, StageTable]
    family: tuple[Family, ...] = Field(min_length=1)
    fused: tuple[Fused, ...] = ()
    parallel: tuple[Parallel, ...] = ()
    alias: tuple[Alias, ...] = ()

    @model_validator(mode="after")
    def _distinct(self) -> Recipe:
        names = [family.name for family in self.family]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"family names must differ; {', '.join(twice)} stands twice")
        return self


def load(path: Path) -> Recipe:
    """The recipe at `path`. Raises RecipeError with every problem found, each with its file and line."""
    table, text = _read(path)
    try:
        return Recipe.model_validate(table)
    except ValidationError as error:
        raise RecipeError([_problem(path, text, fault) for fault in error.errors()]) from None


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """The TOML at `path` laid over the one it `extends`; a family of the same name replaces the other's."""
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        raise RecipeError([f"{path}: cannot be read: {error.strerror}; give the recipe with -c"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError([f"{path}: not valid TOML: {error}"]) from None
    if "extends" not in table:
        return table, text
    base, _ = _read(path.parent / str(table.pop("extends")))
    families = {family.get("name"): family for family in base.get("family", ())}
    families.update({family.get("name"): family for family in table.pop("family", ())})
    return {**base, **table, "family": list(families.values())}, text


def _problem(path: Path, text: str, fault: Any) -> str:
    place, message = fault["loc"], str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        message = f"the key {place[-1]!r} is not known; remove it or correct its spelling"
    elif fault["type"] == "missing":
        message = f"the key {place[-1]!r} is missing"
    line = _line_of(text, place)
    where = ".".join(str(part) for part in place)
    return f"{path}{f':{line}' if line else ''}: {where + ': ' if where else ''}{message}"


def _line_of(text: str, place: tuple[str | int, ...]) -> int | None:
    """The line (from 1) of the deepest table or key of `place` that can be found in the TOML's text."""
    lines, at, found = text.splitlines(), 0, None
    for depth, part in enumerate(place):
        if isinstance(part, int):
            head = re.compile(rf"\s*\[\[\s*{re.escape(str(place[depth - 1]))}\s*\]\]")
            starts = [i for i, line in enumerate(lines) if head.match(line)]
            if part >= len(starts):
                return found
            at = starts[part]
            found = at + 1
        else:
            own = re.compile(
                rf"\s*(\[+[\w.\s\"-]*\b{re.escape(part)}\s*\]+|[\"']?{re.escape(part)}[\"']?\s*=)"
            )
            hit = next((i for i in range(at, len(lines)) if own.match(lines[i])), None)
            if hit is not None:
                at, found = hit, hit + 1
    return found
