"""Blocks against their siblings: what one lacks and the others have, gaps in a stack, odd dtypes, layers too many."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from shardmill.verify.formats.fused import kind_of
from shardmill.verify.formats.linear import FLOATS
from shardmill.verify.questions.lint_names import Names
from shardmill.verify.questions.stacks import BUILDS_MAX, Stack, lacking
from shardmill.verify.questions.tied import TEXT_PARTS
from shardmill.verify.reading.header import Tensor
from shardmill.verify.rules.findings import Finding

DRAFT = re.compile(r"(^|\.)(eh_proj|enorm|hnorm|shared_head|mtp|nextn)(\.|$)")
DRAFT_PARTS = ("enorm", "hnorm", "eh_proj")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
TOWER = re.compile(r"(^|\.)(vision|visual|audio|image|speech|siglip|vit|encoder)")
LIST_MIN = 3  # blocks from which on a gap is no chance
GAPS_MAX = 20
BEYOND_MAX = 20
NAMED = 4


def sibling_faults(names: Names) -> Iterator[Finding]:
    stacks = names.stacks.by_name if names.whole else {}
    for stack in stacks.values():
        yield from _lacking(stack)
        yield from _gaps(stack)
    trunk = max(stacks.values(), key=lambda stack: len(stack.blocks), default=None)
    if trunk is not None:
        yield from _drafts(names, trunk)
    yield from _dtypes(names.checkpoint.tensors)


def _lacking(stack: Stack) -> Iterator[Finding]:
    if len(stack.blocks) < LIST_MIN or not stack.of_modules:
        return
    for number, kinds, siblings in lacking(stack):
        shown = ", ".join(kinds[:NAMED]) + (f" and {len(kinds) - NAMED} more" if len(kinds) > NAMED else "")
        expected = f"{shown}, as {siblings:,} siblings have"
        file = next(iter(stack.blocks[number].values())).file
        yield Finding("sibling-lacks", file, f"{stack.name}.{number}", expected, "none")


def judges_gaps(stack: Stack) -> bool:
    return not stack.name.endswith("layers") and stack.of_modules and len(stack.blocks) >= LIST_MIN


def _gaps(stack: Stack) -> Iterator[Finding]:
    """Blocks 0, 1, 3: of stacks whose blocks are of one or two builds; the trunk's are counted by `layers_whole`."""
    numbers = stack.blocks
    if not judges_gaps(stack):
        return
    if 2 * max(len(same) for same in stack.builds.values()) < len(numbers):
        return
    if max(numbers) - min(numbers) > 2 * len(numbers):
        return
    gaps = [number for number in range(min(numbers), max(numbers)) if number not in numbers]
    if len(gaps) <= min(GAPS_MAX, len(numbers) // 2):
        for number in gaps:
            expected = f"blocks {min(numbers)} to {max(numbers)}"
            yield Finding("layer-missing", "", f"{stack.name}.{number}", expected, "none of its tensors")


def _layers_of(names: Names, stack: str) -> int:
    """How many layers config.json says that a stack has: of a tower, its own part of the config; 0 = it does not."""
    for key, part in names.checkpoint.config.items():
        tower = key.removesuffix("_config")
        if (
            key not in TEXT_PARTS
            and isinstance(part, dict)
            and tower != key
            and re.search(rf"\b{re.escape(tower)}", stack)
        ):
            value = next((part[word] for word in (*LAYERS, "depth") if type(part.get(word)) is int), 0)
            return int(value)
    of_a_tower = names.text_config is not names.checkpoint.config and TOWER.search(stack)
    return 0 if of_a_tower else names.count(*LAYERS)


def _drafts(names: Names, trunk: Stack) -> Iterator[Finding]:
    """Blocks beyond num_hidden_layers are drafts, and whole: a trunk layer with what joins it to the trunk."""
    layers = _layers_of(names, trunk.name)
    beyond = sorted(number for number in trunk.blocks if layers and number >= layers)[:BEYOND_MAX]
    if (
        not beyond
        or len(trunk.builds) > BUILDS_MAX
        or trunk.name.count(".") > 3
        or trunk.name.rpartition(".")[2] not in ("layers", "h", "blocks", "layer")
    ):
        return
    inside = [
        {kind.split(".")[0] for kind in kinds if kind.count(".") > 1}
        for kinds in {kinds for number, kinds in trunk.sets.items() if number < layers}
    ]
    wanted = set.intersection(*inside) if inside else set()  # such as attention and MLP
    for number in beyond:
        kinds = trunk.sets[number]
        parts = {part for part in DRAFT_PARTS if any(kind.startswith(f"{part}.") for kind in kinds)}
        name = f"{trunk.name}.{number}"
        file = next(iter(trunk.blocks[number].values())).file
        if not any(DRAFT.search(kind) for kind in kinds):
            if not names.count("num_nextn_predict_layers", "mtp_num_hidden_layers"):
                yield Finding(
                    "layer-beyond",
                    file,
                    name,
                    f"layers 0 to {layers - 1}, as num_hidden_layers says",
                    "one more",
                )
            continue
        absent = ["eh_proj"] if parts and "eh_proj" not in parts else []
        lost = sorted(wanted - {kind.split(".")[0] for kind in kinds})
        if absent or lost:
            said = ", ".join([*absent, *lost][:NAMED])
            yield Finding("sibling-lacks", file, name, f"{said}, as a whole MTP layer has", "none")


def _dtypes(tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Of one kind, one float dtype: a label exchanged or a scale stored in another dtype shows here alone."""
    leaves: dict[
        str, set[str]
    ] = {}  # the last part of a name -> float dtypes: only where two are is there a kind to see
    for name, tensor in tensors.items():
        if tensor.dtype in FLOATS:
            leaves.setdefault(name[name.rfind(".") + 1 :], set()).add(tensor.dtype)
    mixed = {leaf for leaf, dtypes in leaves.items() if len(dtypes) > 1}
    kinds: dict[str, dict[str, list[str]]] = {}
    for name, tensor in tensors.items() if mixed else ():
        if tensor.dtype in FLOATS and name[name.rfind(".") + 1 :] in mixed:
            kinds.setdefault(kind_of(name), {}).setdefault(tensor.dtype, []).append(name)
    for kind, found in kinds.items():
        if len(found) == 1:
            continue
        usual = max(found, key=lambda dtype: len(found[dtype]))
        for dtype, members in found.items():
            if dtype != usual:
                expected = f"{usual}, as {len(found[usual]):,} of {kind} have"
                got = f"{dtype}, in {len(members):,} of this kind"
                yield Finding("sibling-dtype", tensors[members[0]].file, members[0], expected, got)
