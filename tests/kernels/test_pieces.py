"""A row of blocks that is seen in pieces gets the scales, counts and codes that it gets when it is seen whole."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardmill.kernels.block_fp8 import RECIPES, BlockEncoder, NonFinite, rows_of
from shardmill.kernels.pieces import column_spans
from tests.kernels.conftest import as_f32, assert_same_bits, bell, encode, native_copy


def in_pieces(recipe, source, block, kernel, rows_most, columns_most):
    """Codes, scales and counts of a matrix of one row of blocks, from parts of at most so many rows and columns."""
    R, C = source.shape
    encoder = BlockEncoder(recipe, block, rows_of(kernel))

    def pieces() -> Iterator[tuple[int, int, np.ndarray]]:
        for row in range(0, R, rows_most):
            for col, end in column_spans(0, C, block[1], columns_most):
                yield row, col, np.ascontiguousarray(source[row : row + rows_most, col:end])

    scales, counts = encoder.choose(pieces, R, -(-C // block[1]))
    codes = np.empty((R, C), np.uint8)
    for row, col, part in pieces():
        own, out = (
            scales[:, col // block[1] : -(-(col + part.shape[1]) // block[1])],
            np.empty(part.shape, np.uint8),
        )
        encoder.encode_with(part, np.ascontiguousarray(own), out)
        codes[row : row + len(part), col : col + part.shape[1]] = out
    return codes, scales, counts


def sources(rows: int, cols: int, block: tuple[int, int]) -> dict[str, np.ndarray]:
    """Fresh weights, copies of native FP8, zeros among them, and numbers so small that they have a way of their own."""
    fresh, native = bell(7, rows, cols), native_copy(8, block, rows, cols)
    mixed = np.where(np.arange(cols) < cols // 2, fresh, native).astype(np.uint16)
    mixed[:, : cols // 5] = 0
    tiny = (fresh & 0x807F) | 0x0100
    return {
        "fresh": fresh,
        "native": native,
        "mixed": mixed,
        "tiny": tiny.astype(np.uint16),
        "f32": as_f32(fresh),
    }


@pytest.mark.parametrize("recipe", sorted(RECIPES))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 150),
    width=st.sampled_from([1, 3, 16, 32, 100, 1000]),
    rows_most=st.sampled_from([1, 3, 64]),
    columns_most=st.sampled_from([7, 32, 1000]),
    kind=st.sampled_from(["fresh", "native", "mixed", "tiny", "f32"]),
)
def test_pieces_are_the_whole(recipe, kernel, rows, cols, width, rows_most, columns_most, kind):
    """Whatever the pieces are, every bit and every count is that of the whole."""
    block = (40, width)
    source = sources(rows, cols, block)[kind]
    codes, scales, counts = encode(recipe, source, block, kernel)
    found = in_pieces(recipe, source, block, kernel, rows_most, columns_most)
    assert_same_bits(found[0], codes, "codes")
    assert_same_bits(found[1], scales, "scales")
    assert found[2] == counts


def test_a_sample_that_misleads_is_seen_through(kernel):
    """A block whose sampled rows explain themselves by another scale is looked at whole, in pieces too."""
    source = native_copy(9, (64, 64), 64, 64)
    source[0], source[-1] = source[0, 0], source[0, 0]
    codes, scales, counts = encode("recover/1", source, (64, 64), kernel)
    found = in_pieces("recover/1", source, (64, 64), kernel, 5, 13)
    assert_same_bits(found[1], scales, "scales")
    assert_same_bits(found[0], codes, "codes")
    assert found[2] == counts


def test_the_place_of_a_number_that_is_not_finite(kernel):
    """A NaN in a later piece is named by its row and column in the whole row of blocks."""
    source = bell(3, 12, 50)
    source[7, 33] = 0x7FC0
    with pytest.raises(NonFinite) as fault:
        in_pieces("amax/1", source, (12, 16), kernel, 4, 16)
    assert (fault.value.row, fault.value.col) == (7, 33)


@given(begin=st.integers(0, 3), c=st.integers(1, 40), most=st.integers(1, 60), width=st.integers(1, 200))
def test_spans_of_columns(begin, c, most, width):
    """Spans follow one another, none is longer than asked for, and each is of whole blocks or lies in one."""
    first = begin * c
    spans = list(column_spans(first, first + width, c, most))
    assert [end for _, end in spans[:-1]] == [col for col, _ in spans[1:]]
    assert (spans[0][0], spans[-1][1]) == (first, first + width)
    for col, end in spans:
        assert 0 < end - col <= most
        assert col % c == 0 or col // c == (end - 1) // c
