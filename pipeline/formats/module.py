"""A weight in a parent: which tensors hold its parts, in which spelling, and the names of what it becomes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardmill.pipeline.formats.base import FLOATS, Format, Params, Part, Shape, Spelling
from shardmill.pipeline.types import TensorRef

WEIGHT = ".weight"
MAIN = ("codes", "values")  # the role that a family's globs name a weight by


@dataclass(frozen=True, slots=True)
class Held:
    """One weight of a parent: its format, its parts there, and its own shape [..., R, C]."""

    form: Format
    spelling: Spelling
    params: Params
    refs: Mapping[str, TensorRef]  # role -> tensor
    parts: Mapping[str, Part]  # role -> the part as it is stored, its shape without a stack's axis
    shape: Shape

    @property
    def count(self) -> int:
        """How many matrices [R, C] it is: the experts of a stack, else 1."""
        return self.shape[0] if len(self.shape) > 2 else 1


def base_name(name: str, spelling: Spelling) -> str:
    """A weight's name without the end that its main part has there."""
    return name.removesuffix(end_of(name, spelling) or "")


def end_of(name: str, spelling: Spelling) -> str | None:
    """How a main part's name ends in this spelling, None where it doesn't: a stack of experts may lack `.weight`."""
    end = main_end(spelling)
    if name.endswith(end):
        return end
    bare = end.removeprefix(WEIGHT)
    return bare if is_bare_stack(name) and bare != end and name.endswith(bare) else None


def is_bare_stack(name: str) -> bool:
    """Whether a name is that of a part of experts in one tensor: `a.experts.down_proj`, `a.experts.down_proj_scale`."""
    home, _, own = name.rpartition(".")
    return (home == "experts" or home.endswith(".experts")) and not own.isdecimal()


def main_end(spelling: Spelling) -> str:
    return next(spelling.ends[role] for role in MAIN if role in spelling.ends)


def part_name(base: str, end: str, plain: bool) -> str:
    """`a.b` + `.weight_scale`; a stack without `.weight` (`plain`) has `a.b_scale`."""
    return base + (end.removeprefix(WEIGHT) if plain else end)


def is_further_part(name: str, form: Format) -> bool:
    """Whether a tensor's name is one of a quantized weight's parts other than the main one."""
    ends = {spelling.ends[role] for spelling in form.spellings for role in spelling.ends if role not in MAIN}
    bare = {end.removeprefix(WEIGHT) for end in ends} if is_bare_stack(name) else set()
    return any(name.endswith(end) for end in (*ends, *bare))


def held(
    form: Format, ref: TensorRef, tensors: Mapping[str, TensorRef], params: Params, transposed: bool
) -> Held | str:
    """The weight whose main part is `ref`, read as `form`; a string says why it is none."""
    if form.name == "bf16":
        return _floats(form, ref, params, transposed)
    reasons = []
    for spelling in form.spellings:
        found = _spelled(form, spelling, ref, tensors, params)
        if isinstance(found, Held):
            return found
        reasons.append(found)
    return max(reasons, key=len, default=f"can't be read as {form.name}")


def _floats(form: Format, ref: TensorRef, params: Params, transposed: bool) -> Held | str:
    if ref.dtype not in FLOATS:
        return f"is {ref.dtype}, no float; name its format with `source`, or keep it"
    if len(ref.shape) not in (2, 3) or 0 in ref.shape:
        return f"has shape {list(ref.shape)}; only matrices and stacks of them have a format, keep it"
    matrix = ref.shape[-2:]
    shape = (*ref.shape[:-2], *(reversed(matrix) if transposed else matrix))
    end = WEIGHT if ref.name.endswith(WEIGHT) else ""
    part = Part("values", ref.dtype, matrix, axis=1 if transposed else 0)
    return Held(form, Spelling("floats", {"values": end}), params, {"values": ref}, {"values": part}, shape)


def _spelled(
    form: Format, spelling: Spelling, ref: TensorRef, tensors: Mapping[str, TensorRef], params: Params
) -> Held | str:
    end = end_of(ref.name, spelling)
    if end is None:
        return f"does not end in {main_end(spelling)}, as the weights of {form.name} do"
    base, plain = ref.name.removesuffix(end), end != main_end(spelling)
    names = {role: part_name(base, other, plain) for role, other in spelling.ends.items()}
    refs = {role: tensors[name] for role, name in names.items() if name in tensors}
    if absent := [name for role, name in names.items() if role not in refs]:
        return f"has no {absent[0]} beside it, which {form.name} ({spelling.profile}) needs"
    shape = form.weight_shape(ref.shape, spelling)
    if len(shape) not in (2, 3) or 0 in shape:
        return f"has shape {list(ref.shape)}, which is no matrix of {form.name}"
    if form.group_of:
        params = replace(params, group=max(1, form.group_of(shape, refs["scales"].shape)))
    wanted = {part.role: part for part in form.stored(shape, params, spelling)}
    for role, part in wanted.items():
        found = refs[role]
        if not _alike(found, part):
            return (
                f"its part {found.name} is {found.dtype} {list(found.shape)}, where {form.name} ({spelling.profile}) "
                f"has {part.dtype} {list(part.shape)}; correct `source`"
            )
    stack = len(shape) - 2
    parts = {
        role: replace(part, shape=refs[role].shape[stack:], dtype=refs[role].dtype)
        for role, part in wanted.items()
    }
    return Held(form, spelling, params, refs, parts, shape)


_SAME_KIND = (frozenset(FLOATS), frozenset({"U8", "F8_E8M0"}), frozenset({"U8", "I8", "F4"}))


def _alike(ref: TensorRef, part: Part) -> bool:
    """Whether a tensor can be that part: its shape, but for axes of one, and its dtype or one that says the same."""
    dtypes = ref.dtype == part.dtype or any({ref.dtype, part.dtype} <= kind for kind in _SAME_KIND)
    return dtypes and _squeezed(ref.shape) == _squeezed(part.shape)


def _squeezed(shape: Shape) -> tuple[int, ...]:
    return tuple(side for side in shape if side != 1)


def targets(
    base: str, plain: bool, form: Format, spelling: Spelling, shape: Shape, params: Params
) -> Iterator[tuple[str, Part]]:
    """(name, part) of every tensor that a weight [..., R, C] becomes."""
    for part in form.stored(shape, params, spelling):
        yield part_name(base, spelling.ends[part.role], plain), part
