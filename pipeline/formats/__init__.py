"""The number formats: the folder is the table. A module here that has a FORMAT, or several FORMATS, adds them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from shardmill.pipeline.formats.base import Format


@cache
def formats() -> Mapping[str, Format]:
    """Name -> Format, by name."""
    modules = (importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__))
    found = [
        form
        for module in modules
        for form in getattr(module, "FORMATS", [module.FORMAT] if hasattr(module, "FORMAT") else [])
    ]
    return {each.name: each for each in sorted(found, key=lambda each: each.name)}
