"""mse/1 takes the best of its eight scales, and is never worse than amax/1."""

from __future__ import annotations

import numpy as np
import pytest

from shardmill.kernels.block_fp8 import decode, grid
from shardmill.kernels.formats import E4M3_VALUES, nearest_codes
from shardmill.kernels.mse import STEPS
from tests.kernels.conftest import as_f32, assert_same_bits, bell, encode, native_copy, words


def squared_error(source, codes, scales, block):
    """Sum of squared errors of each block, in f64 from start to end: f64 [n, m]."""
    R, C = source.shape
    wide = np.repeat(np.repeat(scales.astype(np.float64), block[0], axis=0)[:R], block[1], axis=1)[:, :C]
    squares = (E4M3_VALUES[codes].astype(np.float64) * wide - as_f32(source)) ** 2
    down = np.add.reduceat(squares, np.arange(0, R, block[0]), axis=0)
    return np.add.reduceat(down, np.arange(0, C, block[1]), axis=1)


def heavy_tailed(seed, *shape):
    """BF16 bits with a few numbers much larger than the rest."""
    return np.where(words(seed, *shape) % 50 == 0, bell(seed, *shape) + 0x0180, bell(seed, *shape)).astype(
        np.uint16
    )


@pytest.mark.parametrize("make", [bell, heavy_tailed])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_the_scale_is_the_best_of_eight(kernel, make, dtype):
    """Each block has the scale whose squared error, computed slowly in f64, is the least of the eight."""
    block, source = (32, 48), make(61, 100, 200)
    source = source if dtype == "bf16" else as_f32(source) * np.float32(1.01)
    codes, scales, counts = encode("mse/1", source, block, kernel)
    plain = encode("amax/1", source, block, kernel)[1]
    tried = np.stack([plain * np.float32(1 + step / STEPS) for step in range(STEPS)])
    errors = []
    for trial in tried:
        wide = np.repeat(np.repeat(trial, 32, axis=0)[:100], 48, axis=1)[:, :200]
        errors.append(squared_error(source, nearest_codes(as_f32(source) / wide, E4M3_VALUES), trial, block))
    best = np.argmin(errors, axis=0)
    assert_same_bits(np.take_along_axis(tried, best[None], axis=0)[0], scales, "scales")
    np.testing.assert_allclose(squared_error(source, codes, scales, block), np.min(errors, axis=0), rtol=1e-6)
    assert counts == {"blocks": scales.size, "moved_blocks": int((best != 0).sum())}


@pytest.mark.parametrize(("block", "least_gain"), [((128, 128), 0.005), ((32, 32), 0.03)])
def test_what_it_gains(kernel, block, least_gain):
    """On bell-shaped weights the error falls by at least 0.5 % in large blocks and 3 % in small ones."""
    source = bell(62, 384, 512)
    errors = [
        np.sqrt(squared_error(source, *encode(recipe, source, block, kernel)[:2], block).sum())
        for recipe in ("mse/1", "amax/1")
    ]
    assert errors[0] < (1 - least_gain) * errors[1]


def test_native_blocks_keep_their_codes(kernel):
    """A copy of a native FP8 block is nearest at amax / 448, and is not moved."""
    source = native_copy(63, (64, 64), 128, 192)
    codes, scales, counts = encode("mse/1", source, (64, 64), kernel)
    plain_codes, plain_scales, _ = encode("amax/1", source, (64, 64), kernel)
    assert_same_bits(plain_scales, scales, "scales")
    assert_same_bits(plain_codes, codes, "codes")
    assert counts == {"blocks": 6, "moved_blocks": 0}


def test_zero_and_tiny_blocks_keep_amax(kernel):
    """Zero blocks have the scale 1; blocks of subnormal numbers have amax/1's bytes; ordinary neighbours move."""
    source = bell(64, 32, 96)
    source[:, 32:64] = words(65, 32, 32) & 0x8000
    source[:, 64:] = words(66, 32, 32) & 0x807F
    codes, scales, _ = encode("mse/1", source, (32, 32), kernel)
    plain_codes, plain_scales, _ = encode("amax/1", source, (32, 32), kernel)
    assert_same_bits(plain_codes[:, 32:], codes[:, 32:], "codes")
    assert_same_bits(plain_scales[:, 1:], scales[:, 1:], "scales")
    assert scales[0, 0] > plain_scales[0, 0]
    assert grid(source.shape, (32, 32)) == scales.shape
    assert np.isfinite(decode(codes, scales, (32, 32))).all()
