"""Stage `input_scales`, a repair: the parent's file of input scales is taken from another revision or place.

So a recalibration is adopted by one line, and an incremental build writes that one file again. The other file must
name the same tensors; every scale must be finite, positive and near its kind, and they must not all be equal: a
constant is a placeholder, under which blocks of small activations vanish.

    [stages.input_scales]
    needs = ["scan"]
    from = "../recalibrated/model-input-scales.safetensors"     # relative to the recipe
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardmill.pipeline.container.header import file_stat, read_header
from shardmill.pipeline.errors import PlanError
from shardmill.pipeline.stages.job import Checkpoint
from shardmill.pipeline.types import Header, Parent

INPUT_SCALES_FILE = "model-input-scales.safetensors"
_FACTOR_MAX = 4096.0  # times the median of its kind, either way; calibrated scales of one kind lie far closer
_SHOWN = 5


def input_scales(checkpoint: Checkpoint, parent: Parent) -> Parent:
    """The parent, with the file `into` replaced by the one that the option `from` names. Raises PlanError."""
    options = checkpoint.recipe.stages["input_scales"].options
    if "from" not in options:
        raise PlanError(["stage 'input_scales' needs the option `from`: the file to take the scales from"])
    file, path = str(options.get("into", INPUT_SCALES_FILE)), checkpoint.recipe.home / str(options["from"])
    mine = next((header for header in parent.headers if header.shard == file), None)
    if mine is None:
        raise PlanError(
            [f"stage 'input_scales': the parent has no {file} to replace; name its file with `into`"]
        )
    if not path.is_file():
        raise PlanError([f"stage 'input_scales': {path}, which `from` names, is not a file; correct it"])
    stat = file_stat(path)  # before its header, as in scan
    theirs = read_header(path, file)
    problems = _other_tensors(mine, theirs, path) or _unsound(theirs, _values(path, theirs), path)
    if problems:
        raise PlanError(problems)
    return replace(
        parent,
        headers=tuple(theirs if header.shard == file else header for header in parent.headers),
        stats={**parent.stats, file: stat},
        replaced={**parent.replaced, file: path},
    )


def _other_tensors(mine: Header, theirs: Header, path: Path) -> list[str]:
    """Tensors that only one of the two files has, or that differ in dtype or shape."""
    own = {(ref.name, ref.dtype, ref.shape) for ref in mine.tensors}
    other = {(ref.name, ref.dtype, ref.shape) for ref in theirs.tensors}
    if odd := sorted({dtype for _, dtype, _ in other} - {"F32"}):
        return [f"{path}: holds {odd[0]} tensors; input scales are F32"]
    return [
        f"{path}: {name} is {'missing' if (name, dtype, shape) in own else 'not in the parent'} ({dtype} {list(shape)})"
        for name, dtype, shape in sorted(own ^ other)[:_SHOWN]
    ]


def _values(path: Path, header: Header) -> NDArray[np.float32]:
    """All scales of the file, f32 [n], in its order."""
    return np.fromfile(path, "<f4", offset=header.data_begin)


def _unsound(header: Header, values: NDArray[np.float32], path: Path) -> list[str]:
    names = [ref.name for ref in header.tensors for _ in range(ref.bytes // 4)]
    bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))[:_SHOWN]
    if len(bad):
        return [f"{path}: {names[i]} is {values[i]}; an input scale must be finite and positive" for i in bad]
    if len(values) > 1 and (values == values[0]).all():
        return [f"{path}: all {len(values)} input scales are {values[0]}: a placeholder, not a calibration"]
    kinds = np.array([name.split(".")[-2] if "." in name else "" for name in names])
    problems = []
    for kind in sorted(set(kinds)):
        of_kind = np.flatnonzero(kinds == kind)
        ratio = values[of_kind] / np.median(values[of_kind])
        far = of_kind[(ratio > _FACTOR_MAX) | (ratio < 1 / _FACTOR_MAX)]
        problems += [
            f"{path}: {names[i]} is {values[i]}, more than {_FACTOR_MAX:.0f} times off the median of its kind"
            for i in far
        ]
    return problems[:_SHOWN]
