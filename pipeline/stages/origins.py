"""What must come from one checkpoint: a weight's codes and all its scales, and weights that a runtime fuses.

Another parent's scales would decode codes to numbers that nobody made; so what is kept of two parents in one weight is
refused. A part that the recipe drops takes no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from shardmill.pipeline.formats import formats
from shardmill.pipeline.formats.module import MAIN
from shardmill.pipeline.plan.types import Assignment
from shardmill.pipeline.recipe.globs import fused_instances
from shardmill.pipeline.recipe.tables import Fused
from shardmill.pipeline.types import Parent, TensorRef

_FLOATS = ("BF16", "F16", "F32")


def mixed_origins(
    assignments: Sequence[Assignment], groups: Sequence[Fused], parent: Parent
) -> Iterator[str]:
    """A sentence for each weight, or fused group, that would be put together from two checkpoints."""
    if not parent.origins:
        return
    held = {each.source.name: each.source for each in assignments if each.action.kind != "drop"}
    consumed = {ref.name: ref for each in assignments for ref in (each.scales, *each.reads) if ref}
    yield from _torn_weights({**held, **consumed}, parent)
    for group in groups:
        for instance, present in fused_instances(group.globs(), held).items():
            yield from _torn_group(group, instance, [held[name] for name in present.values()], parent)


def _torn_weights(held: Mapping[str, TensorRef], parent: Parent) -> Iterator[str]:
    for name in held:
        for weight in _weights_of(name):
            if weight in held and _origin(weight, parent) != _origin(name, parent):
                yield (
                    f"{weight}: comes from {_origin(weight, parent)}, but {name}, which belongs to it, from "
                    f"{_origin(name, parent)}; take both from one, or drop the one that nothing needs"
                )


def _weights_of(name: str) -> Iterable[str]:
    """The names that the weight may have of which `name` is a further part, if it is one."""
    found = []
    for form in formats().values():
        for spelling in form.spellings:
            main = next((spelling.ends[role] for role in MAIN if role in spelling.ends), "")
            ends = [end for role, end in spelling.ends.items() if role not in MAIN]
            found += [name.removesuffix(end) + main for end in ends if name.endswith(end)]
    # Published under the weight's own name, whatever the format: DeepSeek's scales, a stack's without `.weight`.
    found += [name.removesuffix(end) for end in ("_scale_inv", "_scale", "_scale_2") if name.endswith(end)]
    return dict.fromkeys(found)


def _torn_group(
    group: Fused, instance: tuple[str, ...], members: Sequence[TensorRef], parent: Parent
) -> Iterator[str]:
    """Members of one kind may come from several checkpoints; of two kinds no runtime can fuse them."""
    origins = {_origin(ref.name, parent) for ref in members}
    kinds = {"float" if ref.dtype in _FLOATS else ref.dtype for ref in members}
    if len(origins) > 1 and len(kinds) > 1:
        told = "; ".join(f"{ref.name} ({ref.dtype}) from {_origin(ref.name, parent)}" for ref in members)
        where = ", ".join(instance) or "the top"
        yield (
            f"fused group {group.name!r} at {where}: {told}; a runtime fuses them, so take all of them from one "
            f"checkpoint"
        )


def _origin(name: str, parent: Parent) -> str:
    origin = parent.origins.get(name)
    return f"source {origin.source!r}" if origin else "the parent"
