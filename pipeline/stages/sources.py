"""Stage `sources`: tensors that the recipe takes from other checkpoints join the parent, or take its tensors' place.

    [[source]]
    name = "base"                              # --source base=DIR says where, or `path`, or repository and revision
    names = ["model.layers.61.**"]             # as the source calls them

Headers alone are read. Whatever is not plain is refused before any byte: a name that two sources give or that one
lacks, a shape that is not the parent's own, files that would get one name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardmill.pipeline.container.weight_files import weight_files
from shardmill.pipeline.errors import CheckpointError, PlanError
from shardmill.pipeline.recipe.globs import GlobSet, fold, nearest
from shardmill.pipeline.recipe.tables import FurtherParent
from shardmill.pipeline.stages.job import Checkpoint
from shardmill.pipeline.types import Header, Parent, Shape, Stat, TensorOrigin, TensorRef

_SHOWN = 5  # problems of one kind that are listed
# Weights that an element of a stored dtype holds, where it may be another number than one.
_WEIGHTS_HELD: Mapping[str, tuple[int, ...]] = {"U8": (1, 2), "I8": (1, 2), "I32": (1, 8)}
_SCALES = ("_scale", "_scale_inv", "_scale_2", ".scale", ".scales", "_scales", ".qzeros", "_global_scale")


def sources(checkpoint: Checkpoint, parent: Parent) -> Parent:
    """The parent with the tensors of every [[source]]. Raises PlanError or CheckpointError, with all problems found."""
    given = [_read(table, checkpoint.sources[table.name]) for table in checkpoint.recipe.source]
    problems = [problem for each in given for problem in _unmatched(each, parent)]
    problems += _capped(_claimed_twice(given), "names that two sources give")
    problems += _capped(_lacking(given, parent), "names that a source lacks")
    problems += _capped(_other_shapes(given, parent), "tensors of another shape")
    if problems:
        raise PlanError(problems)
    return _joined(parent, given)


@dataclass(frozen=True, slots=True)
class _Given:
    """A source as its headers declare it. taken: its own name -> the child's."""

    table: FurtherParent
    folder: Path
    headers: tuple[Header, ...]  # of the files that hold something that is taken
    stats: Mapping[str, Stat]
    names: tuple[str, ...]  # of all its tensors
    taken: Mapping[str, str]

    def refs(self) -> Iterator[TensorRef]:
        """What is taken, as its files have it."""
        return (ref for header in self.headers for ref in header.tensors if ref.name in self.taken)


def _read(table: FurtherParent, folder: Path) -> _Given:
    try:
        headers, stats, _ = weight_files(folder)
    except CheckpointError as error:
        raise CheckpointError(f"source {table.name!r}, {folder}: {error}") from None
    globs = GlobSet(table.globs())
    names = tuple(ref.name for header in headers for ref in header.tensors)
    taken = {name: table.renamed(name) for name in names if globs.matches(name)}
    holding = tuple(header for header in headers if any(ref.name in taken for ref in header.tensors))
    return _Given(table, folder, holding, stats, names, taken)


def _unmatched(given: _Given, parent: Parent) -> Iterator[str]:
    """Globs that no tensor of the source matches, and a place that is the parent's own."""
    table = given.table
    if given.folder.resolve() == parent.folder.resolve():
        yield f"source {table.name!r}: {given.folder} is the parent itself; give another folder"
    for glob in table.globs():
        matching = GlobSet([glob])
        if not any(matching.matches(name) for name in given.taken):
            close = nearest(glob, given.names)
            hint = f"; the nearest names are {', '.join(close)}" if close else ""
            yield f"source {table.name!r}: the glob {glob!r} matches no tensor of {given.folder}{hint}"
    if table.rename and not any(name.startswith(table.rename.from_) for name in given.taken):
        yield f"source {table.name!r}: no name that is taken begins with {table.rename.from_!r}, which `rename` names"


def _claimed_twice(given: Sequence[_Given]) -> Iterator[str]:
    owner: dict[str, str] = {}
    for each in given:
        for own, name in each.taken.items():
            mine = f"source {each.table.name!r} ({own})"
            if name in owner:
                yield f"{name}: {owner[name]} and {mine} both give it; narrow the `names` of one"
            owner[name] = mine


def _lacking(given: Sequence[_Given], parent: Parent) -> Iterator[str]:
    """Tensors of the parent that a rule means too, but of which the source has none: half a family would be taken."""
    for each in given:
        globs = GlobSet(each.table.globs())
        back = {name: own for own, name in each.taken.items()}
        for name in parent.tensors:
            if each.table.rename is None and name not in back and globs.matches(name):
                yield (
                    f"{name}: the `names` of source {each.table.name!r} match it, and {each.folder} has no such "
                    f"tensor; narrow them, or give a source that has it"
                )


def _other_shapes(given: Sequence[_Given], parent: Parent) -> Iterator[str]:
    """Weights whose shape is neither that of the parent's tensor nor, where it has none, of one of the same kind."""
    siblings: dict[str, list[TensorRef]] = {}
    for ref in parent.tensors.values():
        siblings.setdefault(fold(ref.name), []).append(ref)
    for each in given:
        for ref in each.refs():
            name = each.taken[ref.name]
            own = parent.tensors.get(name)
            known = [own] if own else siblings.get(fold(name), [])
            if known and not any(_one_shape(ref, other) for other in known):
                example = known[0]
                yield (
                    f"{name}: is {ref.dtype} {list(ref.shape)} in source {each.table.name!r}, where the parent's "
                    f"{example.name} is {example.dtype} {list(example.shape)}; give a source of the same model"
                )


def _one_shape(ref: TensorRef, other: TensorRef) -> bool:
    """Whether two tensors can be the same weight, each stored in its way. Scales say nothing but in one dtype."""
    if ref.dtype == other.dtype:
        return ref.shape == other.shape or ref.name.endswith(_SCALES)
    if ref.name.endswith(_SCALES):
        return True
    return bool(_weight_shapes(ref) & _weight_shapes(other))


def _weight_shapes(ref: TensorRef) -> set[Shape]:
    """The shapes that the weight may have of which `ref` holds the codes."""
    if not ref.shape:
        return {()}
    return {(*ref.shape[:-1], ref.shape[-1] * held) for held in _WEIGHTS_HELD.get(ref.dtype, (1,))}


def _joined(parent: Parent, given: Sequence[_Given]) -> Parent:
    taken = {name for each in given for name in each.taken.values()}
    headers = [*(_hidden(header, taken) for header in parent.headers)]
    unused = {f":{name}" for name in taken if name in parent.tensors}
    stats, others = dict(parent.stats), dict(parent.others)
    origins = dict(parent.origins)
    for each in given:
        source = each.table.name
        for header in each.headers:
            file = f"{source}:{header.shard}"
            refs = tuple(_named(ref, each, file) for ref in header.tensors)
            headers.append(replace(header, shard=file, tensors=refs))
            unused |= {ref.name for ref in refs if ref.name.startswith(f"{source}:")}
            stats[file], others[file] = each.stats[header.shard], each.folder / header.shard
        origins |= {name: TensorOrigin(source, own) for own, name in each.taken.items()}
    return replace(
        parent,
        headers=tuple(headers),
        stats=stats,
        others=others,
        origins=origins,
        unused=parent.unused | unused,
    )


def _hidden(header: Header, taken: set[str]) -> Header:
    """A header of the parent's in which what a source gives is out of the way."""
    refs = tuple(ref._replace(name=f":{ref.name}") if ref.name in taken else ref for ref in header.tensors)
    return replace(header, tensors=refs)


def _named(ref: TensorRef, given: _Given, file: str) -> TensorRef:
    name = given.taken.get(ref.name, f"{given.table.name}:{ref.name}")
    return ref._replace(name=name, shard=file)


def _capped(problems: Iterable[str], kind: str) -> list[str]:
    found = list(problems)
    more = len(found) - _SHOWN
    return found if more <= 0 else [*found[:_SHOWN], f"... and {more} more {kind}"]
