"""Factors that a tool moved from one tensor into the next, so that the model stays the same: AWQ's and SmoothQuant's.

Such a tool multiplies each input's column of a weight by a number and takes it back elsewhere: it divides the norm
before it (and the norm's bias), or the rows of the weight whose outputs these inputs are. So a weight here is its
parent's with columns times c and rows times r, and what holds is that c is one, or what a norm of the same layer lost,
or what the rows of another of its weights lost. Each weight is measured on a sample of rows: the median of the ratios
of its larger members, by column and by row. (AutoAWQ 0.2.9, awq/quantize/scale.py.)
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardmill.verify.formats.fused import kind_of
from shardmill.verify.formats.linear import F32, FLOATS
from shardmill.verify.formats.matrices import Matrix, strips, values
from shardmill.verify.questions.companions import container_of
from shardmill.verify.questions.pairs import INTEGERS, Pair
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.open_files import OpenFiles
from shardmill.verify.rules.findings import Finding

SAMPLE_STRETCHES, SAMPLE_ROWS = 4, 32
LARGE = 0.5  # of a row's root mean square; smaller weights may round to anything
NEAR = 0.12  # of a logarithm: two factors that are the same, as a sample of rounded weights shows them
CORRELATION_MIN = 0.5
MOST = 0.6  # of the columns that must be near
FAR = 0.8  # of a logarithm: a factor of 2.2, that rounding doesn't make
LOUD = 0.3  # of the weight's root mean square: columns below may be rounded to nothing
MEMBERS_MIN = 8
VANISHED = 1e-9  # the ratio of what was rounded to zero
LOST_MAX = 0.3  # of a column's members rounded to zero; above, the others show no factor
CHANGED = 2.0**-6  # relative: what rounding to BF16 or F16 does to a number is less
NAMED_MAX = 3

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Folding:
    """What a weight here was multiplied by: f32 [columns], f32 [rows]; `unproven`: nothing takes it back."""

    columns: F32
    rows: F32
    unproven: bool = False


@dataclass(slots=True)
class Foldings:
    """Of all layers in which factors were moved, or may have been."""

    by_weight: dict[str, Folding] = field(default_factory=dict)
    norms: dict[str, str] = field(default_factory=dict)  # weight -> the vector that its factors came from
    judged: set[str] = field(
        default_factory=set
    )  # vectors of these layers, with their own bytes or explained
    findings: list[Finding] = field(default_factory=list)


@dataclass(slots=True)
class _Weight:
    pair: Pair
    columns: F64  # logarithm of each column's factor but for a common one; NaN where too few members show it
    loud: NDArray[np.bool_]
    known: F64 | None = None  # what a norm or another weight's rows say it should be
    rows: F64 | None = None
    unproven: bool = False
    norm: str = ""  # the vector that lost what its columns took up


def foldable(kind: str) -> bool:
    """Whether tools move factors into weights of this form."""
    return kind in INTEGERS


def foldings_of(child: Checkpoint, parent: Checkpoint, pairs: Collection[Pair]) -> Foldings:
    """Measures every layer with AWQ's weights, and those with integers where a vector is not the parent's."""
    found = Foldings()
    if child.manifest is not None:
        return found
    layers: dict[str, list[Pair]] = {}
    for pair in pairs:
        if pair.child.linear is not None and foldable(pair.child.linear.kind) and pair.parent.linear is None:
            layers.setdefault(container_of(pair.name), []).append(pair)
    vectors = _vectors(child, parent, layers)
    with OpenFiles(child.source) as ours, OpenFiles(parent.source) as theirs:
        for layer, members in layers.items():
            here = {name: _both(child, parent, name, ours, theirs) for name in vectors.get(layer, ())}
            changed = {name: two for name, two in here.items() if _differ(*two)}
            if changed or any(pair.child.linear and pair.child.linear.kind == "awq" for pair in members):
                found.judged |= here.keys()
                _layer(found, child, members, changed, ours, theirs)
    found.findings += _strange_norms(found.norms, child)
    return found


def _strange_norms(norms: Mapping[str, str], child: Checkpoint) -> Iterator[Finding]:
    """A norm whose factors went into weights that are fed by another norm in most layers: norms were exchanged."""
    kinds: dict[str, Counter[str]] = {}
    for weight, norm in norms.items():
        kinds.setdefault(kind_of(weight), Counter())[kind_of(norm)] += 1
    for weight, norm in norms.items():
        usual, count = kinds[kind_of(weight)].most_common(1)[0]
        if kind_of(norm) != usual and count > kinds[kind_of(weight)][kind_of(norm)]:
            expected = f"{usual}, as in {count} layers"
            got = f"its factors are in {weight}"
            yield Finding("carried-changed", child.tensors[norm].file, norm, expected, got)


def _vectors(child: Checkpoint, parent: Checkpoint, layers: Mapping[str, object]) -> dict[str, list[str]]:
    """Layer -> its float vectors that both have in one length."""
    found: dict[str, list[str]] = {}
    for name, tensor in child.tensors.items():
        before, layer = parent.tensors.get(name), container_of(name)
        if layer not in layers or before is None or len(tensor.shape) != 1 or tensor.shape != before.shape:
            continue
        if {tensor.dtype, before.dtype} <= set(FLOATS) and child.readable(tensor) and parent.readable(before):
            found.setdefault(layer, []).append(name)
    return found


def _both(
    child: Checkpoint, parent: Checkpoint, name: str, ours: OpenFiles, theirs: OpenFiles
) -> tuple[F64, F64]:
    """(here, in the parent)"""
    here, there = Matrix(child.tensors[name]), Matrix(parent.tensors[name])
    return values(here, ours, 0, 1)[0].astype(np.float64), values(there, theirs, 0, 1)[0].astype(np.float64)


def _differ(here: F64, there: F64) -> bool:
    return bool((~(np.abs(here - there) <= CHANGED * np.maximum(np.abs(here), np.abs(there)))).any())


def _layer(
    found: Foldings,
    child: Checkpoint,
    pairs: list[Pair],
    changed: Mapping[str, tuple[F64, F64]],
    ours: OpenFiles,
    theirs: OpenFiles,
) -> None:
    weights = {pair.name: _measured(pair, ours, theirs) for pair in pairs}
    taken: dict[str, F64] = {}  # vector -> the logarithm of what it was divided by
    for weight in weights.values():
        _by_norms(weight, changed, taken)
    givers = _by_rows(weights, ours, theirs)
    for name, weight in weights.items():
        _finish(weight, name in givers, ours, theirs)
        found.findings += _odd_columns(weight)
        if weight.norm:
            found.norms[name] = weight.norm
        assert weight.known is not None
        assert weight.rows is not None
        columns, rows = (np.exp(logs).astype(np.float32) for logs in (weight.known, weight.rows))
        found.by_weight[name] = Folding(columns, rows, weight.unproven)
    for name, (here, there) in changed.items():
        if name not in taken and not _explained(name, here, there, taken, weights):
            tensor, expected = (
                child.tensors[name],
                "the parent's numbers, or less by what weights here took up",
            )
            got = "other numbers, which no weight of the layer makes good"
            found.findings.append(Finding("carried-changed", tensor.file, name, expected, got))


def _measured(pair: Pair, ours: OpenFiles, theirs: OpenFiles) -> _Weight:
    logs, squares = [], []
    for first, last in _sample(pair.child.shape[0]):
        logs.append(_ratios(pair, ours, theirs, first, last))
        squares.append(np.square(values(pair.child, ours, first, last), dtype=np.float64).mean(0))
    every = np.concatenate(logs)
    rows = _median(every, 1)
    for _ in range(2):
        columns = _median(every - rows[:, None], 0)
        rows = _median(every - columns, 1)
    members, lost = (~np.isnan(every)).sum(0), (every < np.log(VANISHED) / 2).sum(0)
    shown = (members >= MEMBERS_MIN) & (lost < LOST_MAX * members)
    columns = np.where(shown, columns, np.nan)
    size = np.mean(squares, axis=0)
    return _Weight(pair, columns, size > LOUD**2 * size.mean())


def _sample(rows: int) -> Iterator[tuple[int, int]]:
    if rows <= SAMPLE_STRETCHES * SAMPLE_ROWS:
        yield 0, rows
        return
    for part in range(SAMPLE_STRETCHES):
        first = (2 * part + 1) * rows // (2 * SAMPLE_STRETCHES) // SAMPLE_ROWS * SAMPLE_ROWS
        yield min(first, rows - SAMPLE_ROWS), min(first + SAMPLE_ROWS, rows)


def _ratios(pair: Pair, ours: OpenFiles, theirs: OpenFiles, first: int, last: int) -> F64:
    """f64 [rows, columns]: logarithms of |here| / |parent| of the row's larger weights, NaN elsewhere."""
    got, want = values(pair.child, ours, first, last), values(pair.parent, theirs, first, last)
    with np.errstate(all="ignore"):
        size = np.sqrt(np.square(want, dtype=np.float64).mean(1, keepdims=True))
        ratio = np.abs(got).astype(np.float64) / np.abs(want)
        return np.where(np.abs(want) > LARGE * size, np.log(np.maximum(ratio, VANISHED)), np.nan)


def _median(logs: F64, axis: int) -> F64:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a row or column without a member has no median
        return np.asarray(np.nan_to_num(np.nanmedian(logs, axis=axis), posinf=0, neginf=0))


def _log(above: F64, below: F64) -> F64:
    """The logarithm of above / below; NaN where there is none."""
    with np.errstate(all="ignore"):
        ratio = above / below
        return np.where(ratio > 0, np.log(np.maximum(ratio, 1e-30)), np.nan)


def _by_norms(weight: _Weight, changed: Mapping[str, tuple[F64, F64]], taken: dict[str, F64]) -> None:
    """The columns are the parent's, or times what a vector of the layer lost, also where engines add one to it."""
    count = len(weight.columns)
    best, chosen = _distance(weight.columns, np.zeros(count)), ""
    known = np.zeros(count)
    for name, (here, there) in changed.items():
        if len(here) != count or name.endswith(".bias"):
            continue
        for one in (0.0, 1.0):
            logs = _log(there + one, here + one)
            distance = _distance(weight.columns, logs)
            if distance < best and _follow(weight.columns, logs):
                best, chosen, known = distance, name, logs
    if np.isfinite(best):
        weight.known = np.nan_to_num(np.where(np.isnan(known), weight.columns, known))
        if chosen:
            taken[chosen], weight.norm = known, chosen


def _distance(columns: F64, logs: F64) -> float:
    """The median distance but for a common factor; infinity where fewer than most columns are near."""
    away = columns - logs
    away = away[~np.isnan(away)]
    if len(away) < max(len(columns) // 4, 1):
        return np.inf
    away = np.abs(away - np.median(away))
    return float(np.median(away)) if (away < NEAR).mean() >= MOST else np.inf


def _follow(columns: F64, logs: F64) -> bool:
    """Whether columns follow these factors, small as they may be, rather than lie near them by chance."""
    both = ~(np.isnan(columns) | np.isnan(logs))
    a, b = columns[both] - columns[both].mean(), logs[both] - logs[both].mean()
    return bool((a * b).sum() > CORRELATION_MIN * np.sqrt((a * a).sum() * (b * b).sum()) > 0)


def _by_rows(weights: Mapping[str, _Weight], ours: OpenFiles, theirs: OpenFiles) -> set[str]:
    """Finds, for columns that no norm explains, a weight whose rows lost what these took up. Names the givers."""
    givers: set[str] = set()
    waiting = [weight for weight in weights.values() if weight.known is None]
    for weight in waiting:
        count, best = len(weight.columns), np.inf
        for name, other in weights.items():
            if other is weight or other.known is None or other.pair.child.shape[0] < count:
                continue
            if other.rows is None:
                other.rows = _rows(other, ours, theirs, strips(other.pair.child))
            logs = -other.rows[-count:]
            distance = _distance(weight.columns, logs)
            if distance < best:
                best, giver, weight.known = distance, name, logs
        if np.isfinite(best):
            givers.add(giver)
    return givers


def _rows(weight: _Weight, ours: OpenFiles, theirs: OpenFiles, some: Iterable[tuple[int, int]]) -> F64:
    """f64 [rows]: the logarithms of the factors of these rows, the columns' known."""
    assert weight.known is not None
    parts = [
        _median(_ratios(weight.pair, ours, theirs, first, last) - weight.known, 1) for first, last in some
    ]
    return np.concatenate(parts)


def _finish(weight: _Weight, gives: bool, ours: OpenFiles, theirs: OpenFiles) -> None:
    """What the rows should be: the parent's, or what was given to another weight."""
    if weight.known is None:
        weight.known, weight.unproven = np.nan_to_num(weight.columns), True
    if gives:
        return
    count = weight.pair.child.shape[0]
    sample = _rows(weight, ours, theirs, _sample(count))
    if weight.unproven or (np.abs(sample - np.median(sample)) < 2 * NEAR).mean() >= 0.5:
        weight.rows = np.zeros(count)
        return
    weight.unproven = True
    if weight.rows is None:
        weight.rows = _rows(weight, ours, theirs, strips(weight.pair.child))


def _odd_columns(weight: _Weight) -> Iterator[Finding]:
    """Single columns that differ from what all others follow."""
    assert weight.known is not None
    away = weight.columns - weight.known
    middle = np.nanmedian(away) if not np.isnan(away).all() else 0.0
    odd = np.flatnonzero(weight.loud & (np.abs(away - middle) > FAR))
    if len(odd):
        tensor = weight.pair.child.tensor
        said = ", ".join(f"column {n} (times {np.exp(away[n]):.3g})" for n in odd[:NAMED_MAX])
        expected = "each column times what a norm or another weight lost"
        yield Finding("roundtrip-local", tensor.file, tensor.name, expected, said)


def _explained(
    name: str, here: F64, there: F64, taken: Mapping[str, F64], weights: Mapping[str, _Weight]
) -> bool:
    """Whether a bias lost what its norm lost, or what the rows of its weight did."""
    module, _, leaf = name.rpartition(".")
    if leaf != "bias":
        return False
    logs = _log(there, here)
    of_norm = taken.get(f"{module}.weight")
    if of_norm is not None and len(of_norm) == len(logs):
        return _alike(logs, of_norm)
    for other, weight in weights.items():
        if other.rpartition(".")[0] == module and weight.rows is not None and len(weight.rows) == len(logs):
            return _alike(logs, -weight.rows)
    return False


def _alike(a: F64, b: F64) -> bool:
    away = np.abs(a - b)[~np.isnan(a - b)]
    return bool(len(away) and (away < 2 * NEAR).mean() >= MOST)
