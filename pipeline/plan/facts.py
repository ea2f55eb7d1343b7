"""A plan as one JSON object, and where each output tensor comes from."""

from __future__ import annotations

from typing import Any

from shardmill.pipeline.plan.types import Plan
from shardmill.pipeline.types import Parent, TensorOrigin


def plan_json(plan: Plan, parent: Parent) -> dict[str, Any]:
    """The plan as `shardmill plan --json` prints it; the same for the same recipe and headers."""
    return {
        "parent": {
            "files": len(parent.own_headers),
            "tensors": len(parent.tensors),
            "tensor_bytes": parent.tensor_bytes,
            "file_bytes": parent.file_bytes,
        },
        "output": {
            "files": len(plan.shards),
            "tensors": plan.tensors,
            "tensor_bytes": plan.tensor_bytes,
            "file_bytes": plan.file_bytes,
        },
        "converted": len(plan.conversions),
        "families": {
            family.name: {
                "action": family.action,
                "tensors": family.tensors,
                "bytes_before": family.bytes_before,
                "bytes_after": family.bytes_after,
                "scale_bytes": family.scale_bytes,
                "block": list(family.block) if family.block else None,
                "reason": family.reason,
            }
            for family in plan.families
        },
        "files_rewritten": [shard.file for shard in plan.shards if shard.rewritten],
        "config_entries": plan.config_entries,
        "loads_at": {str(at.tensor_parallel): at.reason or "yes" for at in plan.loads},
        "dropped": list(plan.dropped),
        "side_files": {
            "passed_on": {name: parent.stats[name][0] for name in parent.carried},
            "left": {
                name: {"bytes": each.bytes, "reason": each.reason} for name, each in parent.left.items()
            },
        },
        **_origins_json(plan, parent),
        "key": plan.key,
    }


def _origins_json(plan: Plan, parent: Parent) -> dict[str, Any]:
    """What other checkpoints give, where the recipe names any: source -> what is taken, output tensor -> its origin."""
    if not plan.sources:
        return {}
    own = {parent.own_name(ref.name) for header in parent.own_headers for ref in header.tensors}
    taken: dict[str, list[str]] = {name: [] for name in plan.sources}
    for name, origin in plan.origins.items():
        taken[origin.source].append(name)
    return {
        "sources": {
            source: {
                "repository": plan.sources[source][0],
                "revision": plan.sources[source][1],
                "tensors": len(names),
                "replaced": sum(name in own for name in names),
                "bytes": sum(parent.tensors[name].bytes for name in names),
            }
            for source, names in taken.items()
        },
        "origins": {
            output: {"source": origin.source, "tensor": origin.name}
            for output, origin in output_origins(plan).items()
        },
    }


def output_origins(plan: Plan) -> dict[str, TensorOrigin]:
    """Output tensor -> its origin, of those that another checkpoint than the parent gives."""
    return {
        piece.ref.name: plan.origins[piece.source.name]
        for shard in plan.shards
        for piece in shard.pieces
        if piece.source.name in plan.origins
    }
