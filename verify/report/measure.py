"""What converted weights lost: the judge's own sums for the files as stored, and the same for what is served.

Bounded memory: a weight is read in strips of about a million elements, two weights at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite, sqrt

import numpy as np

from shardmill.kernels.formats import F32, bf16_to_f32, f32_to_bf16
from shardmill.verify.formats.matrices import decoded, strips, values
from shardmill.verify.questions.pairs import Pair, pairs_of
from shardmill.verify.questions.roundtrip import Loss, loss_of
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.open_files import OpenFiles
from shardmill.verify.reading.progress import Progress
from shardmill.verify.reading.source import Source
from shardmill.verify.reading.threads import pinned
from shardmill.verify.report.facts import Error
from shardmill.verify.report.histogram import CODE_BINS, ERROR_BINS, Counts, code_counts, error_counts
from shardmill.verify.report.served import is_rerounded, reround


@dataclass(slots=True)
class Measure:
    """One weight against its parent, or a group of weights added up."""

    loss: Loss  # as stored, from shardmill.verify.questions.roundtrip
    rounded_squares: float = 0.0
    served_squares: float = 0.0
    rerounded: bool = False
    stored_counts: Counts = field(default_factory=lambda: np.zeros(ERROR_BINS, np.int64))
    served_counts: Counts = field(default_factory=lambda: np.zeros(ERROR_BINS, np.int64))
    code_counts: Counts = field(default_factory=lambda: np.zeros(CODE_BINS, np.int64))

    @property
    def error(self) -> Error:
        loss = self.loss
        return Error(
            stored=_number(loss.error),
            rounded=_number(_relative(self.rounded_squares, loss.parent)),
            served=_number(_relative(self.served_squares, loss.parent)),
            elements=loss.elements,
            parent_squares=_number(loss.parent),
            stored_squares=_number(loss.difference),
            rounded_squares=_number(self.rounded_squares),
            served_squares=_number(self.served_squares),
            cosine=_number(loss.cosine),
            largest=_number(loss.largest),
            saturated=loss.saturated,
            zeros=loss.zeros,
        )


def measure(
    child: Checkpoint, origin: Checkpoint, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Measure]:
    """Weight -> Measure, for each weight of `child` whose form is another than in `origin`, as roundtrip pairs them."""
    pairs = [pair for pair in pairs_of(child, origin, everything=False) if pair.child.linear is not None]
    done = Progress(sum(pair.child.tensor.bytes for pair in pairs), progress)

    def work(pair: Pair, _: None) -> Measure:
        measured = measure_pair(pair, child.source, origin.source)
        done.add(pair.child.tensor.bytes)
        return measured

    largest_first = sorted(pairs, key=lambda pair: -pair.child.tensor.bytes)
    remote = child.source.remote or origin.source.remote
    measured = pinned(work, largest_first, lambda: None, done=done, remote=remote)
    by_name = {each.loss.name: each for each in measured}
    return {pair.name: by_name[pair.name] for pair in pairs}


def measure_pair(pair: Pair, source: Source, parent: Source) -> Measure:
    """Reads the weight twice, the second time from the page cache: the judge's sums stay the judge's."""
    measured = Measure(loss_of(pair, source, parent))
    block = pair.child.block
    assert pair.child.linear is not None
    is_block_fp8 = pair.child.linear.kind in ("fp8-block", "fp8-grid")
    measured.rerounded = is_block_fp8 and is_rerounded(pair.child.shape, block)
    with OpenFiles(source) as ours, OpenFiles(parent) as theirs, np.errstate(all="ignore"):
        for first, last in strips(pair.child, block[0]):
            stored, codes = decoded(pair.child, ours, first, last)
            want = values(pair.parent, theirs, first, last)
            measured.stored_counts += error_counts(stored, want)
            measured.code_counts += code_counts(codes)
            measured.rounded_squares += _squares(_rounded(stored, pair.parent.tensor.dtype) - want)
            if measured.rerounded:
                served = reround(stored, block)
                measured.served_squares += _squares(served - want)
                measured.served_counts += error_counts(served, want)
    if not measured.rerounded:
        measured.served_squares = measured.loss.difference
        measured.served_counts = measured.stored_counts
    return measured


def together(name: str, measures: Iterable[Measure]) -> Measure | None:
    """The sums over several weights, added in their order as `verify roundtrip` adds those of a family."""
    added = None
    for each in measures:
        if added is None:
            added = Measure(Loss(name, each.loss.kind))
        added.loss.add(each.loss)
        added.rounded_squares += each.rounded_squares
        added.served_squares += each.served_squares
    return added


def worst(measures: Mapping[str, Measure], count: int) -> list[str]:
    """Names of the weights with the largest error as stored, what is no number first; equal ones by name."""

    def rank(name: str) -> tuple[float, str]:
        error = measures[name].loss.error
        return (-error if error == error else -np.inf, name)

    return sorted(measures, key=rank)[:count]


def _rounded(values: F32, dtype: str) -> F32:
    """The values as a parent of this dtype would hold them."""
    if dtype == "BF16":
        return bf16_to_f32(f32_to_bf16(values))
    return values.astype(np.float16).astype(np.float32) if dtype == "F16" else values


def _squares(away: F32) -> float:
    """Their sum in f64. Not by BLAS, whose threads would make its digits depend on the machine."""
    wide = away.astype(np.float64)
    return float(np.square(wide, out=wide).sum())


def _relative(squares: float, parent_squares: float) -> float:
    if parent_squares:
        return sqrt(squares / parent_squares)
    return 0.0 if not squares else float("inf")


def _number(value: float) -> float | None:
    """The value, or None for what JSON has no number for."""
    return value if isfinite(value) else None
