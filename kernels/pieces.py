"""A row of blocks that is too large to be held is seen in pieces: parts of its rows, again at every pass.

Maxima, sums of errors and sets of mantissas are put together from pieces exactly, so the scales are those that the
whole would have got, bit for bit, and memory grows neither with the columns of a tensor nor with its blocks.
"""

from collections.abc import Callable, Iterator
from typing import Any

from numpy.typing import NDArray

# A call begins a pass. It gives (row, column, part [k, n]) from the first row on: rows and columns count from the
# first piece's corner. A part begins where a block does, or lies in one block; it is good until the next.
Pieces = Callable[[], Iterator[tuple[int, int, NDArray[Any]]]]


def blocks_of(col: int, part: NDArray[Any], c: int) -> slice:
    """The blocks of c columns that a part [k, n] whose first column is `col` lies in."""
    return slice(col // c, -(-(col + part.shape[1]) // c))


def column_spans(begin: int, end: int, c: int, most: int) -> Iterator[tuple[int, int]]:
    """Runs of at most `most` columns that make up [begin, end), fit for pieces: whole blocks of c, or parts of one."""
    step = most // c * c if c <= most else c
    for first in range(begin, end, step):
        last = min(first + step, end)
        for col in range(first, last, most):
            yield col, min(col + most, last)
