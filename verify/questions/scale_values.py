"""The scales of a checkpoint, read and summed up: one `Scale` for each scale tensor.

Scalars are always read. Grids are read whole from a folder; from a remote place, where bytes cost, a seeded sample of
them is read up to a budget, from the front of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.formats import E4M3_VALUES
from shardmill.verify.formats.forms.kv_cache import cache_scales
from shardmill.verify.formats.linear import Linear
from shardmill.verify.formats.values import ElementCheck, ValueRule, value_rules
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.file_pass import FileJob, Task
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.progress import Progress
from shardmill.verify.reading.stream import stream
from shardmill.verify.rules.findings import Finding, Report

SAMPLE_BYTES = 2 << 20  # of grids, from a remote place
SAMPLE_OF_A_GRID = 16 << 10


@dataclass(slots=True)
class Scale:
    """What the elements of one scale tensor are, as far as they were read."""

    tensor: Tensor
    count: int = 0
    zeros: int = 0
    low: float = np.inf
    high: float = -np.inf
    logs: float = 0.0  # sum of the natural logarithms of the elements above zero
    powers_of_two: bool = True
    faulty: bool = False  # some element is NaN, infinite or negative

    @property
    def value(self) -> float:
        """Of a scalar."""
        return self.high

    @property
    def typical(self) -> float:
        """The geometric mean of the elements above zero; 0 where there are none."""
        return float(np.exp(self.logs / (self.count - self.zeros))) if self.count > self.zeros else 0.0

    def add(self, elements: NDArray[np.float32], bits: NDArray[np.uint32] | None) -> None:
        self.count += elements.size
        self.zeros += elements.size - int(np.count_nonzero(elements))
        self.low = min(self.low, float(elements.min()))
        self.high = max(self.high, float(elements.max()))
        with np.errstate(all="ignore"):
            self.logs += float(np.log(elements[elements > 0], dtype=np.float64).sum())
        if bits is not None:
            self.powers_of_two &= not bool((bits & 0x007FFFFF).any())


class _Watch(NamedTuple):
    scale: Scale
    law: ValueRule

    def glance(self, whole: NDArray[np.uint8]) -> tuple[bool, None]:
        return False, None  # every value counts

    def begin(self) -> _Reader:
        return _Reader(self.scale, self.law)


class _Reader:
    """Feeds a `Scale` and looks for elements that no scale may have."""

    def __init__(self, scale: Scale, law: ValueRule) -> None:
        self._scale, self._dtype = scale, scale.tensor.dtype
        self._look = ElementCheck(scale.tensor, law)

    def feed(self, strip: NDArray[np.uint8]) -> None:
        elements = self._look.feed(strip)
        if not len(elements):
            return
        if self._dtype in ("U8", "F8_E8M0"):
            self._scale.add(np.exp2(np.minimum(elements, 0xFE).astype(np.float32) - 127), None)
        elif self._dtype == "F8_E4M3":
            self._add_e4m3(elements)
        elif self._dtype == "F16":
            values = elements.view(np.float16).astype(np.float32)
            self._scale.add(values, values.view(np.uint32))
        else:
            bits = elements.view(f"<u{elements.itemsize}").astype(np.uint32)
            bits = bits if self._dtype == "F32" else bits << np.uint32(16)
            self._scale.add(bits.view(np.float32), bits)

    def _add_e4m3(self, codes: NDArray[np.uint8]) -> None:
        """Codes without sign are ordered as their values, so no table look-up of a whole strip is needed."""
        low, high = int(codes.min()), int(codes.max())
        zeros = codes.size - int(np.count_nonzero(codes)) if low == 0 else 0
        scale = self._scale
        scale.count += codes.size
        scale.zeros += zeros
        scale.low = min(scale.low, float(E4M3_VALUES[low]))
        scale.high = max(scale.high, float(E4M3_VALUES[min(high, 0x7E)]))

    def findings(self) -> list[Finding]:
        findings = self._look.findings()
        self._scale.faulty = any(finding.slug != "scale-not-positive" for finding in findings)
        return findings

    @property
    def outcome(self) -> Scale:
        return self._scale


def read_scales(
    checkpoint: Checkpoint,
    linears: Mapping[str, Linear],
    report: Report,
    sample_bytes: int | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    seed: int = 0,
) -> dict[str, Scale]:
    """Scale tensor -> what it holds. `sample_bytes` bounds what is read of grids; None reads them whole."""
    laws = value_rules(linears, checkpoint.tensors)
    of_weights = [tensor for linear in linears.values() for tensor in linear.scales.values()]
    tensors = [
        tensor
        for tensor in (*of_weights, *cache_scales(checkpoint.tensors).values())
        if tensor.name in laws and tensor.bytes and checkpoint.readable(tensor)
    ]
    parts, whole = _sampled(tensors, sample_bytes, seed)
    if whole:
        report.checks("scales")
    else:
        shown = sum(part.bytes for part in parts)
        report.checks(f"scales (a sample: {shown:,} of {sum(t.bytes for t in tensors):,} bytes)")
    scales: dict[str, Scale] = {part.name: Scale(part) for part in parts}
    by_file: dict[str, list[Task]] = {}
    for part in sorted(parts, key=lambda part: (part.file, part.begin)):
        by_file.setdefault(part.file, []).append(Task(part, watch=_Watch(scales[part.name], laws[part.name])))
    jobs = [FileJob(file, checkpoint.files[file], False, tuple(tasks)) for file, tasks in by_file.items()]
    done = Progress(sum(job.bytes for job in jobs), progress)
    for result in stream(checkpoint.source, jobs, done=done).values():
        report.add(*result.findings)
        scales |= result.outcomes
    return {name: scale for name, scale in scales.items() if scale.count}


def _sampled(tensors: Iterable[Tensor], budget: int | None, seed: int) -> tuple[list[Tensor], bool]:
    """The tensors to read, cut to their fronts where there is a budget, and whether that is everything."""
    tensors = list(tensors)
    scalars = [tensor for tensor in tensors if tensor.bytes <= 8]
    grids = [tensor for tensor in tensors if tensor.bytes > 8]
    if budget is None or sum(grid.bytes for grid in grids) <= budget:
        return tensors, True
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(grids))
    chosen: list[Tensor] = []
    for place in order:
        grid = grids[int(place)]
        size = min(grid.bytes, SAMPLE_OF_A_GRID)
        if size > budget:
            break
        budget -= size
        chosen.append(grid._replace(end=grid.begin + size))
    return scalars + chosen, False
