"""Counts which weights a question judged: the forms that it knows, and by name the forms that it does not.

A weight is judged where its codes, its scales or its floats were looked at element by element; in part where only
some of these were, or only its name, dtype and shape; else it is not judged. Scales, zeros and tables of indices
belong to their weight and are not counted; neither are known buffers of whole numbers that no module multiplies with.
Every other tensor of whole numbers is counted as a weight, so that one under an unknown tool's name is not passed over.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from math import prod

from shardmill.verify.formats.by_elements import BY_ELEMENTS, is_silent, state_tensor
from shardmill.verify.formats.schemes import FLOATS, Linear, is_scale, split_name
from shardmill.verify.formats.table import FORMS
from shardmill.verify.formats.values import CODE_LAWS
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.open_files import OpenFiles
from shardmill.verify.rules.coverage import Coverage

HEADERS_ALONE = "names, dtypes and shapes alone"

# Tensors that belong to a weight of another name, by the end of theirs.
_COMPANION = re.compile(
    r"(^|[._])(scale|scales|biases|qzeros|g_idx|absmax|quant_map|quant_state\.\w+|nested_absmax|nested_quant_map"
    r"|weight_shape|weight_zero_point|weight_g_idx|zero_point|[kvq]_scale|activation_scale|SCB|weight_format)$"
)
_WEIGHT = re.compile(r"(^|[._])(weight|weight_packed|qweight|blocks|q_?weight|kernel)$|_(proj|blocks)$")
# Whole numbers that no module multiplies with: places, masks, tables, counters, states of a training engine.
_BUFFER = re.compile(
    r"(^|[._])(position_ids|token_type_ids|relative_position_index|tid2eid|num_batches_tracked|n_averaged|expert_map"
    r"|masked_bias|attn\.bias|attention\.bias|mask|_extra_state|workspace|row_offsets|q_groups?|q_group_map|q_invperm|q_perm"
    r"|q_scale|meta)$"
)
SILENT = "its state says no shape"
NUMBERS_MIN = 64  # a tensor of fewer whole numbers is a setting, not a weight


def form_of(tensor: Tensor, tensors: Mapping[str, Tensor], linear: Linear | None) -> str:
    """The form of a weight in words, of its own tensors' names and dtypes."""
    if linear is not None and linear.kind in FORMS:
        return FORMS[linear.kind].title
    name, front = tensor.name, tensor.name.rpartition(".")[0]
    if name.endswith("_blocks"):
        return "gpt-oss blocks"
    if name.endswith(".qweight"):
        return "GPTQ codes" if f"{front}.g_idx" in tensors else "AWQ codes"
    if name.endswith(".weight_packed") and tensor.dtype == "I32":
        return "pack-quantized integers"
    if f"{name}.absmax" in tensors or f"{name}.quant_map" in tensors:
        return "bitsandbytes codes"
    if tensor.dtype == "U32" and f"{front}.scales" in tensors:
        return "MLX codes"
    if tensor.dtype in FLOATS:
        return f"{tensor.dtype} floats"
    if linear is not None and linear.kind == "bare":
        return f"{tensor.dtype} codes without a scale"
    return f"{tensor.dtype} of no known form"


def coverage_of(
    checkpoint: Checkpoint,
    linears: Mapping[str, Linear],
    seen: Collection[str] | None,
    sampled: bool = False,
    floats: bool = True,
) -> Coverage:
    """`seen`: the tensors whose elements were looked at, None if no data were read; `floats`: count these too."""
    coverage = Coverage()
    codes = {linear.weight.name: linear for linear in linears.values() if linear.weight is not None}
    parts = {
        tensor.name
        for linear in linears.values()
        for tensor in (*linear.scales.values(), *linear.extras.values())
    }
    silent = _silent(checkpoint, linears) if seen is not None else set[str]()
    for tensor in checkpoint.tensors.values():
        if tensor.name in silent:
            coverage.in_part[f"{form_of(tensor, checkpoint.tensors, codes[tensor.name])}: {SILENT}"] += 1
            continue
        if tensor.name in parts or (tensor.dtype in FLOATS and not floats):
            continue
        if tensor.name not in codes and (is_scale(tensor.name) or _COMPANION.search(tensor.name)):
            continue
        _count(coverage, tensor, checkpoint.tensors, codes.get(tensor.name), seen, sampled)
    if checkpoint.index is not None:
        lost = sum(name not in checkpoint.tensors for name in checkpoint.index.weight_map)
        if lost:
            coverage.not_judged["tensors that the index lists and no readable file has"] = lost
    return coverage


def _silent(checkpoint: Checkpoint, linears: Mapping[str, Linear]) -> set[str]:
    """Codes of bitsandbytes whose state says no shape, so that nothing decodes them."""
    of_elements = [linear for linear in linears.values() if linear.kind in BY_ELEMENTS and linear.weight]
    if not of_elements:
        return set()
    with OpenFiles(checkpoint.source) as opened:
        readable = (
            linear
            for linear in of_elements
            if (state := state_tensor(linear)) is not None and checkpoint.readable(state)
        )
        return {
            linear.weight.name
            for linear in readable
            if linear.weight is not None and is_silent(linear, opened)
        }


def count_nested(coverage: Coverage, checkpoint: Checkpoint, read: bool) -> None:
    """Counts the weights of modules in folders beside the model, whose floats are looked at where data are read."""
    for header in checkpoint.nested.values():
        for tensor in header.tensors:
            if tensor.dtype not in FLOATS:
                coverage.not_judged[f"{tensor.dtype} in a folder beside the model"] += 1
            elif read and header.sound:
                coverage.judged[f"{tensor.dtype} floats"] += 1
            else:
                coverage.in_part[f"{tensor.dtype} floats: {HEADERS_ALONE}"] += 1


def _count(
    coverage: Coverage,
    tensor: Tensor,
    tensors: Mapping[str, Tensor],
    linear: Linear | None,
    seen: Collection[str] | None,
    sampled: bool,
) -> None:
    known = linear is not None and linear.kind in FORMS
    if not known and tensor.dtype not in FLOATS and not (linear or _is_weight(tensor)):
        return
    form = form_of(tensor, tensors, linear)
    looked_at = seen is not None and tensor.name in seen and tensor.dtype in CODE_LAWS
    if not known and tensor.dtype not in FLOATS and not looked_at:
        coverage.not_judged[form] += 1
        return
    part = HEADERS_ALONE if seen is None else _unseen(tensor, linear, seen)
    if part:
        coverage.in_part[f"{form}: {part}"] += 1
    elif sampled:
        coverage.in_part[f"{form}: a sample"] += 1
    else:
        coverage.judged[form] += 1


def _is_weight(tensor: Tensor) -> bool:
    """Whether a tensor that is no float may be a weight, whatever a tool calls it: all but known buffers may."""
    if len(tensor.shape) >= 2 and _WEIGHT.search(split_name(tensor.name)[1]):
        return True
    return prod(tensor.shape) >= NUMBERS_MIN and _BUFFER.search(tensor.name) is None


def _unseen(tensor: Tensor, linear: Linear | None, seen: Collection[str]) -> str:
    """What of a weight was judged where it was not all; "" for a weight that was looked at whole."""
    form = FORMS.get(linear.kind) if linear is not None else None
    every_code_is_legal = form is not None and tensor.dtype not in CODE_LAWS
    if tensor.bytes and tensor.name not in seen and not every_code_is_legal:
        return HEADERS_ALONE
    if form is not None and form.lacks:
        return f"all but {', '.join(form.lacks)}"
    if linear is None:
        return ""
    lost = [scale.name for scale in linear.scales.values() if scale.name not in seen and scale.bytes]
    return f"its codes, not {', '.join(sorted(split_name(name)[1] for name in lost))}" if lost else ""
