"""Of equal scores the lower index: makes the choice of a top-k kernel that knows no order among equals a definite one.

vLLM's kernels select the k best of a row by radix and write them in whatever order their threads end. Which of several
equal scores at the edge they take is left to chance, and so is the order of what they write. Here the score at the edge
is taken from such a choice, and the row is read once more: all columns above it and the first of those equal to it, in
rising order. So a choice made tile by tile is that of one tile (kernels.torch_topk).
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def lowest_kernel(scores, lengths, edge, places, out, row_stride, k, BLOCK: tl.constexpr):
    """A program is a row: columns above edge[row] and the first places[row] equal to it -> out [rows, k], rising."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    limit = tl.load(edge + row)
    left = tl.load(places + row)
    scores += row * row_stride
    out += row * k
    begin = 0
    while begin < length:  # a while: the CPU interpreter has no range over a loaded number
        column = begin + tl.arange(0, BLOCK)
        inside = column < length
        score = tl.load(scores + column, mask=inside, other=0.0)
        equal = inside & (score == limit)
        rank = tl.cumsum(equal.to(tl.int32), 0)
        taken = (inside & (score > limit)) | (equal & (rank <= left))
        at = tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(out + at, column, mask=taken)
        out += tl.sum(taken.to(tl.int32), 0)
        left -= tl.sum(equal.to(tl.int32), 0)
        begin += BLOCK


def lowest_of_equals(scores: torch.Tensor, lengths: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """A choice of the k best, in any order and with any of the equals -> the definite one.

    scores f32 [rows, n], contiguous columns, no NaN before a row's end; lengths int32 [rows]; chosen int32 [rows, k],
    -1 where a row is shorter than k. int32 [rows, k]: rising columns, -1 beyond them.
    """
    rows, k = chosen.shape
    taken = scores.gather(1, chosen.clamp_min(0).to(torch.int64)).masked_fill_(chosen < 0, float("inf"))
    whole = lengths <= k
    edge = taken.amin(1).masked_fill_(whole, float("-inf"))
    places = (taken == edge[:, None]).sum(1, dtype=torch.int32).masked_fill_(whole, k)
    found = torch.full_like(chosen, -1)
    if rows:
        lowest_kernel[(rows,)](
            scores, lengths, edge, places, found, scores.stride(0), k, BLOCK=BLOCK, num_warps=4
        )
    return found
