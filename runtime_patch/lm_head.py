"""The loader of an FP8 lm_head: codes by rows of the vocabulary, scales by rows of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from runtime_patch.errors import PatchError

Loader = Callable[..., None]


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
