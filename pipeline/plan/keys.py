"""The shard's key: the digest of all that can change its bytes, except the parent's data, which a receipt digests.

Every field of every action goes in, and which further tensors it reads. Outputs of the first release have keys of the
form before, which is computed here too, so that a file whose key proves as much as today's is not made again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from shardmill.pipeline.actions import Action, Copy, Dequantize, QuantizeBlock, Reconcile, Rename
from shardmill.pipeline.manifest.digest import key_of
from shardmill.pipeline.plan.types import Assignment, ShardPlan
from shardmill.pipeline.types import Header, TensorRef

SHARD_KEY_FORMAT = "shard/2"
_NONE: Mapping[str, Header] = MappingProxyType({})


def shard_key(
    source: Header, output: Header, assignments: Sequence[Assignment], others: Mapping[str, Header] = _NONE
) -> str:
    """The key of the file `output`, made from the parent's file `source`. Copies are what is not listed.

    others: the files of other checkpoints that it is made from too. Without any the key is what it was before.
    """
    known: dict[Action, list[Any]] = {}
    actions: dict[str, list[Any]] = {}
    for each in assignments:
        if type(each.action) is not Copy:
            key = known.get(each.action) or known.setdefault(each.action, each.action.key())
            actions[each.source.name] = [*key, [_read(ref) for ref in (each.scales, *each.reads) if ref]]
    whole = [SHARD_KEY_FORMAT, output.shard, output.digest, source.digest, source.file_bytes, actions]
    if others:
        files = {file: [header.digest, header.file_bytes] for file, header in others.items()}
        taken = {
            each.source.name: [each.source.shard, each.source.begin]
            for each in assignments
            if each.source.shard in others
        }
        whole.append({"files": files, "taken": taken})
    return key_of(whole)


def _read(ref: TensorRef) -> list[Any]:
    return [ref.name, ref.dtype, list(ref.shape)]


def former_shard_key(source: Header, shard: ShardPlan) -> str | None:
    """The key that the first release gave this shard; None where its form left out what an action depends on."""
    actions: dict[str, list[Any]] = {}
    for piece in shard.pieces:
        if type(piece.action) is not Copy:
            former = _former_action(piece.action)
            if former is None:
                return None
            actions[piece.source.name] = former
    return key_of([shard.file, shard.header.digest, source.digest, source.file_bytes, actions])


def _former_action(action: Action) -> list[Any] | None:
    """An action's part of the former key, where that held every field. Suffixes are in the output's header.

    Reblock is not among them: its `source_block` was left out.
    """
    match action:
        case QuantizeBlock():
            return [action.numerics, action.block.rows, action.block.cols]
        case Dequantize():
            return [action.numerics.replace("dequantize", "dequantise"), action.block.rows, action.block.cols]
        case Reconcile():
            return [action.numerics]
        case Rename():
            return [action.to]
    return None
