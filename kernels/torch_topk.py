"""The k best of a long row of scores, found tile by tile: memory follows the tile, not the row.

The order is total: a higher score comes first, and of equal scores the lower index. Two levels: the winners of each
tile stand beside the best so far, in columns of rising index; when the columns are full, the best of them become the
best so far. Where `best_of` breaks ties by the lower column, the result does not depend on the tiles. Scores are
finite.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

BestOf = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]

_NONE = -(2**63)  # the key of no entry: below every other
_COLUMN_BITS = 32
_COLUMN_MAX = 2**32 - 1


def reference(
    scores: npt.NDArray[np.float32], lengths: npt.NDArray[np.int64], k: int
) -> npt.NDArray[np.int32]:
    """Indices int32 [rows, k] of the best of scores f32 [rows, n] before lengths [rows]; -1 where there are fewer."""
    found = np.full((len(scores), k), -1, np.int32)
    for row, (values, length) in enumerate(zip(scores, lengths, strict=True)):
        best = np.lexsort((np.arange(length), -values[:length]))[:k]
        found[row, : len(best)] = best
    return found


def keys(scores: torch.Tensor) -> torch.Tensor:
    """f32 scores [rows, n] -> int64 keys whose order is the order above: by score, then by falling column.

    The bits of a float order as a signed integer once the magnitude of negative numbers is flipped. Adding zero
    makes -0 equal to +0. NaN has no place in an order and must not be among the columns that count.
    """
    bits = (scores + 0.0).view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    columns = torch.arange(scores.shape[1], device=scores.device)
    return (ordered << _COLUMN_BITS) | (_COLUMN_MAX - columns)


def select(scores: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    """Columns int32 [rows, min(k, n)] of the best of scores f32 [rows, n] before lengths [rows], -1 beyond.

    The plain `best_of`, exact in its order. Serving uses vLLM's kernel, which selects the same scores; which of
    several equal scores at the edge it takes, and in which order, is its own.
    """
    outside = torch.arange(scores.shape[1], device=scores.device) >= lengths[:, None]
    best = torch.topk(keys(scores).masked_fill(outside, _NONE), min(k, scores.shape[1]), dim=1).values
    return torch.where(best == _NONE, -1, _COLUMN_MAX - (best & _COLUMN_MAX)).to(torch.int32)


class Running:
    """The k best of each row so far, and room for the winners of `tiles` more tiles beside them.

    Scratch a row: 8 bytes a column of k * (1 + tiles) columns, whatever is added.
    """

    def __init__(
        self, rows: int, k: int, tiles: int, device: torch.device | str, best_of: BestOf = select
    ) -> None:
        columns = k * (1 + tiles)
        self.k = k
        self.best_of = best_of
        self.scores = torch.full((rows, columns), float("-inf"), dtype=torch.float32, device=device)
        self.indices = torch.full((rows, columns), -1, dtype=torch.int32, device=device)
        self.filled = 0

    def add(self, begin: int, scores: torch.Tensor, lengths: torch.Tensor) -> None:
        """One tile: scores f32 [rows, n] of the indices from `begin`; of a row the first lengths[row] count."""
        if self.filled + self.k > self.scores.shape[1]:
            self._reduce()
        chosen = self.best_of(scores, lengths, self.k)
        at = slice(self.filled, self.filled + chosen.shape[1])
        taken = scores.gather(1, chosen.clamp_min(0).to(torch.int64))
        self.scores[:, at] = taken.masked_fill_(chosen < 0, float("-inf"))
        self.indices[:, at] = torch.where(chosen < 0, -1, chosen + begin)
        self.filled = at.stop

    def _reduce(self) -> None:
        lengths = torch.full(
            (self.scores.shape[0],), self.filled, dtype=torch.int32, device=self.scores.device
        )
        chosen = self.best_of(self.scores[:, : self.filled], lengths, self.k).to(torch.int64)
        self.scores[:, : self.k] = self.scores.gather(1, chosen)
        self.indices[:, : self.k] = self.indices.gather(1, chosen)
        self.filled = self.k

    def best(self) -> torch.Tensor:
        """Indices int32 [rows, k], in the order of `best_of`; -1 where there are fewer."""
        if self.filled > self.k:
            self._reduce()
        return self.indices[:, : self.k]
