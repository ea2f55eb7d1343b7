"""A question that cannot be asked of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class UnaskedError(Exception):
    """Nothing is known that would answer the question. The message says what is missing."""


def no_table(loader: str, config: Mapping[str, Any]) -> UnaskedError:
    """Of a model whose modules no table of `loader` has; a config without a model_type names no model."""
    kind = config.get("model_type")
    if kind is None:
        return UnaskedError("no config.json names a model_type, and so the model's modules are not known")
    return UnaskedError(f"no table of {loader}'s modules for model_type {str(kind)[:60]!r}")
