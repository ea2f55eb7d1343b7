"""config.json follows the names: a module that is renamed or dropped is so too in the parent's own declaration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import translate
from typing import Any

from shardmill.pipeline.types import TensorRef

_LISTS = (
    "modules_to_not_convert",
    "ignored_layers",
    "ignore",
    "exclude_modules",
    "llm_int8_skip_modules",
    "targets",
)
_TABLES = ("quantized_layers",)
_LEAVES = re.compile(r"\.(weight|bias|weight_[a-z_0-9]+|input_scale|qweight|qzeros|scales|g_idx)$")


def follow(
    config: Mapping[str, Any],
    renamed: Mapping[str, str],
    before: Mapping[str, TensorRef],
    after: Mapping[str, TensorRef],
) -> dict[str, Any]:
    """`config` in the names of the child. renamed: parent tensor -> output tensor; before and after: all tensors."""
    modules = {_module(old): _module(new) for old, new in renamed.items() if _module(old) != _module(new)}
    lost = {_module(name) for name in before.keys() - after.keys()} - set(modules)
    gone = lost - {_module(name) for name in after} if lost else lost
    if not modules and not gone:
        return dict(config)
    return {key: _followed(key, value, modules, gone) for key, value in config.items()}


def _module(tensor: str) -> str:
    return _LEAVES.sub("", tensor)


def _followed(key: str, value: Any, modules: Mapping[str, str], gone: set[str]) -> Any:
    if key in _LISTS and isinstance(value, list):
        return _list(value, modules, gone)
    if key in _TABLES and isinstance(value, dict):
        return {modules.get(name, name): entry for name, entry in value.items() if name not in gone}
    if isinstance(value, dict):
        return {inner: _followed(inner, each, modules, gone) for inner, each in value.items()}
    return value


def _list(entries: list[Any], modules: Mapping[str, str], gone: set[str]) -> list[Any]:
    """The entries of a list of modules; a pattern that no longer hits a renamed one is joined by its new name."""
    kept = [
        modules.get(each, each) if isinstance(each, str) else each for each in entries if each not in gone
    ]
    texts = [each for each in entries if isinstance(each, str)]
    added = [
        new
        for old, new in modules.items()
        if new not in kept and _hits(texts, old) and not _hits([e for e in kept if isinstance(e, str)], new)
    ]
    return [*kept, *sorted(added)]


def _hits(entries: Iterable[str], module: str) -> bool:
    return any(_hit(entry, module) for entry in entries)


def _hit(entry: str, module: str) -> bool:
    """Whether an entry names a module: as itself, as what it is in, as a glob, or as an expression after `re:`."""
    if entry.startswith("re:"):
        try:
            return re.match(entry[3:], module) is not None
        except re.error:
            return False
    return module == entry or module.startswith(entry + ".") or re.match(translate(entry), module) is not None
