"""A weight on its way from one format to another: what the parent holds, what is made of it, and of its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8 import NonFinite
from shardmill.kernels.float_env import default_arithmetic
from shardmill.kernels.group_codes import GroupCodes
from shardmill.pipeline.actions import Convert
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.formats import formats
from shardmill.pipeline.formats.base import Arrays, Coded, Format, Part, Recast, Setting
from shardmill.pipeline.formats.kept import recast_of
from shardmill.pipeline.formats.module import Held
from shardmill.pipeline.formats.scales import stored_scales
from shardmill.pipeline.stages.converting.parts import Output, columns_per
from shardmill.pipeline.stages.job import ShardJob
from shardmill.pipeline.types import TensorRef

COLUMN_ROWS = (
    256,
    2048,
)  # a strip of a transposed part reads at least, and at best, so much of each of its rows
HELD_ELEMENTS = 1 << 21  # a strip that must have more is taken in pieces


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight on its way: what the parent holds, and what is made of it."""

    job: ShardJob
    action: Convert
    source: TensorRef
    held: Held
    target: Format
    pieces: Mapping[str, TensorRef]  # role -> output tensor
    parts: Mapping[str, Part]  # role -> the target's own part of one matrix
    matrices: range  # of the parent's stack
    first_row: int  # in each of these
    rows: int

    @property
    def recast(self) -> Recast | None:
        return recast_of(self.held.form, self.target, self.action.numerics)

    @property
    def counted(self) -> bool:
        settings = self.job.settings
        return settings.lossless or self.action.lossless or self.held.form.name != "bf16"

    def unit(self, shape: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of what a loss is counted by."""
        own = (self.target.counted or self.target.unit)(shape, self.action.params)
        return (self.recast.unit if self.recast else None) or own


def numbers_of(held: Held, arrays: Arrays, codes: GroupCodes) -> NDArray[Any]:
    """The weight's numbers [rows, C]: a float parent's as they are, a quantized one's as f32."""
    default_arithmetic()  # of this thread: a library may have set it to flush small numbers
    if held.form.name != "bf16":
        return held.form.decode(arrays, source_setting(held, codes))
    return np.ascontiguousarray(arrays["values"].T if held.parts["values"].axis else arrays["values"])


def made_of(
    weight: Weight, arrays: Arrays, numbers: NDArray[Any], setting: Setting
) -> dict[str, NDArray[Any]]:
    """The target's parts of numbers [rows, C] that `arrays` are the parent's parts of."""
    if weight.recast and np.isfinite(numbers).all():
        read = source_setting(weight.held, setting.codes)
        return weight.recast.encode(Coded(weight.held.form, arrays, read, numbers), setting)
    assert weight.target.encode is not None
    return weight.target.encode(numbers, setting)


def codes_of(job: ShardJob) -> GroupCodes:
    kernels = job.worker.kernels
    key = f"codes {job.settings.kernel}"
    if key not in kernels:
        kernels[key] = GroupCodes(job.settings.kernel)
    found: GroupCodes = kernels[key]
    return found


def setting_of(weight: Weight, amax: np.float32 | None) -> Setting:
    action = weight.action
    return Setting(action.params, action.spelling(), codes_of(weight.job), action.numerics, amax)


def encode_a_few(action: Convert, dtype: str, codes: GroupCodes) -> None:
    """Encodes a small matrix as `action` will encode what is stored as `dtype`, so that its kernels are compiled."""
    shape = (8, lcm(256, action.group))
    floats = {"BF16": np.full(shape, 0x3F80, np.uint16), "F16": np.ones(shape, np.float16)}
    numbers = floats.get(dtype if action.source == "bf16" else "", np.ones(shape, np.float32))
    encode = formats()[action.to].encode
    assert encode is not None, "a recipe names no format that is only read"
    encode(numbers, Setting(action.params, action.spelling(), codes, action.numerics, np.float32(1)))


def source_setting(held: Held, codes: GroupCodes) -> Setting:
    return Setting(held.params, held.spelling, codes, held.spelling.law)


def changed_scales(weight: Weight, arrays: Arrays, made: Arrays) -> int:
    """Of a weight that stays in its format, how many scales of a strip are other numbers than before."""
    if weight.held.form is not weight.target or "scales" not in made:
        return 0
    before, after = stored_scales(arrays["scales"]).reshape(-1), stored_scales(made["scales"]).reshape(-1)
    return int((before != after).sum()) if before.size == after.size else 0


def not_finite(weight: Weight, row: int, col: int, fault: NonFinite) -> BuildError:
    return BuildError(
        f"{weight.source.shard}: {weight.source.name}: the weight at row {row + fault.row}, column {col + fault.col} "
        f"is {fault.value}, which {weight.action.to} can't hold; "
        f"fix the parent checkpoint, or keep this tensor's family"
    )


def step_of(weight: Weight) -> int:
    """Rows at whose multiples every part of the source and of the target may be parted."""
    parts = [*weight.held.parts.values(), *weight.parts.values()]
    return lcm(*(part.per for part in parts if part.per))


def is_transposed(weight: Weight) -> bool:
    return any(part.axis for part in weight.held.parts.values())


def is_wide(weight: Weight) -> bool:
    """Whether the rows that belong together have more elements than are held.

    Blocks that are kept from another format are held, for it is not known piece by piece which of them can be.
    """
    if weight.recast and weight.target.in_pieces:
        return False
    least = max(step_of(weight), COLUMN_ROWS[0] if is_transposed(weight) else 1)
    return min(least, weight.rows) * weight.held.shape[-1] > HELD_ELEMENTS


def output_of(weight: Weight) -> Output:
    shape = (weight.rows, weight.held.shape[-1])
    per = columns_per(weight.target, weight.parts, shape, weight.action.params)
    return Output(weight.job, weight.pieces, weight.parts, per, len(weight.matrices), shape)
