"""The spread permutation: the loud channels of the latent dealt evenly over the four tiles of a KV row.

Each tile has one scale. Where a few channels are far louder than the rest and lie in one tile, that tile's other
elements lose their bits; dealt over four tiles, each scale carries a quarter of them. Stored element k is channel
order[k]; with the columns of the absorbed kv_b in the same order, every score and every output is the same sum of
the same products. kv_a stays as it is: in our checkpoint it is FP8 in blocks of 128 rows, so permuting its rows
would not be exact.

Off by default: which channels are loud is a fact of the model, and no claim is made before real latents are seen.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.kernels.kv_row import LATENT, TILES

Array = npt.NDArray[Any]


def sizes_from_weights(gains: Array, kv_a: Array) -> Array:
    """How loud each channel can be expected to be, without any latents: |gain| * norm of its row of kv_a.

    gains [512] of the layer norm behind kv_a, kv_a [512, hidden]; f64 [512]. Exact for inputs without direction.
    """
    if gains.shape != (LATENT,) or kv_a.ndim != 2 or len(kv_a) != LATENT:
        raise ValueError(
            f"expected gains [{LATENT}] and kv_a [{LATENT}, hidden], got {gains.shape}, {kv_a.shape}"
        )
    norms: Array = np.linalg.norm(np.asarray(kv_a, np.float64), axis=1)
    return np.abs(np.asarray(gains, np.float64)) * norms


def sizes_from_latents(latents: Array) -> Array:
    """Root mean square of each channel over sampled latents [T, 512]: f64 [512]."""
    if latents.ndim != 2 or latents.shape[1] != LATENT or not len(latents):
        raise ValueError(f"expected latents [T, {LATENT}] with T > 0, got {latents.shape}")
    sizes: Array = np.sqrt(np.square(np.asarray(latents, np.float64)).mean(axis=0))
    return sizes


def spread_order(sizes: Array) -> Array:
    """The permutation i32 [512] that deals channels by falling size: ranks 0, 4, 8, .. to tile 0, 1, 5, .. to tile 1.

    Within a tile sizes fall, so that groups which share an exponent drop hold channels alike. Equal sizes keep
    their order: the same sizes give the same permutation everywhere.
    """
    if sizes.shape != (LATENT,) or not np.isfinite(sizes).all():
        raise ValueError(f"expected {LATENT} finite channel sizes, got {sizes.shape}")
    rank = np.argsort(-sizes, kind="stable")
    return np.concatenate([rank[tile::TILES] for tile in range(TILES)]).astype(np.int32)


def spread_columns(weight: Array, order: Array) -> Array:
    """The absorbed kv_b [..., 512] with its columns in the stored order; works on numpy and torch alike."""
    if sorted(int(k) for k in order) != list(range(LATENT)) or weight.shape[-1] != LATENT:
        raise ValueError(
            f"expected a permutation of {LATENT} and a weight [..., {LATENT}], got {weight.shape}"
        )
    return weight[..., order]
