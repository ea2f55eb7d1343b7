"""The k best of a long row of scores, found tile by tile: memory follows the tile, not the row.

The order is total: a higher score comes first, and of equal scores the lower index. An entry is one int64 key
whose order is that order, so merging two tiles is a sort of keys, and the result does not depend on the tiles.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

NONE = -(2**63)  # the key of no entry: below every other
_INDEX_BITS = 32
_INDEX_MAX = 2**32 - 1


def reference(
    scores: npt.NDArray[np.float32], lengths: npt.NDArray[np.int64], k: int
) -> npt.NDArray[np.int32]:
    """Indices int32 [rows, k] of the best of scores f32 [rows, n] before lengths [rows]; -1 where there are fewer."""
    found = np.full((len(scores), k), -1, np.int32)
    for row, (values, length) in enumerate(zip(scores, lengths, strict=True)):
        best = np.lexsort((np.arange(length), -values[:length]))[:k]
        found[row, : len(best)] = best
    return found


def pack(scores: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """f32 scores and their indices (any integer, 0 .. 2**32 - 1) -> int64 keys; a negative index gives NONE.

    The bits of a float order as a signed integer once the magnitude of negative numbers is flipped. Adding zero
    makes -0 equal to +0. NaN has no place in an order and must not occur.
    """
    bits = (scores + 0.0).view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = (ordered << _INDEX_BITS) | (_INDEX_MAX - indices.to(torch.int64))
    return torch.where(indices < 0, NONE, key)


def unpack(keys: torch.Tensor) -> torch.Tensor:
    """int64 keys -> int64 indices; NONE gives -1."""
    return torch.where(keys == NONE, -1, _INDEX_MAX - (keys & _INDEX_MAX))


def merge(best: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """The k best of keys [rows, k] and keys [rows, m], best first. Keys differ, so there are no ties to break."""
    return torch.topk(torch.cat([best, more], dim=1), best.shape[1], dim=1).values


def empty(rows: int, k: int, device: torch.device | str) -> torch.Tensor:
    """Keys [rows, k] of nothing yet."""
    return torch.full((rows, k), NONE, dtype=torch.int64, device=device)


def select(scores: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    """Indices int32 [rows, min(k, n)] of the best of scores f32 [rows, n] before lengths [rows], -1 beyond.

    The plain form of the first level. Serving uses vLLM's kernel here, which selects the same scores; which of
    several equal scores at the edge it takes is its own.
    """
    columns = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    inside = torch.where(columns < lengths[:, None], columns, -1)
    keys = torch.topk(pack(scores, inside), min(k, scores.shape[1]), dim=1).values
    return unpack(keys).to(torch.int32)


def fold(best: torch.Tensor, begin: int, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Keys [rows, k] with one more tile: scores f32 [rows, n] that begin at index `begin`, chosen int32 [rows, m]
    of its columns, -1 for none."""
    taken = scores.gather(1, chosen.clamp_min(0).to(torch.int64))
    return merge(best, pack(taken, torch.where(chosen < 0, chosen, chosen + begin)))


def two_level(tiles: Iterable[tuple[int, torch.Tensor, torch.Tensor]], rows: int, k: int) -> torch.Tensor:
    """Indices int64 [rows, k], best first, -1 where there are fewer.

    tiles: (begin, scores f32 [rows, n], lengths [rows]); of a tile the first lengths[row] columns count.
    """
    best: torch.Tensor | None = None
    for begin, scores, lengths in tiles:
        best = empty(rows, k, scores.device) if best is None else best
        best = fold(best, begin, scores, select(scores, lengths, k))
    return unpack(empty(rows, k, "cpu") if best is None else best)
