"""Weights whose decoded size makes no sense, against their siblings, against the floats beside them, against
any network.

Evidence for the bounds. Of one kind of weight over its layers, the largest root mean square is 1.0 to 1.3
times the smallest in freshly initialised models, and 1.25 to 1.62 times in a trained sentence encoder
(all-MiniLM-L6-v2: six layers, six kinds of matrices). Quantized and float matrices of one model lie within a
factor of 8. Initialisation is near 1 / sqrt(inputs), 0.004 to 0.1 for 100 to 65,536 inputs. A scale that is
squared, inverted or off by a bias of 120 moves a weight by a thousand and more; 64 times is known by siblings
alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from shardmill.verify.questions.decoded_sizes import Size, by_kind
from shardmill.verify.rules.findings import Finding

SIBLING_RATIO = 16.0
SIBLINGS_ALIKE = 4.0  # two siblings can't outvote each other: pairs of other kinds must be this close
MODEL_RATIO = 200.0  # from the median of all quantized weights
FLOATS_RATIO = 48.0  # of the medians of quantized and float matrices
SMALLEST, LARGEST = 1e-4, 64.0  # the median of all
ROBUST = 6.0  # deviations of the siblings themselves


def size_faults(sizes: Sequence[Size]) -> Iterator[Finding]:
    """`sizes`: of `decoded_sizes.sizes_of`."""
    whole = [size for size in sizes if size.quantized and size.rms > 0]
    if not whole:
        return
    middle = float(np.median([size.rms for size in whole]))
    of_all = list(_of_all(whole, [size for size in sizes if not size.quantized and size.rms > 0], middle))
    yield from of_all
    known = set()
    for kind, members in by_kind(size for size in sizes if size.rms > 0).items():
        for size, expected in _outliers(kind, members, whole):
            known.add(size.module)
            yield _at(size, expected)
    for size in whole if not of_all else ():
        if size.module not in known and not 1 / MODEL_RATIO < size.rms / middle < MODEL_RATIO:
            yield _at(size, f"about {middle:.2g}, the median of {len(whole):,} quantized weights")


def _at(size: Size, expected: str) -> Finding:
    got = f"a root mean square of {size.rms:.3g}, decoded"
    return Finding("size-outlier", size.tensor.file, size.tensor.name, expected, got)


def _outliers(kind: str, members: list[Size], whole: list[Size]) -> Iterator[tuple[Size, str]]:
    """Members far from the median of the others, measured by how far the others are from each other."""
    logs = np.log([min(size.rms, 1e300) for size in members])
    if len(members) == 2:
        if abs(logs[0] - logs[1]) > np.log(SIBLING_RATIO) and _pairs_alike(kind, whole):
            middle = float(np.median([size.rms for size in whole]))
            size = max(members, key=lambda size: abs(np.log(min(size.rms, 1e300) / middle)))
            yield size, f"a size like its sibling's, as all other kinds have (a factor of {SIBLINGS_ALIKE:g})"
        return
    if len(members) < 3:
        return
    middle = float(np.median(logs))
    spread = 1.4826 * float(np.median(np.abs(logs - middle)))
    for place in np.flatnonzero(np.abs(logs - middle) > max(np.log(SIBLING_RATIO), ROBUST * spread)):
        size = members[int(place)]
        if size.quantized:
            yield size, f"about {np.exp(middle):.2g}, the median of {len(members):,} of {kind}"


def _pairs_alike(kind: str, whole: list[Size]) -> bool:
    others = [members for name, members in by_kind(whole).items() if name != kind and len(members) == 2]
    ratios = [max(a.rms, b.rms) / min(a.rms, b.rms) for a, b in others]
    return len(ratios) >= 3 and float(np.median(ratios)) < SIBLINGS_ALIKE


def _of_all(whole: list[Size], floats: list[Size], middle: float) -> Iterator[Finding]:
    first = whole[0].tensor
    got = f"a median of {middle:.3g} over {len(whole):,} quantized weights, decoded"
    beside = float(np.median([size.rms for size in floats])) if floats else middle
    if not SMALLEST < middle < LARGEST:
        expected = f"{SMALLEST:g} to {LARGEST:g}: initialisation is near 1 / sqrt(inputs)"
        yield Finding("size-of-all", first.file, first.name, expected, got)
    elif not 1 / FLOATS_RATIO < middle / beside < FLOATS_RATIO:
        expected = (
            f"within {FLOATS_RATIO:g} times of {beside:.3g}, the median of {len(floats):,} float matrices"
        )
        yield Finding("size-of-all", first.file, first.name, expected, got)
