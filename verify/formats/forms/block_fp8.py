"""Block FP8: one scale a block of rows and columns, under four names and any dtype that a scale may have.

| name | published by | scale |
|---|---|---|
| `weight_scale_inv` | DeepSeek-V3, Qwen, GLM | F32, BF16, F8_E8M0 or U8 [ceil(R/r), ceil(C/c)] |
| `scale` | DeepSeek-V4 | F8_E8M0, the same grid; blocks of [128, 128] or [32, 32] |
| `weight_scale` of rank 2 | compressed-tensors (FP8_BLOCK) | BF16 or F32 |
| `weight_scale` of rank 4 | ModelOpt (FP8_PB_WO) | F32 [row blocks, 1, column blocks, 1] |

`weight_scale_inv` is DeepSeek's historical name: the number multiplies. Banks of experts have leading axes,
alike in both.
"""

from __future__ import annotations

from shardmill.verify.formats.forms.codes import e4m3
from shardmill.verify.formats.linear import EXPONENTS, FLOATS, Form, Linear, is_grid
from shardmill.verify.reading.header import Tensor

GRID = "[ceil(rows / r), ceil(columns / c)]"


def _grid(linear: Linear, scale: Tensor) -> str:
    shape, grid = linear.shape, scale.shape
    fits = len(grid) == len(shape) >= 2 and grid[:-2] == shape[:-2] and is_grid(shape[-2:], grid[-2:])
    return "" if fits else GRID


def _grid_of_rank_4(linear: Linear, scale: Tensor) -> str:
    grid = scale.shape
    fits = len(grid) == 4 and grid[1] == grid[3] == 1 and is_grid(linear.shape, (grid[0], grid[2]))
    return "" if fits else "[row blocks, 1, column blocks, 1]"


BLOCK = Form(
    "fp8-block", "block FP8", "DeepSeek, Qwen, GLM, MiniMax, transformers, slime, shardmill",
    "`weight` F8_E4M3 [R, C]; `weight_scale_inv` or `scale` [ceil(R/r), ceil(C/c)]",
    ("weight_scale_inv",), (*FLOATS, *EXPONENTS), _grid, e4m3, 0.05, 0x7E,
)  # fmt: skip
GRID_OF_2 = Form(
    "fp8-grid", "block FP8 of compressed-tensors", "llm-compressor, vLLM's tools",
    "`weight` F8_E4M3 [R, C]; `weight_scale` [ceil(R/r), ceil(C/c)]",
    ("weight_scale",), (*FLOATS, *EXPONENTS), _grid, e4m3, 0.05, 0x7E,
)  # fmt: skip
GRID_OF_4 = Form(
    "fp8-pbwo", "block FP8 of ModelOpt", "ModelOpt (FP8_PB_WO)",
    "`weight` F8_E4M3 [R, C]; `weight_scale` F32 [row blocks, 1, column blocks, 1]",
    ("weight_scale",), FLOATS, _grid_of_rank_4, e4m3, 0.05, 0x7E,
)  # fmt: skip
FORMS = (BLOCK, GRID_OF_2, GRID_OF_4)
