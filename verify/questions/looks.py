"""What the one pass over the data looks for in each tensor, and what is asked of the sights afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardmill.verify.formats.by_elements import zeros_by_absmax
from shardmill.verify.formats.linear import FLAT, Linear
from shardmill.verify.formats.look import Plan, Sightings, block_bytes
from shardmill.verify.formats.values import float_rules, value_rules
from shardmill.verify.questions.dead_data import (
    NORM_RUN_BYTES_MIN,
    as_published,
    is_norm,
    judged_for_zeros,
    norm_faults,
    zero_faults,
)
from shardmill.verify.questions.index_values import index_faults
from shardmill.verify.questions.twins import twin_faults
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.open_files import OpenFiles
from shardmill.verify.rules.findings import Finding

_BYTES = ("F8_E4M3", "F8_E8M0", "U8")


def plans_of(checkpoint: Checkpoint, linears: Mapping[str, Linear]) -> dict[str, Plan]:
    """Tensor -> what to look for in it; tensors in which nothing can be wrong by itself are left out."""
    tensors = checkpoint.tensors
    laws = value_rules(linears, tensors)
    by_weight = {linear.weight.name: linear for linear in linears.values() if linear.weight is not None}
    grids = {
        linear.grid.name
        for linear in linears.values()
        if linear.grid is not None and linear.grid.dtype in _BYTES
    }
    laws |= float_rules(tensors, laws.keys() | by_weight.keys())
    plans = {
        name: Plan(tensors[name], law, scales=name in grids)
        for name, law in laws.items()
        if name not in by_weight
    }
    for name, tensor in tensors.items():
        linear = by_weight.get(name)
        if linear is not None or len(tensor.shape) > 1:
            runs = judged_for_zeros(tensor, by_weight)
            if runs or linear is not None:
                in_block = block_bytes(linear) if linear is not None else 0
                plans[name] = Plan(tensor, laws.get(name), runs, block_bytes=in_block, scales=name in grids)
        elif is_norm(tensor):
            plans[name] = Plan(tensor, laws.get(name), True, NORM_RUN_BYTES_MIN)
    return plans


def sight_faults(
    checkpoint: Checkpoint, linears: Mapping[str, Linear], sightings: Sightings
) -> Iterator[Finding]:
    """What the sights of the whole pass come to: dead data, blocks without their scales, indices out of range."""
    vouched: set[str] = set()
    if sightings.zero_blocks or sightings.zero_scales:
        from shardmill.verify.questions.block_scales import block_faults, block_looks

        for look in block_looks(checkpoint, linears.values(), sightings):
            yield from block_faults(look)
            name = look.matrix.tensor.name
            if look.vouches(sightings.runs.get(name, ())):
                vouched.add(name)
    vouched |= _by_absmax(checkpoint, linears, sightings)
    norms = {name for name in sightings.runs if is_norm(checkpoint.tensors[name])}
    yield from as_published(checkpoint, zero_faults(checkpoint, sightings, vouched | norms))
    yield from as_published(checkpoint, norm_faults(checkpoint, sightings, norms))
    yield from index_faults(checkpoint, linears)
    yield from twin_faults(checkpoint, sightings)


def _by_absmax(checkpoint: Checkpoint, linears: Mapping[str, Linear], sightings: Sightings) -> set[str]:
    """Weights of bitsandbytes' with stretches of zeros that their absmax explains."""
    suspects = [
        linear
        for linear in linears.values()
        if linear.kind in FLAT and linear.weight is not None and linear.weight.name in sightings.runs
        if all(
            checkpoint.readable(t) for t in (linear.weight, *linear.scales.values(), *linear.extras.values())
        )
    ]
    with OpenFiles(checkpoint.source) as opened:
        return {
            linear.weight.name
            for linear in suspects
            if linear.weight is not None
            and zeros_by_absmax(linear, opened, sightings.runs[linear.weight.name])
        }
