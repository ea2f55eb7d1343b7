"""Where the language model is: towers and encoders are known by their place, not by a list of their names.

The language model's layers are beside its embeddings: `a.b.layers.N` where `a.b` also holds `embed_tokens`. Numbered
modules elsewhere are towers, vocoders or drafts, which runtimes build without a place for codes; but for multi-token
prediction, whose modules are called so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_EMBEDDINGS = frozenset(
    {
        "embed_tokens",
        "word_embeddings",
        "wte",
        "embed_in",
        "tok_embeddings",
        "embeddings",
        "embedding",
        "embed",
    }
)
_FIRST_NUMBER = re.compile(r"^(?P<home>.*?)\.?[^.]+\.\d+\.")
_DRAFT = re.compile(r"(^|\.)(mtp|nextn|mtp_layers|mtp_block)(\.|$)")


def language_homes(homes: Mapping[str, Iterable[str]], names: Iterable[str]) -> frozenset[str]:
    """The modules that hold both embeddings and a numbered list of layers; "" is the top. Empty where none does."""
    numbered = {home for name in names if (home := home_of_list(name)) is not None}
    top = {name.partition(".")[0] for name in names}
    return frozenset(
        home for home in numbered if _EMBEDDINGS & set(top if home == "" else homes.get(home, ()))
    )


def home_of_list(name: str) -> str | None:
    """`a.layers.0.b.weight` -> `a`, by its first number; None where it has none."""
    found = _FIRST_NUMBER.match(name)
    return found["home"] if found else None


def is_elsewhere(name: str, language: frozenset[str]) -> bool:
    """Whether a numbered module lies outside the language model (and no multi-token prediction)."""
    home = home_of_list(name)
    if home is None or not language or _DRAFT.search(name):
        return False
    return home not in language
