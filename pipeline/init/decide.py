"""Decisions: for each tensor whether it converts, with which block, and if not why. Whole fused groups at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmill.pipeline.formats import formats
from shardmill.pipeline.formats.base import Params
from shardmill.pipeline.formats.module import Held, base_name, held
from shardmill.pipeline.init.look import NATIVE, PACKED, children, home_of, rows_of, text_config
from shardmill.pipeline.init.stacks import Stack, expert_stacks
from shardmill.pipeline.init.vocabulary import AXES, GROUPS, Group, Row
from shardmill.pipeline.plan.profiles.child import FLOATS
from shardmill.pipeline.plan.profiles.modelopt import METHODS
from shardmill.pipeline.plan.profiles.truth import stated
from shardmill.pipeline.plan.sources import scales_of
from shardmill.pipeline.recipe.globs import GlobSet, expand, fold
from shardmill.pipeline.types import BlockShape, Parent, TensorRef

Aim = str  # "fp8" (in blocks), "bf16" (undoes what is quantized), or a format that can be written
SIZES_WANTED = (1, 2)  # tensor-parallel sizes that a block is chosen for
_TIED = "tie_word_embeddings is true: loaders take the embeddings in its place, and have no scales for it"
_SIDES = {"modelopt-mixed": (128, 64, 32)}  # a profile of many blocks may take a smaller one
_ONE_SIDE = (128,)
_USUAL_BLOCK = (128, 128)


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a tensor. block None: it is kept, for `reason`; source_block: it starts from the parent's FP8.

    to: the format that it is converted to; source: the parent's format that it is read from.
    """

    family: str
    block: BlockShape | None = None
    reason: str | None = None
    source_block: BlockShape | None = None
    to: str | None = None
    source: str | None = None
    drop: bool = False
    transposed: bool = False
    unstack: bool = False

    @property
    def converts(self) -> bool:
        return bool(self.block or self.source_block or self.to)


@dataclass(frozen=True, slots=True)
class Instance:
    """A fused group at one place of the model: its members' weights in order."""

    group: Group
    home: str
    members: tuple[str, ...]  # those that could convert
    missing: bool  # whether others of the group can't


def decide(parent: Parent, profile: str, aim: Aim, lossless: bool = False) -> dict[str, Decision]:
    """Tensor -> Decision, for every tensor of the parent. lossless: floats, which any format rounds, are kept."""
    rows, tensors = rows_of(parent), parent.tensors
    alone = _can_declare_no_more(rows, parent, profile)
    decisions = {name: _at_first(rows[name], tensors[name], parent, profile, aim) for name in tensors}
    if aim != "bf16":
        stacks = expert_stacks(tensors, str(text_config(parent.config).get("model_type")))
        chosen = {name: _stacked(stack, profile, aim) for name, stack in stacks.items()}
        if all(chosen.values()):
            decisions |= chosen
    if aim == "bf16":
        decisions |= undone(
            parent, [name for name, made in decisions.items() if not made or not made.source_block]
        )
    elif aim != "fp8":
        decisions |= recast(parent, profile, aim)
    if lossless and aim != "bf16":
        decisions = _without_rounding(decisions)
    if alone:
        kept = "the parent's own quantization and new FP8 can't both be declared by the profile " + repr(
            profile
        )
        decisions = {name: made or Decision("float Linears", reason=kept) for name, made in decisions.items()}
    candidates = [name for name, decision in decisions.items() if decision is None]
    instances = fused(parent, candidates)
    grouped = {name for instance in instances for name in instance.members}
    axes, shares = axes_of(candidates), kv_heads(parent)
    for instance in instances:
        whole = not instance.missing
        choice = _Choice(tensors, axes, shares, profile, aim)
        block = _block(instance.members, choice) if whole else None
        for name in instance.members:
            decisions[name] = _converts(rows[name], block, aim)
    for name in candidates:
        if name not in grouped:
            choice = _Choice(tensors, axes, shares, profile, aim)
            block = None if aim == "fp8" and _odd(tensors[name]) else _block((name,), choice)
            decisions[name] = _converts(rows[name], block, aim)
    made = {name: decision for name, decision in decisions.items() if decision is not None}
    return {**made, **_whole_banks(made)}


def _without_rounding(decisions: Mapping[str, Decision | None]) -> dict[str, Decision | None]:
    """The decisions of a lossless recipe: floats that would be rounded are kept."""
    floats = Decision("floats", reason="to round them is a loss, and the recipe is lossless")
    return {
        name: made if made is not None and (made.source or not made.converts) else floats
        for name, made in decisions.items()
    }


def _can_declare_no_more(rows: Mapping[str, Row], parent: Parent, profile: str) -> bool:
    """Whether the parent is quantized already in a way that the profile has no words for beside its own."""
    kinds, method = (
        set(map(id, rows.values())),
        stated(parent.config).get("quant_method"),
    )
    if id(PACKED) in kinds and not (profile == "modelopt-mixed" and method in METHODS):
        return True
    known = (PACKED, NATIVE)
    if any(ref.dtype.startswith("F8") and rows[name] not in known for name, ref in parent.tensors.items()):
        return True
    return id(NATIVE) in kinds and (profile == "compressed-tensors" or method != "fp8")


def _whole_banks(decisions: Mapping[str, Decision]) -> dict[str, Decision]:
    """Routed experts of a layer are one tensor to a runtime: where one of their matrices is kept, all are."""
    banks: dict[str, list[str]] = defaultdict(list)
    for name in decisions:
        if ".experts." in name:
            banks[name.partition(".experts.")[0]].append(name)
    kept = Decision(
        "routed experts", reason="runtimes hold a layer's experts as one, and no block fits all of them"
    )
    return {
        name: kept
        for bank in banks.values()
        if any(decisions[name].block for name in bank) and len({decisions[name].block for name in bank}) > 1
        for name in bank
        if decisions[name].block or "odd shape" in decisions[name].family
    }


def _at_first(row: Row, ref: TensorRef, parent: Parent, profile: str, aim: Aim) -> Decision | None:
    """The decision that a tensor's row and dtype alone take; None where its shape is to be seen."""
    if row is NATIVE:
        return _native(ref, parent, aim)
    if row.reason is not None:
        return Decision(row.family, reason=row.reason)
    if row.family == "lm_head" and is_tied(parent.config):
        return Decision("tied head", reason=_TIED)
    if aim == "bf16":
        if ref.dtype not in FLOATS:
            return Decision("other codes", reason="codes without F32 or BF16 scales of blocks: not undone")
        return Decision("floats", reason="no FP8: nothing to dequantize")
    if ref.dtype not in FLOATS or len(ref.shape) != 2:
        return Decision(f"{row.family} of other form", reason="no float matrix: passed through")
    if not row.stock and profile != "modelopt-mixed":
        return Decision(row.family, reason=f"loaders of the profile {profile!r} build it unquantized")
    return None


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether a config says that the output head is the embeddings' own matrix."""
    places = (config, text_config(config))
    return (
        next((each["tie_word_embeddings"] for each in places if "tie_word_embeddings" in each), None) is True
    )


def _native(ref: TensorRef, parent: Parent, aim: Aim) -> Decision:
    if aim != "bf16":
        return Decision(NATIVE.family, reason=NATIVE.reason)
    weight = next(
        (ref.name.removesuffix(end) for end in ("_scale_inv", "_scale") if ref.name.endswith(end)), ref.name
    )
    if weight not in parent.tensors:
        return Decision("scales of activations", reason="their weights are floats again", drop=True)
    codes = parent.tensors[weight]
    scales = scales_of(codes, parent.tensors)
    sides = stated(parent.config).get("weight_block_size") or (128, 128)
    block = BlockShape(*sides)
    if scales is None or block.grid(codes.shape) != scales.shape:
        return Decision(
            f"{NATIVE.family} of other blocks",
            reason="its scales do not fit the blocks that config.json declares",
        )
    return Decision("FP8 back to BF16", source_block=block)


def _odd(ref: TensorRef) -> bool:
    """Too small for a block, or with columns that end inside one, which some kernels refuse."""
    R, C = ref.shape
    return min(R, C) < _ONE_SIDE[0] or C % _ONE_SIDE[0] != 0


def _stacked(stack: Stack, profile: str, aim: Aim) -> Decision | None:
    """The decision for experts in one tensor: one tensor an expert, as makers publish them; None where unfit."""
    form = formats()["fp8-block" if aim == "fp8" else aim]
    spelling = form.spelling(profile)
    side = BlockShape(_ONE_SIDE[0], _ONE_SIDE[0]) if aim == "fp8" else None
    if spelling is None or spelling.entry is None or form.unfit(stack.shape, Params()):
        return None
    if side and (stack.shape[0] % side.rows or stack.shape[1] % side.cols):
        return None
    return Decision("stacks of experts", side, to=form.name, transposed=stack.transposed, unstack=True)


def undone(parent: Parent, names: Iterable[str]) -> dict[str, Decision]:
    """Tensor -> Decision, for the parts of every weight that can be read back to BF16, block FP8 of old names apart."""
    tensors, found = parent.tensors, {}
    for name in names:
        ref = tensors[name]
        if ref.dtype in FLOATS:
            continue
        weight = _read_as(ref, parent, _stated_block(parent))
        if weight is not None:
            decision = Decision(
                f"{weight.form.title} back to BF16",
                source=weight.form.name,
                to="bf16",
            )
            found.update({part.name: decision for part in weight.refs.values()})
            found.update(_static(name, weight, tensors))
    return found


def recast(parent: Parent, profile: str, aim: Aim) -> dict[str, Decision]:
    """Tensor -> Decision, for the parts of all quantized weights, where each has a way that keeps its codes."""
    target, found, left = formats()[aim], dict[str, Decision](), set[str]()
    spelling = target.spelling(profile)
    if not target.recasts or spelling is None or spelling.entry is None:
        return {}
    for name, ref in parent.tensors.items():
        if ref.dtype in FLOATS or len(ref.shape) < 2 or name in found:
            continue
        weight = _read_as(ref, parent, _stated_block(parent))
        if weight is None:
            left.add(name)
        elif (
            weight.form.name not in target.recasts
            or target.unfit(weight.shape[-2:], Params())
            or (weight.count > 1 and target.surveys)
        ):
            return {}
        else:
            side = BlockShape(*_USUAL_BLOCK) if aim == "fp8-block" else None
            title = f"{weight.form.title} as {target.title}"
            decision = Decision(title, side, source=weight.form.name, to=aim)
            found.update({part.name: decision for part in weight.refs.values()})
    return {} if left - set(found) else found


def _stated_block(parent: Parent) -> tuple[int, int]:
    sides = (parent.config.get("quantization_config") or {}).get("weight_block_size") or _USUAL_BLOCK
    return sides[0], sides[1]


def _read_as(ref: TensorRef, parent: Parent, block: tuple[int, int]) -> Held | None:
    """The weight of which `ref` is the main part, in whichever format it is; None where in none."""
    version_2 = (parent.config.get("quantization_config") or {}).get("checkpoint_format") == "gptq_v2"
    for form in formats().values():
        if form.name.startswith("gptq") and form.name.startswith("gptq-v2") != version_2:
            continue
        if form.name != "bf16":
            weight = held(form, ref, parent.tensors, Params(block), transposed=False)
            if isinstance(weight, Held):
                return weight
    return None


def _static(name: str, weight: Held, tensors: Mapping[str, TensorRef]) -> dict[str, Decision]:
    """Scales of activations beside a weight that will have no codes."""
    module = base_name(name, weight.spelling)
    dropped = Decision("scales of activations", reason="their weights are floats again", drop=True)
    ends = (".input_scale", ".input_global_scale", ".output_scale", ".activation_scale")
    return {module + end: dropped for end in ends if module + end in tensors}


def _converts(row: Row, block: BlockShape | None, aim: Aim) -> Decision:
    if block is not None and aim != "fp8":
        return Decision(row.family, to=aim)
    if block is None:
        reason = "no block of the profile fits its rows or columns, or those that runtimes fuse with it"
        return Decision(f"{row.family} of odd shape", reason=reason)
    return Decision(row.family, block)


@dataclass(frozen=True, slots=True)
class _Choice:
    """What the choice of a block looks at."""

    tensors: Mapping[str, TensorRef]
    axes: Mapping[str, str]
    kv: int | None
    profile: str
    aim: Aim


def _block(names: Sequence[str], choice: _Choice) -> BlockShape | None:
    """The largest block that cuts all of a group at whole blocks at the wanted sizes, or else on one rank.

    For another format than block FP8, the elements that a rank must get whole.
    """
    for sizes in (SIZES_WANTED, SIZES_WANTED[:1]):
        for block in _sides(names, choice):
            if all(_fits(name, names, choice, block, size) for name in names for size in sizes):
                return block
    return None


def _sides(names: Sequence[str], choice: _Choice) -> list[BlockShape]:
    if choice.aim == "fp8":
        return [BlockShape(side, side) for side in _SIDES.get(choice.profile, _ONE_SIDE)]
    form = formats()[choice.aim]
    shapes = [choice.tensors[name].shape for name in names]
    if any(form.unfit(shape, Params()) for shape in shapes):
        return []
    return [BlockShape(*form.rank_unit(shapes[0], Params()))]


def _fits(name: str, group: Sequence[str], choice: _Choice, block: BlockShape, size: int) -> bool:
    (rows, cols), axis, kv = choice.tensors[name].shape, choice.axes.get(name), choice.kv
    if axis == "rows":
        ranks = min(size, kv) if kv and deals_kv(name) else size
        if rows % ranks or (size > 1 and rows // ranks % block.rows):
            return False
        rows //= ranks
    if axis == "columns" and (cols % size or (size > 1 and cols // size % block.cols)):
        return False
    may_be_ragged = name == group[-1] and choice.profile != "fp8"  # on a CPU transformers refuses such rows
    return may_be_ragged or rows % block.rows == 0


def fused(parent: Parent, candidates: Iterable[str]) -> list[Instance]:
    """Every place where a fused group stands, the first of GROUPS that fits it."""
    wanted = set(candidates)
    found = []
    for home, inside in children(parent.tensors).items():
        tail = ".".join(fold(home).split(".")[-2:])
        for group in GROUPS:
            fits = tail == group.home or tail.endswith("." + group.home)
            if fits and inside.issuperset(group.members) and group.beside in (None, *inside):
                weights = [f"{home}.{member}.weight" for member in group.members]
                members = tuple(weight for weight in weights if weight in wanted)
                found += [Instance(group, home, members, len(members) < len(weights))] if members else []
                break
    return found


def axes_of(names: Iterable[str]) -> dict[str, str]:
    """Weight -> "rows" or "columns", the side that tensor-parallel ranks share out."""
    rows = [(glob, axis) for axis, globs in AXES.items() for written in globs for glob in expand(written)]
    matcher = GlobSet([glob for glob, _ in rows])
    return {name: rows[places[0]][1] for name in names if (places := matcher.matches(name))}


def kv_heads(parent: Parent) -> int | None:
    """The number of KV heads, where attention has fewer of them than query heads."""
    config = text_config(parent.config)
    kv, heads = config.get("num_key_value_heads"), config.get("num_attention_heads")
    return kv if isinstance(kv, int) and isinstance(heads, int) and 0 < kv < heads else None


def deals_kv(name: str) -> bool:
    """Whether a weight's rows are KV heads."""
    return home_of(name)[1] in ("k_proj", "v_proj")
