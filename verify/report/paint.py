"""Colours that a page's style decides: figures are drawn in stand-ins, and each becomes a CSS variable of the page.

So one figure is right in light, in dark and on paper. The variables are defined in templates/style.css.
"""

from __future__ import annotations

import re

INK, MUTED, LINE, PAPER = "#000101", "#000102", "#000103", "#000104"
BEFORE, STORED, SERVED, EXACT, NONE = "#000201", "#000202", "#000203", "#000204", "#000205"

_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    LINE: "var(--line)",
    PAPER: "var(--paper)",
    BEFORE: "var(--before)",
    STORED: "var(--stored)",
    SERVED: "var(--served)",
    EXACT: "var(--exact)",
    NONE: "var(--none)",
}
HEAT_STEPS = 64
HEAT = tuple(f"#0003{step:02x}" for step in range(HEAT_STEPS))  # from the lowest to the highest
_STAND_IN = re.compile(r"#000[123][0-9a-f]{2}")


def variables_for_colours(svg: str) -> str:
    """The figure with its stand-ins replaced."""
    return _STAND_IN.sub(lambda found: _variable(found[0]), svg)


def _variable(colour: str) -> str:
    if colour in _VARIABLES:
        return _VARIABLES[colour]
    percent = round(100 * int(colour[5:], 16) / (HEAT_STEPS - 1))
    return f"color-mix(in oklab, var(--heat-high) {percent}%, var(--heat-low))"
