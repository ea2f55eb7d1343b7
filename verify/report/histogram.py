"""The bins in which a weight's elements are counted: by relative error, and by the power of two of the code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.formats import F32, U8

Counts = NDArray[np.int64]

STEP_PERCENT = 0.5  # width of a bin of relative error
STEPS = 24  # so the last one ends at 12 %; an E4M3 code of full precision is at most 5.9 % off
ERROR_BINS = STEPS + 2  # none at all, the steps, beyond them
EXPONENTS = 16  # of E4M3; the first holds the subnormal codes
EXPONENT_BIAS = 7
CODE_BINS = EXPONENTS + 1  # zero, then the exponents


def error_counts(got: F32, want: F32) -> Counts:
    """Elements by |got - want| / |want|: those without error, each step, those beyond (a wanted zero missed too)."""
    with np.errstate(all="ignore"):
        relative = np.abs(got - want) / np.abs(want)
    bins = np.minimum(np.nan_to_num(relative * (100 / STEP_PERCENT), nan=STEPS, posinf=STEPS), STEPS) + 1
    bins = np.where(got == want, 0, bins).astype(np.intp)
    return np.bincount(bins.ravel(), minlength=ERROR_BINS)


def code_counts(codes: U8) -> Counts:
    """E4M3 codes that are zero, then by their exponent, subnormal ones first."""
    seen = np.bincount((codes & 0x7F).ravel(), minlength=128).reshape(EXPONENTS, 8)
    by_exponent = seen.sum(axis=1)
    by_exponent[0] -= seen[0, 0]
    return np.concatenate([[seen[0, 0]], by_exponent])


def shares(counts: Sequence[int]) -> list[float]:
    """The counts as percent of all of them."""
    total = max(sum(counts), 1)
    return [100 * count / total for count in counts]
