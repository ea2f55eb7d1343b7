"""Words of earlier releases that a recipe may still use, for one more release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardmill.pipeline.recipe.lines import Place

# Actions and stages, as the release before wrote them -> as they are written now.
RENAMED: Mapping[str, str] = {"quantise": "quantize", "dequantise": "dequantize"}

Notices = list[tuple[Place, str]]


def respell(table: Mapping[str, Any]) -> tuple[dict[str, Any], Notices]:
    """The TOML `table` in today's words, and a notice with its place for each old word that it used."""
    notices: Notices = []
    new = dict(table)
    if isinstance(families := table.get("family"), list):
        new["family"] = [_family(family, place, notices) for place, family in enumerate(families)]
    if isinstance(stages := table.get("stages"), dict):
        new["stages"] = {_word(name, ("stages", name), notices): _stage(row) for name, row in stages.items()}
    return new, notices


def _family(family: Any, number: int, notices: Notices) -> Any:
    if not isinstance(family, dict) or "action" not in family:
        return family
    return {**family, "action": _word(family["action"], ("family", number, "action"), notices)}


def _stage(row: Any) -> Any:
    """A stage's table with its needs in today's words. The stage that they name has had its notice."""
    if not isinstance(row, dict) or not isinstance(needs := row.get("needs"), list):
        return row
    return {**row, "needs": [_word(need, (), []) for need in needs]}


def _word(word: Any, place: Place, notices: Notices) -> Any:
    if not isinstance(word, str) or word not in RENAMED:
        return word
    notices.append(
        (place, f"{word!r} is now written {RENAMED[word]!r}; the old word works for one more release")
    )
    return RENAMED[word]
