"""JSON Merge Patch (RFC 7396): how a large canonical JSON file is sent as what changed in it.

A patch says "remove" by null, so it can't say that a value becomes null. `merge_patch` therefore gives None where
applying its patch would not give the target again, and the caller sends the whole.
"""

from __future__ import annotations

from typing import Any


def merge_patch(source: Any, target: Any) -> Any | None:
    """The patch that turns `source` into `target`; None where there is none."""
    patch = _difference(source, target)
    return patch if merged(source, patch) == target else None


def merged(source: Any, patch: Any) -> Any:
    """`source` with `patch` applied; neither is changed."""
    if not isinstance(patch, dict):
        return patch
    result = dict(source) if isinstance(source, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def _difference(source: Any, target: Any) -> Any:
    if not isinstance(source, dict) or not isinstance(target, dict):
        return target
    patch: dict[str, Any] = dict.fromkeys(source.keys() - target.keys())
    for key, value in target.items():
        if key not in source or source[key] != value:
            patch[key] = _difference(source.get(key), value)
    return patch
