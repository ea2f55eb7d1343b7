"""A child decoded by PyTorch alone: code times scale, rounded once to the model's dtype. No code of the pipeline."""

from __future__ import annotations

from typing import Any

import torch

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_ENDS = (".weight", ".weight_packed")
_PARTS = ("_scale_inv", "_scale", "_scale_2", "_global_scale", "_shape")

Tensors = dict[str, Any]


def decoded(tensors: Tensors, dtype: Any) -> Tensors:
    """The tensors of a checkpoint as plain floats: names that end in `.weight`, no scales."""
    plain: Tensors = {}
    for name, tensor in tensors.items():
        base = name.removesuffix("_packed")
        if name.endswith(tuple(f"weight{part}" for part in _PARTS)):
            continue
        beside = {part: tensors[base + part] for part in _PARTS if base + part in tensors}
        scaled = name.endswith(_ENDS) and beside
        plain[base if scaled else name] = _weight(tensor, beside).to(dtype) if scaled else tensor
    return plain


def _weight(codes: Any, beside: Tensors) -> Any:
    scale = beside["_scale_inv"] if "_scale_inv" in beside else beside["_scale"]
    numbers = _numbers(codes)
    if scale.dtype == torch.uint8:
        scale = torch.exp2(scale.double() - 127).float()
    scale = scale.float()
    if "_global_scale" in beside:
        scale = scale / beside["_global_scale"].float()
    if "_scale_2" in beside:
        scale = scale * beside["_scale_2"].float()
    return numbers * _spread(scale, numbers.shape)


def _numbers(codes: Any) -> Any:
    if codes.dtype == torch.uint8:
        return E2M1[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    if codes.dtype == torch.int32:
        nibbles = torch.stack([(codes >> (4 * i)) & 15 for i in range(8)], -1).flatten(-2)
        return (nibbles - 8).float()
    return codes.float()


def _spread(scale: Any, shape: Any) -> Any:
    """Scales for every element: of a tensor, a row, a group of columns or a block of 128 x 128."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    rows, cols = shape
    if scale.dim() == 4:
        scale = scale[:, 0, :, 0]
    scale = scale.reshape(scale.shape[0], -1)
    if scale.shape[0] != rows:
        scale = scale.repeat_interleave(128, 0)[:rows]
        return scale.repeat_interleave(128, 1)[:, :cols]
    return scale.repeat_interleave(cols // scale.shape[1], 1)
