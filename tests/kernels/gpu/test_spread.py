"""The spread permutation changes where channels lie and nothing that attention computes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.kernels import spread
from tests.kernels.gpu.distributions import attention


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_attention_is_the_same_function_in_f64_for_any_order(seed):
    random = np.random.default_rng(seed)
    latents = random.standard_normal((40, 512))
    keys, values = random.standard_normal((2, 3, 8, 512))  # the absorbed kv_b: [heads, width, 512] each
    queries = random.standard_normal((3, 5, 8))
    order = random.permutation(512).astype(np.int32)
    plain = heads(queries, keys, values, latents)
    dealt = heads(
        queries, spread.spread_columns(keys, order), spread.spread_columns(values, order), latents[:, order]
    )
    np.testing.assert_allclose(dealt, plain, rtol=1e-10, atol=1e-12)


def heads(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, latents: np.ndarray) -> np.ndarray:
    """Absorbed multi-head latent attention: [heads, queries, width]."""
    absorbed = queries @ keys / 64
    return np.stack([attention(q, latents) @ v.T for q, v in zip(absorbed, values, strict=True)])


def test_channels_are_dealt_by_falling_size_over_the_four_tiles():
    sizes = np.random.default_rng(1).permutation(512).astype(float)
    order = spread.spread_order(sizes)
    assert sorted(order) == list(range(512))
    tiles = sizes[order].reshape(4, 128)
    np.testing.assert_array_equal(tiles[:, 0], [511, 510, 509, 508])
    assert (np.diff(tiles, axis=1) == -4).all()


def test_equal_sizes_keep_their_order_so_that_the_permutation_is_the_same_everywhere():
    order = spread.spread_order(np.arange(512) % 3 + 1.0)
    rank = np.concatenate([np.arange(2, 512, 3), np.arange(1, 512, 3), np.arange(0, 512, 3)])
    np.testing.assert_array_equal(order.reshape(4, 128), rank.reshape(128, 4).T)


def test_weights_alone_tell_the_loud_channels_that_latents_show():
    random = np.random.default_rng(2)
    kv_a = random.standard_normal((512, 64)) / 8
    gains = np.exp(random.standard_normal(512))
    hidden = random.standard_normal((4000, 64))
    by_weights = spread.sizes_from_weights(gains, kv_a)
    by_latents = spread.sizes_from_latents(hidden @ kv_a.T * gains)
    assert np.corrcoef(np.log(by_weights), np.log(by_latents))[0, 1] > 0.99


def test_what_is_no_permutation_or_no_size_is_refused():
    with pytest.raises(ValueError, match="permutation"):
        spread.spread_columns(np.zeros((2, 512)), np.zeros(512, np.int32))
    with pytest.raises(ValueError, match="finite"):
        spread.spread_order(np.full(512, np.nan))
    with pytest.raises(ValueError, match="gains"):
        spread.sizes_from_weights(np.ones(511), np.ones((512, 4)))
