"""A conversion that converts nothing: refused, since its result would be a copy under a name that promises more.

One rule for init and plan: what is promised must be done, or the parent must hold it already.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from shardmill.pipeline.plan.types import Assignment
from shardmill.pipeline.recipe.tables import Recipe
from shardmill.pipeline.types import Parent, TensorRef

# A word in a recipe's name -> the dtypes of the codes that a parent holds where it is that already
_PROMISES: Final[Mapping[str, tuple[str, ...]]] = {
    "fp8": ("F8_E4M3", "F8_E5M2"),
    "mxfp8": ("F8_E4M3",),
    "int8": ("I8",),
    "w8a8": ("I8", "F8_E4M3"),
    "int4": ("I32", "U8"),
    "w4a16": ("I32", "U8"),
    "awq": ("I32",),
    "gptq": ("I32",),
    "nvfp4": ("U8", "F4"),
    "mxfp4": ("U8", "F4"),
    "bf16": (),
}
_PROMISE = re.compile(rf"(?:^|[^a-z0-9])({'|'.join(_PROMISES)})(?:$|[^a-z0-9])")
_CODES = ("F8_", "U8", "I8", "F4", "I32", "U32", "F6_")


def nothing_done(recipe: Recipe, parent: Parent, assignments: Iterable[Assignment]) -> list[str]:
    """Why the recipe's name promises what it does not do; empty where it does something, or promises nothing."""
    promise = _PROMISE.search(recipe.name.lower())
    if promise is None or any(each.action.kind != "copy" for each in assignments):
        return []
    if holds_already(promise[1], parent.tensors):
        return []
    sentence = (
        f"the recipe {recipe.name!r} converts nothing, so its result would be a copy under a name that promises "
        f"{promise[1]}; {why_nothing(parent.tensors)}; change its families, or its name"
    )
    return [sentence]


def holds_already(promise: str, tensors: Mapping[str, TensorRef]) -> bool:
    """Whether a parent has weights of the format that a name promises."""
    return any(dtype in _PROMISES.get(promise, ()) for dtype in _coded(tensors))


def why_nothing(tensors: Mapping[str, TensorRef]) -> str:
    """What a parent's weights are, and with it why none of them converts."""
    coded = _coded(tensors)
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
    return (
        f"the parent has matrices of codes ({held}){what}: it is quantized already, and not in a form that this "
        f"conversion reads"
    )


def _coded(tensors: Mapping[str, TensorRef]) -> Counter[str]:
    """Dtype of codes -> how many matrices or stacks of them there are."""
    return Counter(
        ref.dtype for ref in tensors.values() if ref.dtype.startswith(_CODES) and len(ref.shape) > 1
    )
