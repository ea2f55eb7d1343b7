"""Which output file gets a tensor that comes from another checkpoint than the parent.

One that the parent has too takes its place; one whose module the parent has goes beside that, so that scales are with
their weight. The rest gets files of its own, one for each file of its source, so that another source makes them
again and no others. Of a parent of one file without an index, that file holds everything.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardmill.pipeline.errors import PlanError
from shardmill.pipeline.types import SINGLE_FILE, Parent


def homes(parent: Parent) -> Mapping[str, str]:
    """Tensor -> output file, of every tensor in `parent.origins`."""
    if not parent.origins:
        return {}
    files, modules = _of_parent(parent)
    found: dict[str, str] = {}
    rest: dict[str, dict[str, list[str]]] = {}  # source -> its file -> tensors
    for name, origin in parent.origins.items():
        place = SINGLE_FILE if parent.single else files.get(name) or modules.get(_module(name))
        if place:
            found[name] = place
        else:
            rest.setdefault(origin.source, {}).setdefault(parent.tensors[name].shard, []).append(name)
    for source, by_file in rest.items():
        for number, file in enumerate(sorted(by_file), 1):
            target = f"model-{source}-{number:05d}-of-{len(by_file):05d}.safetensors"
            if target in parent.stats:
                raise PlanError(
                    [f"{target}: the parent has a file of that name; call the source {source!r} otherwise"]
                )
            found |= dict.fromkeys(by_file[file], target)
    return found


def _of_parent(parent: Parent) -> tuple[dict[str, str], dict[str, str]]:
    """The parent's own tensors and modules, and the files that they are in."""
    files = {
        parent.own_name(ref.name): header.shard for header in parent.own_headers for ref in header.tensors
    }
    return files, {_module(name): file for name, file in files.items()}


def _module(name: str) -> str:
    return name.rpartition(".")[0]
