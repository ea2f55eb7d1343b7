"""Modules that a serving engine fuses into one: what one member is, all must be.

Rows of one literal table: the fused module's name in vLLM, its members by the last part of their names in the order
of the fused rows, and how each is spread over tensor-parallel ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Group(NamedTuple):
    fused: str
    members: tuple[str, ...]
    only_with: str  # a member of this name must be there, else another row holds


GROUPS = (
    Group("in_proj_qkvbfg_a", ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"), "f_a_proj"),
    Group("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa"), "kv_a_proj_with_mqa"),
    Group("qkv_proj", ("q_proj", "k_proj", "v_proj"), "k_proj"),
    Group("gate_up_proj", ("gate_proj", "up_proj"), "gate_proj"),
    Group("w13", ("w1", "w3"), "w3"),
)

# How a module's rows or columns are cut over ranks, by the last part of its name; others are not cut.
COLUMN_PARALLEL = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "b_proj", "q_b_proj", "kv_b_proj", "f_b_proj", "g_b_proj"),
        *("gate_proj", "up_proj", "w1", "w3", "lm_head", "qkv"),
    )
)
ROW_PARALLEL = frozenset(("o_proj", "down_proj", "w2", "proj"))

PART_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole dotted part


def kind_of(name: str) -> str:
    """The name with its numbers taken out: the same for one module of all layers and experts."""
    return PART_NUMBER.sub("#", name)


def fused_groups(modules: Iterable[str]) -> Iterator[tuple[str, Group, dict[str, str]]]:
    """(parent, group, member -> module) of each fused module, whole or with members missing.

    Which row holds is decided by the members that parents of one kind have together, and a parent that has no more
    than half of them is of another build (an attention layer of q, k, v beside KDA layers); of two, one is enough.
    """
    by_parent: dict[str, dict[str, str]] = {}
    kinds: dict[str, dict[str, dict[str, str]]] = {}  # kind of the parent -> its parents' leaves
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        by_parent.setdefault(parent, {})[leaf] = module
    for parent, leaves in by_parent.items():
        kinds.setdefault(kind_of(parent), {})[parent] = leaves
    for parents in kinds.values():
        builds = {tuple(leaves) for leaves in parents.values()}
        together = {leaf for build in builds for leaf in build}
        found = {build: list(_groups_of(frozenset(build), together)) for build in builds}
        for parent, leaves in parents.items():
            for group, members in found[tuple(leaves)]:
                yield parent, group, {member: leaves[member] for member in members}


def _groups_of(leaves: frozenset[str], together: set[str]) -> Iterator[tuple[Group, list[str]]]:
    """(group, its members that are there) of a parent with these leaves."""
    taken: set[str] = set()
    for group in GROUPS:
        present = [member for member in group.members if member in leaves]
        enough = 2 * len(present) > len(group.members) or (len(group.members) == 2 and present)
        if enough and group.only_with in together and taken.isdisjoint(present):
            taken.update(present)
            yield group, present


def fused_names(module: str) -> Iterator[str]:
    """Names of fused modules that may take this one."""
    parent, _, leaf = module.rpartition(".")
    for group in GROUPS:
        if leaf in group.members:
            yield f"{parent}.{group.fused}"
