"""Zero points and reordered groups of compressed-tensors' packed integers: (code - zero) * scale, by column's group.

`weight_zero_point` I32 [ceil(R * bits / 32), groups] holds the rows' zeros in words down each column, the lowest bits
first, each with the offset that codes have. `weight_g_idx` I32 [C] is the group of each column; without it groups
follow one another.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shardmill.verify.formats.linear import F32, Linear
from shardmill.verify.reading.header import Tensor

Read = Callable[[Tensor, int, int], NDArray[np.uint8]]  # (tensor, first byte, last byte)
LEAVES = frozenset({"weight_shape", "weight_zero_point", "weight_g_idx"})


def fits(linear: Linear) -> bool:
    """Whether zeros and indices have the shapes that the codes and the grid ask for, for 4 bits or for 8."""
    grid, weight = linear.grid, linear.weight
    if linear.extras.keys() - LEAVES or grid is None or weight is None or len(weight.shape) != 2:
        return not linear.extras.keys() - {"weight_shape"}
    zeros, index = linear.extras.get("weight_zero_point"), linear.extras.get("weight_g_idx")
    for codes in (8, 4):
        tall = zeros is None or zeros.shape == (-(-weight.shape[0] // codes), grid.shape[-1])
        wide = index is None or index.shape == (weight.shape[1] * codes,)
        if tall and wide and all(t is None or t.dtype == "I32" for t in (zeros, index)):
            return True
    return False


def zeros_of(linear: Linear, bits: int, first: int, last: int, read: Read) -> F32 | None:
    """f32 [last - first, groups]: what is taken from the codes of rows [first, last), or None where nothing is."""
    tensor = linear.extras.get("weight_zero_point")
    if tensor is None:
        return None
    in_a_word, groups = 32 // bits, tensor.shape[1]
    begin, end = first // in_a_word, -(-last // in_a_word)
    words = read(tensor, begin * groups * 4, end * groups * 4).view("<u4").reshape(end - begin, 1, groups)
    shifts = np.arange(0, 32, bits, dtype=np.uint32).reshape(1, -1, 1)
    codes = (words >> shifts & np.uint32((1 << bits) - 1)).reshape(-1, groups)
    rows = codes[first - begin * in_a_word : last - begin * in_a_word]
    return rows.astype(np.float32) - np.float32(1 << (bits - 1))


def by_columns(linear: Linear, of_groups: F32, width: int, columns: int, read: Read) -> F32:
    """f32 [rows, groups] -> [rows, columns], groups of `width` columns or those that g_idx names."""
    tensor = linear.extras.get("weight_g_idx")
    if tensor is None:
        return np.repeat(of_groups, width, axis=1)[:, :columns]
    index = read(tensor, 0, tensor.bytes).view("<i4")
    return of_groups[:, np.clip(index, 0, of_groups.shape[1] - 1)]
