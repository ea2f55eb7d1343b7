"""The block scales of a layer: how lm_head's are loaded, and whether all of a layer's were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardmill.runtime_patch.errors import PatchError

Loader = Callable[..., None]

UNFILLED = torch.finfo(torch.float32).min  # what vLLM puts into a scale parameter that it creates


def lm_head_loader(layer: Any, block: int, load_rows: Loader) -> Loader:
    """A loader for both parameters of an FP8 lm_head: codes by vLLM's own row loader, scales by block rows.

    vLLM's loader requires every parameter to have one row a word of the vocabulary. The scales have one row a
    block of words: this rank's are those of its first word onwards. Rows of padding scale by 1.
    """

    def load(param: torch.nn.Parameter, loaded: torch.Tensor) -> None:
        if param.dtype != torch.float32:
            load_rows(param, loaded)
            return
        begin = layer.shard_indices.org_vocab_start_index
        end = layer.shard_indices.org_vocab_end_index
        if begin % block:
            raise PatchError(
                f"lm_head: this rank's rows begin at {begin}, which is no multiple of the block of {block}; "
                "choose a tensor-parallel size whose share of the vocabulary is whole blocks"
            )
        rows = -(-end // block) - begin // block
        param.data[:rows].copy_(loaded.narrow(0, begin // block, rows))
        param.data[rows:].fill_(1.0)

    return load


def check_filled(layer: Any) -> None:
    """Raises PatchError where a block scale of the layer was never loaded, or is no finite number.

    vLLM's loader counts a parameter as loaded once any part of it is: a fused module whose member brought no
    `weight_scale_inv` would be served with garbage in that member's rows.
    """
    scales = layer.weight_scale_inv
    broken = int(((scales == UNFILLED) | ~torch.isfinite(scales)).sum())
    if broken:
        raise PatchError(
            f"{getattr(layer, 'prefix', type(layer).__name__)}: {broken} of {scales.numel()} block scales were not "
            "loaded or are not finite; the checkpoint lacks the weight_scale_inv of this module or of a member of it"
        )
