"""Stage `index`: the index of the whole, cross-checked in both directions against what was really written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.manifest.records import Receipt
from shardmill.pipeline.plan.indented import indented
from shardmill.pipeline.plan.types import Plan
from shardmill.pipeline.stages.job import Checkpoint
from shardmill.pipeline.types import Parent


def index(checkpoint: Checkpoint, parent: Parent, plan: Plan, receipts: Sequence[Receipt]) -> bytes:
    """model.safetensors.index.json: two spaces, keys sorted, as the transformers library writes it.

    Raises BuildError where a tensor that was planned was not written, or the reverse, or the parent lost one
    that the plan does not declare.
    """
    written = {name: receipt.file for receipt in receipts for name in receipt.tensors}
    if written != (planned := plan.weight_map):
        name = min(set(written.items()) ^ set(planned.items()))[0]
        raise BuildError(
            f"{name}: planned in {planned.get(name, 'no file')}, written to {written.get(name, 'no file')}; "
            f"this is a fault of shardmill, report it"
        )
    if lost := set(parent.tensors) - set(written) - set(plan.dropped) - set(plan.renamed):
        raise BuildError(f"{min(lost)}: the parent holds it, the output does not, and no family drops it")
    return index_bytes(planned, plan.tensor_bytes)


def index_bytes(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """The index of `weight_map`; `total_size` counts tensor bytes, headers left out."""
    table = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return (indented(table) + "\n").encode()
