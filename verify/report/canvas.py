"""Where the report's figures are drawn: matplotlib draws, paint.py leaves the colours to the page.

Each figure that holds words is drawn twice, `wide` and `narrow` (a phone's), since letters must not shrink with it.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardmill.verify.report import paint
from shardmill.verify.rules.findings import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = ("wide", "narrow")
INCHES = {"wide": 9.4, "narrow": 3.7, "key": 2.6}  # at which letters have the size of the page's small ones
LETTERS_MAX = 28  # of a family's name in a figure
_POINTS = 8.5  # of letters
_STYLE: Any = {  # matplotlib's own type for it is a list of all its keys
    "svg.fonttype": "none",  # letters stay text: the page's font, found by a search, read aloud
    "font.family": "sans-serif",
    "text.parse_math": False,  # a `$` in a name is a `$`
    "font.size": _POINTS,
    "text.color": paint.INK,
    "axes.edgecolor": paint.LINE,
    "axes.facecolor": "none",
    "axes.labelcolor": paint.MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "xtick.color": paint.LINE,
    "ytick.color": paint.LINE,
    "xtick.labelcolor": paint.MUTED,
    "ytick.labelcolor": paint.INK,
    "grid.color": paint.LINE,
    "grid.linewidth": 0.6,
}


def label(name: str) -> str:
    """The name as letters that any font and XML can bear, cut where it would squeeze the figure."""
    shown = printable(name)
    return shown if len(shown) <= LETTERS_MAX else shown[: LETTERS_MAX - 1] + "…"


class Drawing:
    """A figure of `size`, `height` inches high, in the report's style; its axes, or a pair of them."""

    def __init__(self, size: str, height: float, columns: int = 1) -> None:
        self._inches, self._columns = (INCHES[size], height), columns

    def __enter__(self) -> tuple[Figure, Any]:
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        self._context = rc_context(_STYLE)
        self._context.__enter__()
        figure = Figure(figsize=self._inches, layout="constrained")
        return figure, figure.subplots(1, self._columns)

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def svg_of(figure: Figure, name: str, titles: Mapping[str, str] | None = None) -> str:
    """The figure as an <svg> element whose ids begin with `name`; `titles` names groups by id, shown on hovering."""
    from matplotlib import rc_context

    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the page's font draws the letters, not matplotlib's
        figure.savefig(text, format="svg", metadata=nothing)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    for gid, title in (titles or {}).items():
        svg = svg.replace(f'<g id="{gid}">', f'<g id="{gid}"><title>{html.escape(title)}</title>')
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true" focusable="false">', svg)
    return paint.variables_for_colours(svg)
