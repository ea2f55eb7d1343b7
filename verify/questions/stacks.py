"""Stacks of numbered blocks, whatever they are called: which weights each block has, with dtypes and shapes.

`model.layers.3.mlp.experts.7.up_proj.weight` is a weight of block 3 of the stack `model.layers`, of the kind
`mlp.experts.#.up_proj.weight`. Scales and other companions of codes are left out, and codes count as their weight,
so that blocks are compared by what they compute and not by how they are stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from shardmill.verify.formats.fused import kind_of
from shardmill.verify.formats.linear import EXTRAS, SCALE_DTYPES
from shardmill.verify.formats.schemes import split_name
from shardmill.verify.reading.header import Tensor

BUILDS_MAX = 64  # of one stack; more of them are no siblings
NAME_CHARS_MAX = 512

_BLOCK = re.compile(r"^(.*?)\.(\d{1,6})\.(.+)$")
_COMPANIONS = frozenset(
    (*SCALE_DTYPES, *EXTRAS, "k_scale", "v_scale", "q_scale", "biases", "weight_format", "SCB")
)
_PACKED = frozenset(("weight_packed", "qweight", "_blocks"))
_STATE = re.compile(r"\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+)$")


@dataclass
class Stack:
    """One stack: block number -> kinds of its weights, and for each kind one tensor of that block."""

    name: str
    blocks: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    @cached_property
    def sets(self) -> dict[int, frozenset[str]]:
        return {number: frozenset(kinds) for number, kinds in self.blocks.items()}

    @property
    def builds(self) -> dict[frozenset[str], list[int]]:
        """The sets of kinds that blocks have -> the blocks that have just these."""
        found: dict[frozenset[str], list[int]] = {}
        for number in sorted(self.sets):
            found.setdefault(self.sets[number], []).append(number)
        return found

    @property
    def of_modules(self) -> bool:
        """Whether its blocks hold modules, as layers do; a list of bare Linears may leave numbers out."""
        return any("." in kind for kinds in self.sets.values() for kind in kinds)


@dataclass(frozen=True, slots=True)
class Stacks:
    """The stacks of a checkpoint by name, and the tensors that are of none."""

    by_name: dict[str, Stack]
    alone: tuple[Tensor, ...]

    def representatives(self) -> Iterator[Tensor]:
        """One tensor of each kind of each stack, and every tensor of no stack: enough to judge words."""
        for stack in self.by_name.values():
            seen: set[str] = set()
            for kinds in stack.blocks.values():
                if not seen.issuperset(kinds):
                    yield from (tensor for kind, tensor in kinds.items() if kind not in seen)
                    seen.update(kinds)
        yield from self.alone


def stacks_of(tensors: Mapping[str, Tensor]) -> Stacks:
    stacks: dict[str, Stack] = {}
    alone: list[Tensor] = []
    known: dict[str, str] = {}  # the rest of a name within its block -> its kind: the same in every block
    for name, tensor in tensors.items():
        match = _BLOCK.match(name) if len(name) <= NAME_CHARS_MAX else None
        if match is None:
            alone.append(tensor)
            continue
        kind = known.get(match[3])
        if kind is None:
            kind = known[match[3]] = weight_kind(match[3])
        if kind:
            stack = stacks.get(match[1])
            if stack is None:
                stack = stacks[match[1]] = Stack(match[1])
            block = stack.blocks.setdefault(int(match[2]), {})
            block.setdefault(kind, tensor)
    return Stacks(stacks, tuple(alone))


def weight_kind(rest: str) -> str:
    """The kind of a weight within its block; "" for a scale or another companion of codes."""
    module, leaf = split_name(rest)
    if leaf in _COMPANIONS or _STATE.search(rest):
        return ""
    if leaf in _PACKED:
        return kind_of(f"{module}.weight")
    return kind_of(rest)


def lacking(stack: Stack) -> Iterator[tuple[int, list[str], int]]:
    """(block, kinds that it lacks, siblings that have them): blocks that are like most but for a few weights."""
    builds = stack.builds
    if len(builds) > BUILDS_MAX:
        return
    for kinds, numbers in builds.items():
        if len(numbers) > max(1, len(stack.blocks) // 10):
            continue
        likest = max(
            (other for other, same in builds.items() if kinds < other and len(same) > len(numbers)),
            key=lambda other: (-len(other - kinds), len(builds[other])),
            default=None,
        )
        if likest is not None and 4 * len(likest - kinds) <= 3 * len(likest):
            for number in numbers:
                yield number, sorted(likest - kinds), len(builds[likest])
