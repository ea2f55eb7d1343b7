"""The front matter of a model card, as far as a child keeps it: lines of YAML, passed on as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping

# What holds for a child as well. What describes the parent alone (model-index, widget, base_model) is not kept.
KEPT = (
    "license",
    "license_name",
    "license_link",
    "language",
    "pipeline_tag",
    "library_name",
    "tags",
    "extra_gated_prompt",
    "extra_gated_fields",
)
_KEY = re.compile(r"([A-Za-z_][\w-]*):(\s.*)?")
_LINES_MAX = 200


def front_matter(text: str) -> Mapping[str, str]:
    """Key -> its lines of YAML, of the keys in KEPT; empty where the text has no front matter.

    A line that starts in the first column and is no list item begins a new key; the lines below belong to it.
    """
    lines = text.removeprefix("\ufeff").splitlines()
    if not lines or lines[0].rstrip() != "---":
        return {}
    end = next((at for at, line in enumerate(lines[1:], 1) if line.rstrip() == "---"), None)
    if end is None or end > _LINES_MAX:
        return {}
    found: dict[str, list[str]] = {}
    key = None
    for line in lines[1:end]:
        if match := _KEY.fullmatch(line):
            key = match[1]
        if key in KEPT and line.strip() and _is_plain(line):
            found.setdefault(str(key), []).append(line.rstrip())
    return {key: "\n".join(found[key]) for key in KEPT if key in found}


def items(lines: str) -> list[str]:
    """The items of a list in YAML, written as `key: [a, b]`, as `key: a`, or one a line."""
    first, *rest = lines.splitlines()
    inline = first.partition(":")[2].strip()
    if inline:
        return [item.strip() for item in inline.strip("[]").split(",") if item.strip()]
    return [line.strip().removeprefix("- ").strip() for line in rest if line.strip().startswith("- ")]


def _is_plain(line: str) -> bool:
    return all(char.isprintable() or char == "\t" for char in line)
