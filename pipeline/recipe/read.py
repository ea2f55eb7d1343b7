"""The recipe: pipeline.toml read into values that cannot be wrong in themselves.

All problems of a recipe are gathered before any is told, each with the line where it stands. Whether the recipe
fits a parent is the plan's question, not this room's. Only the TOML files are read here.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from shardmill.pipeline.errors import RecipeError
from shardmill.pipeline.recipe.globs import captured, expand, filled, fold
from shardmill.pipeline.types import (
    SCALE_SUFFIXES,
    Action,
    BlockShape,
    Copy,
    Dequantize,
    Drop,
    QuantizeBlock,
    Reblock,
    Reconcile,
    Rename,
    TensorRef,
)

Text = Annotated[str, Field(min_length=1)]
Side = Annotated[int, Field(ge=1, strict=True)]  # strict: neither "4" nor true is a number
_HEAD = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")  # [table] or [[table]]
_KEY = re.compile(r"\s*[\"']?([\w-]+)[\"']?\s*=")
Globs = Annotated[tuple[Text, ...], Field(min_length=1)]


class _Table(BaseModel):
    """A TOML table: unknown keys are refused, and so is text where a number belongs."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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
    also: tuple[Text, ...] = ()  # files of weights that the index does not name and that belong to the parent


class Output(_Table):
    """What is written, and at which tensor-parallel sizes it must load."""

    profile: Literal["modelopt-mixed", "fp8", "compressed-tensors"] = "modelopt-mixed"
    tensor_parallel: tuple[Side, ...] = (1,)
    carry: tuple[Text, ...] = ()  # globs of side files that the child gets beside those that loaders read


Block = tuple[Side, Side]

# action -> the keys that it needs; of `block` and `source_block` it knows no other
_NEEDS = {
    "quantize": ("block", "expect"),
    "dequantize": ("source_block", "expect"),
    "reblock": ("source_block", "block", "expect"),
    "reconcile": ("expect",),
    "rename": ("to", "expect"),
    "keep": ("reason",),
    "drop": ("reason",),
}


class Family(_Matching):
    """Tensors of one kind and what is done with them. A keep or drop needs a reason, a conversion its count.

    A family that starts from the parent's block FP8 (dequantize, reblock) matches the weights and their scales;
    `expect` counts the weights.
    """

    name: Text
    action: Literal["quantize", "dequantize", "reblock", "reconcile", "rename", "keep", "drop"]
    block: Block | None = None
    source_block: Block | None = None  # the parent's
    numerics: str = "amax/1"
    to: Text | None = None  # the new name of a family that is renamed: a glob with the wildcards of `match`
    expect: Annotated[int, Field(ge=0, strict=True)] | None = None
    reason: Text | None = None

    @model_validator(mode="after")
    def _complete(self) -> Family:
        needed = _NEEDS[self.action]
        if absent := [f"`{key}`" for key in needed if getattr(self, key) is None]:
            hint = ", the number of its tensors" if "`expect`" in absent else ""
            raise ValueError(f"a family with action {self.action!r} needs {' and '.join(absent)}{hint}")
        for key in ("block", "source_block", "to"):
            if key not in needed and getattr(self, key) is not None:
                raise ValueError(f"`{key}` has no meaning with action {self.action!r}")
        if self.action == "reblock" and not _divides(self.block, self.source_block):
            raise ValueError(
                f"blocks of {self.source_block} do not divide into blocks of {self.block}; only a smaller block "
                f"keeps every number: dequantize first, then quantize"
            )
        if self.to and any(
            len(re.findall(r"\*+", glob)) != len(re.findall(r"\*+", self.to)) for glob in self.globs()
        ):
            raise ValueError(f"`to` ({self.to}) must have as many wildcards as each glob of `match`")
        return self

    def _renamed(self, name: str, to: str) -> str:
        """`to` with its wildcards filled by what those of `match` stand for in `name`, in order."""
        values = next(values for glob in self.globs() if (values := captured(glob, name)) is not None)
        return filled(to, values)

    def deed(self, ref: TensorRef, scale_suffix: str = "_scale_inv") -> Action:
        """The Action that the family's tensor `ref` gets; new scales are named by `scale_suffix`."""
        if self.action == "keep":
            return Copy()
        block = BlockShape(*self.block) if self.block else None
        source = BlockShape(*self.source_block) if self.source_block else None
        if self.action == "reconcile":
            return Reconcile()
        if self.action == "rename" and self.to:
            return Rename(self._renamed(ref.name, self.to))
        if self.action == "quantize" and block:
            return QuantizeBlock(block, self.numerics, scale_suffix)
        if ref.name.endswith(SCALE_SUFFIXES):
            return Drop()  # what it says goes into its weight, or into new scales
        if self.action == "dequantize" and source:
            return Dequantize(source)
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

    def folded(self) -> list[str]:
        """The members in their order, whatever the layers that `match` counts out."""
        return list(dict.fromkeys(fold(glob) for glob in self.globs()))


class Parallel(_Matching):
    """Weights whose rows or columns a runtime deals out over its tensor-parallel ranks.

    shares: how many the rows can be dealt out in (the KV heads); more ranks than that hold copies.
    """

    axis: Literal["rows", "columns"]
    shares: Annotated[int, Field(ge=1)] | None = None


class StageTable(_Table):
    """One stage of the DAG: what it needs. Its further keys are its own options; pipeline.stages.dag knows which."""

    model_config = ConfigDict(extra="allow", frozen=True)
    needs: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class Alias(_Table):
    """Modules that a runtime builds under a second prefix (a draft model) are listed in config.json under both."""

    prefix: Text
    alias: Text


# Actions that are done by a stage which most recipes leave out.
_STAGE_OF = {"dequantize": "dequantize", "reblock": "dequantize", "reconcile": "reconcile"}


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

    _home: Path = PrivateAttr(default=Path())
    _origins: dict[str, _Origin] = PrivateAttr(default_factory=dict)

    @property
    def home(self) -> Path:
        """The recipe's folder, from which the paths in it go out."""
        return self._home

    def told(self, place: tuple[str, ...], message: str) -> str:
        """A problem with what stands at `place`, e.g. ("stages", "scan"), after its file and line."""
        return _told(self._origins.get(place[0], _Origin(self._home, "")), place, message)

    @model_validator(mode="after")
    def _staged(self) -> Recipe:
        """An action whose stage may be left out of the DAG needs it there."""
        rewrite = self.stages.get("rewrite")
        for family in self.family:
            stage = _STAGE_OF.get(family.action)
            if stage and rewrite and stage not in rewrite.needs:
                raise ValueError(
                    f"family {family.name!r} has action {family.action!r}: [stages] must have {stage} = "
                    f'{{ needs = ["classify"] }}, and rewrite must need it'
                )
        return self

    @model_validator(mode="after")
    def _distinct(self) -> Recipe:
        names = [family.name for family in self.family]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"family names must differ; {', '.join(twice)} stands twice")
        return self


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a table or key of a recipe was written: the file, its text, and the table's place among its like there."""

    path: Path
    text: str
    number: int = 0


def load(path: Path) -> Recipe:
    """The recipe at `path`, laid over the one that it extends; a family of the same name replaces the other's.

    Raises RecipeError with every problem found, each with its file and line.
    """
    table: dict[str, Any] = {}
    families: dict[Any, tuple[Any, _Origin]] = {}
    origins: dict[str, _Origin] = {}
    for layer, origin in reversed(_layers(path, ())):
        table |= layer
        origins |= dict.fromkeys(layer, origin)
        if isinstance(listed := layer.get("family"), list):
            families |= _by_name(listed, origin)
            table["family"] = [family for family, _ in families.values()]
    try:
        recipe = Recipe.model_validate(table)
        recipe._home, recipe._origins = path.parent, origins
        return recipe
    except ValidationError as error:
        of_families = [origin for _, origin in families.values()]
        whole = _Origin(path, "")
        raise RecipeError(
            [_problem(fault, origins, of_families, whole) for fault in error.errors()]
        ) from None


def _layers(path: Path, readers: tuple[Path, ...]) -> list[tuple[dict[str, Any], _Origin]]:
    """The TOML at `path`, then what it extends. `readers` are the files that lead here."""
    if path.resolve() in readers:
        raise RecipeError([f"{path}: extends itself; remove `extends` from one of the files"])
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        raise RecipeError([f"{path}: cannot be read: {error.strerror}; give the recipe with -c"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecipeError([f"{path}: not valid TOML: {error}"]) from None
    base = table.pop("extends", None)
    below = _layers(path.parent / str(base), (*readers, path.resolve())) if base is not None else []
    return [(table, _Origin(path, text)), *below]


def _by_name(families: list[Any], origin: _Origin) -> dict[Any, tuple[Any, _Origin]]:
    """Name -> family and its origin. Of two with one name in one file both stay, so that they are told."""
    found: dict[Any, tuple[Any, _Origin]] = {}
    for number, family in enumerate(families):
        name = family.get("name") if isinstance(family, dict) else None
        key = name if isinstance(name, str) and name not in found else (origin.path, number)
        found[key] = (family, replace(origin, number=number))
    return found


_TABLES: Mapping[str | int, type[BaseModel]] = {
    "parent": Parent,
    "output": Output,
    "family": Family,
    "fused": Fused,
    "parallel": Parallel,
    "alias": Alias,
}


def _problem(
    fault: Any, origins: Mapping[str, _Origin], of_families: Sequence[_Origin], whole: _Origin
) -> str:
    place, message = fault["loc"], str(fault["msg"]).removeprefix("Value error, ")
    origin = origins.get(place[0], whole) if place else whole
    written = place
    if place[:1] == ("family",) and len(place) > 1:
        origin = of_families[place[1]]
        written = ("family", origin.number, *place[2:])
    if fault["type"] == "extra_forbidden":
        message = (
            f"the key {place[-1]!r} is not known{_nearest_key(place)}; remove it or correct its spelling"
        )
    elif fault["type"] == "missing":
        message = f"the key {place[-1]!r} is missing" if isinstance(place[-1], str) else "has too few entries"
    elif fault["type"] == "too_long":
        message = "has too many entries"
    elif isinstance(fault["input"], str | int | float) and fault["type"] != "value_error":
        message = f"{message}, not {fault['input']!r}"
    message = message.replace("Input should be", "should be").replace("valid tuple", "list")
    return _told(origin, written, message)


def _told(origin: _Origin, place: tuple[str | int, ...], message: str) -> str:
    line = _line_of(origin.text, place)
    where = _spelled(origin.text, place)
    return f"{origin.path}{f':{line}' if line else ''}: {where + ': ' if where else ''}{message}"


def _spelled(text: str, place: tuple[str | int, ...]) -> str:
    """("output", "profile") -> `output.profile`; ("family", 0, "block") -> `family 'attention': block`, by its name."""
    if len(place) > 1 and isinstance(place[1], int):
        tables = tomllib.loads(text).get(str(place[0]))
        table = tables[place[1]] if isinstance(tables, list) and place[1] < len(tables) else {}
        if isinstance(table, dict) and isinstance(name := table.get("name"), str):
            return ": ".join([f"{place[0]} {name!r}", ".".join(map(str, place[2:]))]).removesuffix(": ")
    return ".".join(map(str, place))


def _nearest_key(place: tuple[str | int, ...]) -> str:
    """A hint at the key of the same table that an unknown one is most like, where there is one."""
    table = _TABLES.get(place[0], Recipe) if len(place) > 1 else Recipe
    close = get_close_matches(str(place[-1]), table.model_fields, n=1)
    return f" (do you mean {close[0]!r}?)" if close else ""


def _line_of(text: str, place: tuple[str | int, ...]) -> int | None:
    """The line (from 1) of the deepest table or key on the way to `place` that the TOML's text shows."""
    lines: dict[tuple[str | int, ...], int] = {}
    table: tuple[str | int, ...] = ()
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
