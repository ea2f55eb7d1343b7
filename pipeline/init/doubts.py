"""What a person should know of a parent before its recipe is used: names that no loader maps, a missing head."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardmill.pipeline.init.look import text_config
from shardmill.pipeline.recipe.globs import fold
from shardmill.pipeline.types import Parent

# What training wrappers leave in names: torch.compile, FSDP, activation checkpointing, DeepSpeed, DDP, PEFT, EMA.
_WRAPPERS = re.compile(
    r"(?:^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module|_module|ds_module|"
    r"modules_to_save|base_layer|original_module|parametrizations)\."
    r"|^(module|base_model\.model|student|teacher|ema_model|learner|state_dict)\."
)
_THRICE = re.compile(
    r"(?:^|\.)(\w+)\.\1\.\1\.|(?:^|\.)(language_model|text_model|vision_tower)\.(?:\w+\.)?\2\."
)
_HEADS = ("lm_head", "proj_out", "embed_out", "output", "head", "score", "classifier", "embed")
_EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight", "embed_in.weight")


def doubts(parent: Parent) -> list[str]:
    """A sentence for each thing that looks wrong with the parent itself."""
    return [*_wrapped(parent), *_headless(parent)]


def _wrapped(parent: Parent) -> Iterator[str]:
    """At most one sentence: names that bear a wrapper's prefix, which no loader maps to a module."""
    one_each = {fold(name): name for name in reversed(parent.tensors)}
    for name in sorted(one_each.values()):
        if found := _WRAPPERS.search(name) or _THRICE.search(name):
            part = next(group for group in found.groups() if group)
            yield (
                f"{name}: bears the prefix {part!r}, which a training wrapper left and no loader maps; save the model "
                f"without its wrapper, or rename its tensors"
            )
            return


def _headless(parent: Parent) -> Iterator[str]:
    """An untied language model without an output head: a loader starts with a random one, or refuses."""
    places = (parent.config, text_config(parent.config))
    tied = next((each["tie_word_embeddings"] for each in places if "tie_word_embeddings" in each), None)
    modules = {name.removesuffix(".weight").rpartition(".")[2] for name in parent.tensors}
    causal = any("CausalLM" in str(each) for each in parent.config.get("architectures") or ())
    embeds = any(name.endswith(_EMBEDDINGS) for name in parent.tensors)
    if tied is False and causal and embeds and not modules & set(_HEADS):
        yield (
            "lm_head.weight: is missing, though config.json says that embeddings are not tied; export the head, or set "
            "tie_word_embeddings to true"
        )
