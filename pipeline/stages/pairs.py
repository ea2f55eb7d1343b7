"""What belongs together: codes and their scales, and the two halves of a fused NVFP4 expert. Half a pair is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardmill.pipeline.actions import Action, Reconcile
from shardmill.pipeline.plan.sources import pair_of, scales_beside
from shardmill.pipeline.plan.types import Assignment
from shardmill.pipeline.types import TensorRef


def torn_pairs(assignments: Sequence[Assignment], tensors: Mapping[str, TensorRef]) -> Iterable[str]:
    """A sentence for each tensor that is taken from what it belongs to."""
    used = {id(each.action): each.action for each in assignments}.values()
    if not any(action.kind in ("drop", "move") or isinstance(action, Reconcile) for action in used):
        return
    actions = {each.source.name: each.action for each in assignments}
    moved = {name for name, action in actions.items() if action.kind in ("drop", "move")}
    bases = {
        name[: name.rfind("_scale")] for name in moved if "_scale" in name
    }  # weights whose scales are moved
    for each in assignments:
        if isinstance(each.action, Reconcile):
            yield from _half_reconciled(each.source, actions, tensors)
        elif each.source.name in moved or (each.action.kind == "copy" and each.source.name in bases):
            yield from _without_scales(each, actions, tensors)


def _half_reconciled(
    scale: TensorRef, actions: Mapping[str, Action], tensors: Mapping[str, TensorRef]
) -> Iterable[str]:
    left = [ref.name for ref in pair_of(scale, tensors) if not isinstance(actions.get(ref.name), Reconcile)]
    if left:
        yield (
            f"{scale.name}: is reconciled without {left[0]}; a pair has two global and two block scales, "
            f"so give all four this family, or none"
        )


def _without_scales(
    each: Assignment, actions: Mapping[str, Action], tensors: Mapping[str, TensorRef]
) -> Iterable[str]:
    for scale in scales_beside(each.source, tensors):
        action = actions.get(scale.name)
        if action is None or action.kind not in ("copy", "drop", "move"):
            continue
        weight = [name for name, *_ in each.action.outputs(each.source)]
        wanted = [name + scale.name.removeprefix(each.source.name) for name in weight]
        if [name for name, *_ in action.outputs(scale)] != wanted:
            yield (
                f"{each.source.name}: is {each.action.words()}, but its scales {scale.name} are {action.words()}; "
                f"codes mean nothing without their scales, so treat both alike"
            )
