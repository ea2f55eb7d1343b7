"""A conversion that converts nothing: refused, since its result would be a copy under a name that promises more."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from shardmill.pipeline.plan.types import Assignment
from shardmill.pipeline.recipe.tables import Recipe
from shardmill.pipeline.types import Parent, TensorRef

_PROMISES = re.compile(
    r"(?:^|[^a-z0-9])(fp8|bf16|int8|int4|w4a16|w8a8|nvfp4|mxfp4|mxfp8|awq|gptq)(?:$|[^a-z0-9])"
)
_CODES = ("F8_", "U8", "I8", "F4", "I32", "F6_")


def nothing_done(recipe: Recipe, parent: Parent, assignments: Iterable[Assignment]) -> list[str]:
    """Why the recipe's name promises what it does not do; empty where it does something, or promises nothing."""
    promise = _PROMISES.search(recipe.name.lower())
    if promise is not None and promise[1] != "bf16" and holds_codes(parent.tensors):
        return []  # the parent is quantized already, and stays so
    if promise is None or any(each.action.kind != "copy" for each in assignments):
        return []
    sentence = (
        f"the recipe {recipe.name!r} converts nothing, so its result would be a copy under a name that promises "
        f"{promise[1]}; {why_nothing(parent.tensors)}; change its families, or its name"
    )
    return [sentence]


def holds_codes(tensors: Mapping[str, TensorRef]) -> bool:
    """Whether a parent has quantized weights."""
    return any(ref.dtype.startswith(_CODES) and len(ref.shape) > 1 for ref in tensors.values())


def why_nothing(tensors: Mapping[str, TensorRef]) -> str:
    """What a parent's weights are, and with it why none of them converts."""
    coded = Counter(
        ref.dtype for ref in tensors.values() if ref.dtype.startswith(_CODES) and len(ref.shape) > 1
    )
    if not coded:
        matrices = sum(len(ref.shape) == 2 for ref in tensors.values())
        return f"the parent has {matrices} matrices of floats, and none of them is a weight that can take the format"
    held = ", ".join(f"{count} {dtype}" for dtype, count in sorted(coded.items()))
    scales = sorted(
        {
            f"{ref.dtype} {list(ref.shape)} ({name.rpartition('.')[2]})"
            for name, ref in tensors.items()
            if "scale" in name.rpartition(".")[2]
        }
    )
    what = f", with scales like {', '.join(scales[:3])}" if scales else ", without scales beside them"
    return f"the parent has {held} weights{what}: not block FP8 with F32 or BF16 scales, so they stay as they are"
