"""The tables of a recipe as frozen values that cannot be wrong in themselves.

Whether a recipe fits a parent is the plan's question. What an action needs is the action's: a family holds the keys
that its action names, and no others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from shardmill.pipeline.actions import ACTIONS, Action, Drop, keys_of_families
from shardmill.pipeline.recipe.globs import captured, count, expand, filled, fold
from shardmill.pipeline.recipe.lines import Origin, located
from shardmill.pipeline.types import BlockShape, TensorRef

Text = Annotated[str, Field(min_length=1)]
Side = Annotated[int, Field(ge=1, le=1 << 31, strict=True)]  # strict: neither "4" nor true is a number
# What a recipe may ask for, far above what a model needs: 94 layers of 512 experts take a hundred globs.
_GLOBS_MAX = 8192  # that the braces of all of its tables stand for
_TABLES_MAX = 1024  # of a kind
_COUNT_MAX = 1 << 31  # of tensors, or of parts of a row
Block = tuple[Side, Side]


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _paired(globs: tuple[str, ...]) -> tuple[str, ...]:
    """Each glob, once its braces are seen to be in pairs."""
    for glob in globs:
        count(glob)
    return globs


Globs = Annotated[
    tuple[Text, ...], Field(min_length=1), BeforeValidator(_one_or_many), AfterValidator(_paired)
]  # one text stands for a list of one


class _Table(BaseModel):
    """A TOML table: unknown keys are refused, and so is text where a number belongs."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _Matching(_Table):
    match: Globs

    def globs(self) -> list[str]:
        return [glob for written in self.match for glob in expand(written)]


class Parent(_Table):
    """Where the parent is published. A revision is a full commit hash, so that it can't move."""

    repository: str | None = None
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None
    also: tuple[Text, ...] = ()  # files of weights that the index does not name and that belong to the parent


class Prefix(_Table):
    """The front of names in a source, and what stands in its place in the child."""

    from_: Text = Field(alias="from")
    to: Text


class FurtherParent(_Table):
    """Another checkpoint of which some tensors are taken, in place of the parent's or beside them.

    names: globs over its own names; each tensor that one matches is taken. Where it is: `--source NAME=DIR`, else
    `path`, relative to the recipe, else its repository at that revision.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]
    names: Globs
    path: Text | None = None
    repository: str | None = None
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None
    rename: Prefix | None = None

    def globs(self) -> list[str]:
        return [glob for written in self.names for glob in expand(written)]

    def renamed(self, name: str) -> str:
        """What the child calls the source's tensor `name`."""
        if self.rename is None or not name.startswith(self.rename.from_):
            return name
        return self.rename.to + name.removeprefix(self.rename.from_)


class Output(_Table):
    """What is written, and at which tensor-parallel sizes it must load."""

    profile: Text = "modelopt-mixed"  # a row of pipeline.plan.profiles
    tensor_parallel: Annotated[tuple[Side, ...], Field(max_length=64)] = (1,)
    loaders: tuple[Text, ...] = ()  # who must read the result; () is everyone whom the profile is for
    carry: tuple[Text, ...] = ()  # globs of side files that the child gets beside those that loaders read


class Family(_Matching):
    """Tensors of one kind and the action that they get. A keep or drop needs a reason, a conversion its count.

    A family that starts from the parent's block FP8 (dequantize, reblock) matches the weights and their scales;
    `expect` counts the weights.
    """

    # Keys that no field below holds are for the action: it names them in its `needs` or `takes`.
    model_config = ConfigDict(extra="allow", frozen=True)

    name: Text
    action: str
    block: Block | None = None
    source_block: Block | None = None  # the parent's
    numerics: Text | None = None
    to: Text | None = None  # the new name of a family that is renamed: a glob with the wildcards of `match`
    expect: Annotated[int, Field(ge=0, le=_COUNT_MAX, strict=True)] | None = None
    reason: Text | None = None

    @field_validator("action")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ACTIONS:
            *others, last = map(repr, ACTIONS)
            raise PydanticCustomError("unknown_action", f"Input should be {', '.join(others)} or {last}")
        return value

    @model_validator(mode="after")
    def _complete(self) -> Family:
        if faults := list(self._keys_without_meaning()):
            raise ValidationError.from_exception_data(type(self).__name__, faults)
        if absent := [f"`{key}`" for key in ACTIONS[self.action].needs if self._written().get(key) is None]:
            hint = ", the number of its tensors" if "`expect`" in absent else ""
            raise ValueError(f"a family with action {self.action!r} needs {' and '.join(absent)}{hint}")
        if (
            self.action == "rename"
            and self.to
            and any(
                len(re.findall(r"\*+", glob)) != len(re.findall(r"\*+", self.to)) for glob in self.globs()
            )
        ):
            raise ValueError(f"`to` ({self.to}) must have as many wildcards as each glob of `match`")
        if self.to and (fault := _why_no_name(self.to)):
            raise ValueError(f"`to` ({self.to!r}) {fault}")
        self._made("_scale_inv", self.to)
        return self

    def _written(self) -> dict[str, Any]:
        """Key -> value, of all that the family's table may hold but for its name, globs and action."""
        fields = {
            key: getattr(self, key) for key in ("block", "source_block", "numerics", "to", "expect", "reason")
        }
        return {**fields, **(self.__pydantic_extra__ or {})}

    def _keys_without_meaning(self) -> Iterator[InitErrorDetails]:
        """A fault for each key that the action doesn't know. Any action may have a reason and a count."""
        action = ACTIONS[self.action]
        known = {*action.needs, *action.takes, "expect", "reason"}
        somewhere = keys_of_families()
        for key, value in self._written().items():
            if value is not None and key not in known:
                words = f"`{key}` has no meaning with action {self.action!r}; remove it"
                meant = PydanticCustomError("value_error", words) if key in somewhere else "extra_forbidden"
                yield InitErrorDetails(type=meant, loc=(key,), input=value)

    def action_for(
        self, ref: TensorRef, scale_suffix: str = "_scale_inv", profile: str = "modelopt-mixed"
    ) -> Action:
        """The Action that the family's tensor `ref` gets; new scales are named by `scale_suffix`."""
        return self.chooser(scale_suffix, profile)(ref)

    def chooser(self, scale_suffix: str, profile: str) -> Callable[[TensorRef], Action]:
        """`action_for` of many tensors: what does not depend on the tensor is made once."""
        consumes, written, dropped = ACTIONS[self.action].consumes, self._written(), Drop()
        to = self.to if self.action == "rename" else None
        same = None if to else self._made(scale_suffix, self.to, profile)

        def choose(ref: TensorRef) -> Action:
            if consumes(ref.name, written):
                return dropped  # what it says goes into its weight, or into new scales
            return same or self._made(scale_suffix, self._renamed(ref.name, str(to)), profile)

        return choose

    def _made(self, scale_suffix: str, to: str | None, profile: str = "modelopt-mixed") -> Action:
        """The action from the family's keys. Raises ValueError where they contradict each other."""
        given = {key: _frozen(value) for key, value in self._written().items() if value is not None}
        for key in ("block", "source_block"):
            if key in given:
                given[key] = BlockShape(*given[key])
        return ACTIONS[self.action].of({**given, "scale_suffix": scale_suffix, "to": to, "profile": profile})

    def _renamed(self, name: str, to: str) -> str:
        """`to` with its wildcards filled by what those of `match` stand for in `name`, in order."""
        values = next(values for glob in self.globs() if (values := captured(glob, name)) is not None)
        return filled(to, values)


def _why_no_name(to: str) -> str | None:
    """Why the names that `to` gives could not be read by loaders; None where they could."""
    if to == "__metadata__":
        return "is the name of a header's metadata, which no library reads as a tensor"
    if any(brace in to for brace in "{}"):
        return "must be one name: braces are for `match` alone"
    if "" in to.split(".") or not to.isprintable():
        return "has an empty part or a character that does not print"
    return None


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


class Fused(_Matching):
    """Weights that a runtime fuses into one module, in its order. The braces of `match` name the members."""

    name: Text
    runtime_names: tuple[Text, ...] = ()  # what runtimes call the fused module: its last dotted part

    def members(self) -> set[str]:
        """The members' own module names, e.g. {"gate_proj", "up_proj"}."""
        return {glob.removesuffix(".weight").rpartition(".")[2] for glob in self.globs()}

    def folded(self) -> list[str]:
        """The members in their order, whatever layers `match` lists."""
        return list(dict.fromkeys(fold(glob) for glob in self.globs()))


class Parallel(_Matching):
    """Weights whose rows or columns a runtime splits over its tensor-parallel ranks.

    rows: column parallel in the field's words, since a weight [R, C] is applied as x @ w.T; columns: row parallel.
    shares: into how many parts the rows can be split (the KV heads); with more ranks they are replicated.
    """

    axis: Literal["rows", "columns"]
    shares: Annotated[int, Field(ge=1, le=_COUNT_MAX)] | None = None


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


# The stages of a recipe that has no [stages], and what each needs.
STANDARD_STAGES: dict[str, tuple[str, ...]] = {
    "scan": (),
    "classify": ("scan",),
    "quantize": ("classify",),
    "scales": ("quantize",),
    "rewrite": ("classify", "quantize", "scales"),
    "index": ("scan", "rewrite"),
}


def standard_stages(actions: Iterable[Any], several_parents: bool = False) -> dict[str, dict[str, Any]]:
    """The [stages] of a recipe that doesn't write them: the standard ones, and those that its actions need.

    actions: as its families name them; what is no action is the family's problem. A further stage takes its place
    between classify, which it needs, and rewrite, which needs it. With several parents `sources` is after scan.
    """
    known = (ACTIONS[action] for action in actions if isinstance(action, str) and action in ACTIONS)
    further = dict.fromkeys(each.stage for each in known if each.stage and each.stage not in STANDARD_STAGES)
    needs = {**STANDARD_STAGES, **dict.fromkeys(further, ("classify",))}
    needs["rewrite"] = (*needs["rewrite"], *further)
    if several_parents:
        needs |= {"sources": ("scan",), "classify": ("sources",), "index": ("sources", "rewrite")}
    return {name: {"needs": wanted} for name, wanted in needs.items()}


class Recipe(_Table):
    """The whole of pipeline.toml."""

    format: Literal[1]
    name: Text
    parent: Parent = Parent()
    output: Output = Output()
    stages: dict[str, StageTable]
    source: tuple[FurtherParent, ...] = Field(default=(), max_length=_TABLES_MAX)
    family: tuple[Family, ...] = Field(min_length=1, max_length=_TABLES_MAX)
    fused: tuple[Fused, ...] = Field(default=(), max_length=_TABLES_MAX)
    parallel: tuple[Parallel, ...] = Field(default=(), max_length=_TABLES_MAX)
    alias: tuple[Alias, ...] = Field(default=(), max_length=_TABLES_MAX)

    _home: Path = PrivateAttr(default=Path())
    _notices: tuple[str, ...] = PrivateAttr(default=())
    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict)
    _texts: tuple[str, ...] = PrivateAttr(default=())

    @property
    def home(self) -> Path:
        """The recipe's folder, from which the paths in it go out."""
        return self._home

    @property
    def texts(self) -> tuple[str, ...]:
        """The TOML that it was read from: its own file's, then that of each recipe that it extends."""
        return self._texts

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know of the recipe's spelling: words that work for one more release."""
        return self._notices

    def problem_at(self, place: tuple[str, ...], message: str) -> str:
        """A problem with what is at `place`, e.g. ("stages", "scan"), after its file and line."""
        return located(self._origins.get(place[0], Origin(self._home, "")), place, message)

    @model_validator(mode="before")
    @classmethod
    def _with_stages(cls, table: Any) -> Any:
        if not isinstance(table, dict) or "stages" in table:
            return table
        families = table.get("family")
        listed = families if isinstance(families, list | tuple) else ()
        actions = [family.get("action") for family in listed if isinstance(family, dict)]
        return {**table, "stages": standard_stages(actions, bool(table.get("source")))}

    @model_validator(mode="after")
    def _staged(self) -> Recipe:
        """An action whose stage may be left out of the DAG needs it there."""
        rewrite = self.stages.get("rewrite")
        for family in self.family:
            stage = ACTIONS[family.action].stage
            if stage and rewrite and stage not in rewrite.needs:
                raise ValueError(
                    f"family {family.name!r} has action {family.action!r}: [stages] must have {stage} = "
                    f'{{ needs = ["classify"] }}, and rewrite must need it; without [stages] both are so'
                )
        return self

    @model_validator(mode="after")
    def _bounded(self) -> Recipe:
        globs = [glob for table in (*self.family, *self.fused, *self.parallel) for glob in table.match]
        globs += [glob for table in self.source for glob in table.names]
        if (whole := sum(map(count, globs))) > _GLOBS_MAX:
            raise ValueError(
                f"its tables stand for {whole} globs; {_GLOBS_MAX} is the limit, write `*` for what is numbered"
            )
        return self

    @model_validator(mode="after")
    def _with_sources(self) -> Recipe:
        classify = self.stages.get("classify")
        if self.source and classify and "sources" not in classify.needs:
            raise ValueError(
                '[[source]]: [stages] must have sources = { needs = ["scan"] }, and classify and index must need it; '
                "without [stages] it is so"
            )
        return self

    @model_validator(mode="after")
    def _distinct(self) -> Recipe:
        for kind, tables in (("family", self.family), ("source", self.source)):
            names = [table.name for table in tables]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(
                    f"duplicate {kind} name: {', '.join(twice)}; each {kind} needs a name of its own"
                )
        return self
