"""Where a config declares a quantization, and whether ModelOpt's two files say the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardmill.verify.rules.findings import Finding

DECLARATIONS = ("quantization_config", "compression_config")
LEGACY = "hf_quant_config.json"
DEPTH_MAX = 20


def declarations_in(
    config: Mapping[str, Any], path: str = "", depth: int = DEPTH_MAX
) -> Iterator[tuple[str, Any]]:
    """(path, declaration) of every quantization_config in a config, however deep, the top first."""
    for key in DECLARATIONS:
        if isinstance(config.get(key), dict):
            yield path + key, config[key]
    for key, value in config.items():
        if key not in DECLARATIONS and isinstance(value, dict) and depth:
            yield from declarations_in(value, f"{path}{key}.", depth - 1)


def configs_differ(config: Mapping[str, Any], legacy: Mapping[str, Any]) -> Iterator[Finding]:
    """hf_quant_config.json against config.json, in what both state: algorithm, group, exclusions, cache."""
    pairs = (
        ("quant_algo", config.get("quant_algo"), legacy.get("quant_algo")),
        ("group_size", _group(config), legacy.get("group_size")),
        (
            "exclude_modules",
            _names(config, "ignore", "exclude_modules"),
            _names(legacy, "exclude_modules", "ignore"),
        ),
        ("kv_cache_quant_algo", _cache(config), legacy.get("kv_cache_quant_algo") or "none"),
    )
    for key, ours, theirs in pairs:
        stated = ours is not None and (theirs is not None or key == "quant_algo")
        if (stated or key == "quant_algo") and ours != theirs:
            yield Finding("configs-differ", LEGACY, key, _said(ours), _said(theirs))


def _group(config: Mapping[str, Any]) -> Any:
    groups = config.get("config_groups")
    weights = (
        [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    )
    sizes = {w["group_size"] for w in weights if isinstance(w, dict) and type(w.get("group_size")) is int}
    own = config.get("group_size")
    return own if type(own) is int else sizes.pop() if len(sizes) == 1 else None


def _names(place: Mapping[str, Any], *keys: str) -> Any:
    listed = next((place[key] for key in keys if isinstance(place.get(key), list)), None)
    return None if listed is None else frozenset(map(str, listed))


def _cache(config: Mapping[str, Any]) -> Any:
    """The cache's algorithm in ModelOpt's word, "none" where the config states that there is none."""
    if "kv_cache_scheme" not in config:
        return None
    scheme = config["kv_cache_scheme"]
    if not isinstance(scheme, dict):
        return "none"
    if scheme.get("type") != "float":
        return None
    bits = scheme.get("num_bits")
    return "FP8" if bits == 8 else "NVFP4" if bits == 4 else None


def _said(value: Any) -> str:
    return (
        f"{len(value):,} names, such as {min(value, default='')!r}"
        if isinstance(value, frozenset)
        else repr(value)
    )
