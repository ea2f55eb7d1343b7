"""Routed experts in one tensor: which way their matrices are stored.

gate_up_proj and down_proj of one model tell it by themselves: [E, 2I, H] and [E, H, I] are stored as they are applied,
[E, H, 2I] and [E, I, H] transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardmill.pipeline.plan.profiles.child import FLOATS
from shardmill.pipeline.types import Shape, TensorRef

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"
_INTERLEAVED = ("gpt_oss",)  # rows of gate and up alternate there: halves are no modules


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack of experts: how it is stored, and what an expert has of it."""

    transposed: bool
    shape: Shape  # of one expert's gate, up or down, [R, C]


def expert_stacks(tensors: Mapping[str, TensorRef], model_type: str) -> dict[str, Stack]:
    """Tensor -> Stack, for every pair of stacks whose shapes tell how they are stored."""
    if model_type in _INTERLEAVED:
        return {}
    found: dict[str, Stack] = {}
    for name, ref in tensors.items():
        down = tensors.get(name.removesuffix(_GATE_UP) + _DOWN)
        if not name.endswith(_GATE_UP) or down is None or not (_is_stack(ref) and _is_stack(down)):
            continue
        (_, a, b), (_, c, d) = ref.shape, down.shape
        if (a, b) == (2 * d, c):
            found |= {
                name: Stack(False, (d, b)),
                down.name: Stack(False, (c, d)),
            }
        elif (b, a) == (2 * c, d):
            found |= {
                name: Stack(True, (c, a)),
                down.name: Stack(True, (d, c)),
            }
    return found


def _is_stack(ref: TensorRef) -> bool:
    return ref.dtype in FLOATS and len(ref.shape) == 3 and 0 not in ref.shape
