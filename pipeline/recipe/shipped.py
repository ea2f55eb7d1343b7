"""The recipes that come with shardmill, by name: `-c glm-5.3-flash-fp8` works from any folder."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).absolute().parents[2]  # in a checkout its links lead to the files at the top


@cache
def shipped() -> Mapping[str, Path]:
    """Name -> TOML file, in order of name."""
    found = {
        _name(path): path for path in (_PACKAGE / "pipeline.toml", *(_PACKAGE / "recipes").glob("*.toml"))
    }
    return dict(sorted(found.items()))


def is_shipped(path: Path) -> bool:
    return path in shipped().values()


def purpose(path: Path) -> str:
    """The first comment of a recipe, which says what it is for."""
    first = path.read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip()


def nearest_shipped(name: str) -> list[str]:
    return get_close_matches(name, shipped(), n=3, cutoff=0.5)


def _name(path: Path) -> str:
    return str(tomllib.loads(path.read_text(encoding="utf-8"))["name"])
