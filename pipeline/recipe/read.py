"""Reading a recipe: TOML files become a Recipe.

All problems of a recipe are gathered before any is shown, each with its line. Only the TOML files are read here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from shardmill.pipeline.actions import keys_of_families
from shardmill.pipeline.container.regular import read_regular, resolved
from shardmill.pipeline.errors import RecipeError
from shardmill.pipeline.recipe.lines import Origin, located
from shardmill.pipeline.recipe.spellings import respell
from shardmill.pipeline.recipe.tables import (
    Alias,
    Family,
    FurtherParent,
    Fused,
    Output,
    Parallel,
    Parent,
    Recipe,
)

_RECIPE_BYTES_MAX = 1 << 24
_LAYERS_MAX = 32
_PROBLEMS_SHOWN = 50
_NUMBER_BITS_SHOWN = 128
_CHARS_SHOWN = 200


def load(path: Path) -> Recipe:
    """The recipe at `path`, laid over the one that it extends; a family of the same name replaces the other's.

    Raises RecipeError with every problem found, each with its file and line.
    """
    table: dict[str, Any] = {}
    families: dict[Any, tuple[Any, Origin]] = {}
    origins: dict[str, Origin] = {}
    notices: list[str] = []
    layers = _layers(path, ())
    for written, origin in reversed(layers):
        layer, old_words = respell(written)
        notices += [located(origin, place, words) for place, words in old_words]
        table |= layer
        origins |= dict.fromkeys(layer, origin)
        if isinstance(listed := layer.get("family"), list):
            families |= _by_name(listed, origin)
            table["family"] = [family for family, _ in families.values()]
    try:
        recipe = Recipe.model_validate(table)
        recipe._home, recipe._origins, recipe._notices = path.parent, origins, tuple(notices)
        recipe._texts = tuple(origin.text for _, origin in layers)
        return recipe
    except ValidationError as error:
        of_families = [origin for _, origin in families.values()]
        whole = Origin(path, "")
        faults = [
            fault
            for fault in error.errors()
            if not (fault["type"] == "too_short" and fault["input"])  # its entries have problems of their own
        ]
        shown = [_problem(fault, origins, of_families, whole) for fault in faults[:_PROBLEMS_SHOWN]]
        more = len(faults) - len(shown)
        raise RecipeError([*shown, f"{path}: {more} more problems"] if more else shown) from None


def _layers(path: Path, readers: tuple[Path, ...]) -> list[tuple[dict[str, Any], Origin]]:
    """The TOML at `path`, then what it extends. `readers` are the files that lead here."""
    if "\0" in str(path):
        raise RecipeError([f"{readers[-1]}: `extends` names a path with a NUL character; correct it"])
    try:
        here = resolved(path)
    except OSError as error:
        raise RecipeError([f"{path}: cannot be read: {error.strerror}; correct its links"]) from None
    if here in readers:
        raise RecipeError([f"{path}: extends itself; remove `extends` from one of the files"])
    if len(readers) > _LAYERS_MAX:
        raise RecipeError([f"{path}: is reached by more than {_LAYERS_MAX} `extends`; shorten the chain"])
    try:
        text = _text(path)
        table = tomllib.loads(text.removeprefix("\ufeff"))
    except OSError as error:
        advice = "name the recipe with -c: your file, one of `shardmill recipes`, or a draft of `shardmill init DIR`"
        why = (
            "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        )
        raise RecipeError([f"{path}: {why}; {advice}"]) from None
    except (ValueError, RecursionError) as error:  # tomllib's own, of numbers without end, of UTF-8, of depth
        raise RecipeError([f"{path}: not valid TOML: {error}"]) from None
    base = table.pop("extends", None)
    below = _layers(path.parent / str(base), (*readers, here)) if base is not None else []
    return [(table, Origin(path, text)), *below]


def _text(path: Path) -> str:
    """The recipe's text, to the byte: its sha256 is published."""
    data = read_regular(path, _RECIPE_BYTES_MAX + 1)
    if len(data) > _RECIPE_BYTES_MAX:
        raise ValueError(f"it has more than {_RECIPE_BYTES_MAX} bytes")
    return data.decode("utf-8")


def _by_name(families: list[Any], origin: Origin) -> dict[Any, tuple[Any, Origin]]:
    """Name -> family and its origin. Of two with one name in one file both stay, so that both are refused."""
    found: dict[Any, tuple[Any, Origin]] = {}
    for number, family in enumerate(families):
        name = family.get("name") if isinstance(family, dict) else None
        key = name if isinstance(name, str) and name not in found else (origin.path, number)
        found[key] = (family, replace(origin, number=number))
    return found


_TABLES: Mapping[str | int, type[BaseModel]] = {
    "parent": Parent,
    "output": Output,
    "source": FurtherParent,
    "family": Family,
    "fused": Fused,
    "parallel": Parallel,
    "alias": Alias,
}


def _problem(fault: Any, origins: Mapping[str, Origin], of_families: Sequence[Origin], whole: Origin) -> str:
    place, message = fault["loc"], str(fault["msg"]).removeprefix("Value error, ")
    origin = origins.get(place[0], whole) if place else whole
    written = place
    if place[:1] == ("family",) and len(place) > 1:
        origin = of_families[place[1]]
        written = ("family", origin.number, *place[2:])
    if fault["type"] == "extra_forbidden":
        message = (
            f"the key {place[-1]!r} is not known{_nearest_key(place)}; remove it or correct its spelling"
        )
    elif fault["type"] == "missing":
        message = _missing(place[-1], fault["input"])
    elif fault["type"] == "too_long":
        message = "has too many entries"
    elif isinstance(fault["input"], str | int | float) and fault["type"] != "value_error":
        message = f"{message}, not {_shown(fault['input'])}"
    message = message.replace("Input should be", "should be").replace("valid tuple", "list")
    return located(origin, written, message)


def _missing(key: str | int, table: Any) -> str:
    """What `table` lacks, and the key in it that is most like a misspelling of that."""
    if isinstance(key, int):
        return "has too few entries"
    written = [str(each) for each in table] if isinstance(table, dict) else []
    close = get_close_matches(key, written, n=1, cutoff=0.7)
    hint = f"; {close[0]!r} is most like it: correct its spelling" if close else ""
    return f"the key {key!r} is missing{hint}"


def _shown(value: str | int | float) -> str:
    """A value as a sentence can hold it: Python writes no number of ten thousand digits, and nobody reads one."""
    if isinstance(value, int) and value.bit_length() > _NUMBER_BITS_SHOWN:
        return f"a number of {value.bit_length()} bits"
    return repr(value) if not isinstance(value, str) else repr(value[:_CHARS_SHOWN])


def _nearest_key(place: tuple[str | int, ...]) -> str:
    """A hint at the key of the same table that an unknown one is most like, where there is one."""
    table = _TABLES.get(place[0], Recipe) if len(place) > 1 else Recipe
    keys = [*table.model_fields, *(keys_of_families() if table is Family else ())]
    close = get_close_matches(str(place[-1]), keys, n=1)
    return f" (do you mean {close[0]!r}?)" if close else ""
