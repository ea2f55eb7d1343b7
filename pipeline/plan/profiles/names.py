"""The names that loaders know a published module by: a list that excludes a module must name it as each of them does.

Published names are those of the files. transformers (4.52 and later) builds towers and language models of multimodal
checkpoints under a `model.` of their own, and matches its lists against names in memory; vLLM maps names back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# (prefix in the files, prefix in memory)
_MOVED = (
    ("visual.", "model.visual."),
    ("vision_tower.", "model.vision_tower."),
    ("vision_model.", "model.vision_model."),
    ("vision_embed_tokens.", "model.vision_embed_tokens."),
    ("audio_tower.", "model.audio_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("embed_vision.", "model.embed_vision."),
    ("embed_audio.", "model.embed_audio."),
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head", "lm_head"),
    ("thinker.", "model.thinker."),
    ("embed_out", "lm_head"),
)
# (part in the files, part in memory), anywhere in a name: transformers 5 calls banks of experts alike.
_RENAMED = (
    (".block_sparse_moe.gate", ".mlp.router"),
    (".block_sparse_moe.", ".mlp."),
    (".mlp.dense_h_to_4h", ".mlp.fc1"),
    (".mlp.dense_4h_to_h", ".mlp.fc2"),
)

# model_type -> what its output projection is called, where not lm_head.
_HEADS: Mapping[str, str] = {
    "whisper": "proj_out",
    "gpt_neox": "embed_out",
    "bert": "cls.predictions.decoder",
}
_HEAD_NAMES = ("lm_head", "proj_out", "embed_out", "output", "head")


def in_memory(module: str) -> Iterator[str]:
    """The module's published name, and those that it has in a loader's memory."""
    yield module
    for published, memory in _MOVED:
        if module.startswith(published):
            yield memory + module.removeprefix(published)
    for published, memory in _RENAMED:
        if published in module:
            yield module.replace(published, memory)


def heads(modules: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """The output projection of a model whose files hold none, since it is tied to the embeddings: loaders build it."""
    if any(module.rpartition(".")[2] in _HEAD_NAMES for module in modules):
        return []
    return [_HEADS.get(str(config.get("model_type")), "lm_head")]
