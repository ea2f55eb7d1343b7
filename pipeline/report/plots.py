"""The report's figures as SVG text to stand inside the page. matplotlib draws; paint.py leaves the colours to the page.

Each figure that holds words is drawn twice, `wide` and `narrow` (a phone's), since letters must not shrink with it.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.report import paint
from pipeline.report.facts import Facts, Family, Histogram
from pipeline.report.histogram import STEP_PERCENT, shares
from pipeline.report.units import human, percent
from verify.findings import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES = {"wide": 9.4, "narrow": 3.7, "key": 2.6}  # at which letters have the size of the page's small ones
SIZES = ("wide", "narrow")
_POINTS = 8.5  # of letters
LETTERS_MAX = 28  # of a family's name in a figure
_BIN_OF_ONE = 1 + 7  # E4M3's exponent bias
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


def whole(facts: Facts, size: str) -> str:
    """Two stacked bars: the parent's bytes and the checkpoint's, those of converted weights apart from the rest."""
    converted = [family for family in facts.families if family.recipes]
    before = sum(family.bytes_before or 0 for family in converted)
    after = sum(_after(family) for family in converted)
    rows = (("parent", facts.parent_tensor_bytes or 0, before), ("child", facts.tensor_bytes, after))
    largest = max(total for _, total, _ in rows)
    with _Drawing(size, 1.0) as (figure, axes):
        for place, (_, total, part) in enumerate(rows):
            colour = paint.STORED if place else paint.BEFORE
            axes.barh(place, part, color=colour, height=0.62)
            axes.barh(place, total - part, left=part, color=paint.NONE, height=0.62)
            axes.text(total + largest * 0.012, place, human(total), va="center", color=paint.INK)
        axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        axes.invert_yaxis()
        _bare(axes, largest * (1.1 if size == "wide" else 1.3))
        return _svg(figure, f"whole-{size}")


def sizes(families: Sequence[Family], size: str) -> str:
    """A pair of bars for each converted family: bytes before, and after with the scales."""
    narrow = size == "narrow"
    height, at_before, at_after = (0.25, 0.0, 0.25) if narrow else (0.34, -0.19, 0.19)
    largest = max(max(family.bytes_before or 0, _after(family)) for family in families)
    with _Drawing(size, (0.62 if narrow else 0.4) * len(families) + 0.1) as (figure, axes):
        for place, family in enumerate(families):
            said, end = human(_after(family)), _after(family)
            axes.barh(place + at_after, _after(family), height=height, color=paint.STORED)
            if family.bytes_before is not None:
                axes.barh(place + at_before, family.bytes_before, height=height, color=paint.BEFORE)
                said, end = f"{human(family.bytes_before)} → {said}", max(end, family.bytes_before)
            axes.text(
                end + largest * 0.012,
                place + at_before / 2 + at_after / 2,
                said,
                va="center",
                color=paint.MUTED,
            )
            if narrow:  # no room left of the bars
                axes.text(0, place - 0.2, label(family.name), va="bottom", color=paint.INK)
        axes.set_yticks(range(len(families)), ["" if narrow else label(family.name) for family in families])
        axes.set_ylim(len(families) - 0.5, -0.55)
        _bare(axes, largest * (1.75 if narrow else 1.25))
        return _svg(figure, f"sizes-{size}")


def label(name: str) -> str:
    """The name as letters that any font and XML can bear, cut where it would squeeze the figure."""
    shown = printable(name)
    return shown if len(shown) <= LETTERS_MAX else shown[: LETTERS_MAX - 1] + "…"


def _after(family: Family) -> int:
    return family.bytes_after + family.scale_bytes


def _bare(axes: Axes, end: float) -> None:
    """Bars that bear their numbers need no axis."""
    axes.set_xlim(0, end)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0)


Place = tuple[str, int | None]  # family, layer


@dataclass(frozen=True, slots=True)
class Cell:
    """One square of a heat map."""

    error: float | None
    exact: bool  # the parent's bits

    @property
    def words(self) -> str:
        return percent(self.error) + (", the parent's bits" if self.exact else "")


def cells(families: Sequence[Family], kind: str) -> dict[Place, Cell]:
    """What each family lost in each layer, `stored` or `served`."""
    return {
        (family.name, at.layer): Cell(
            getattr(at.error, kind), at.error.rounded == 0 and getattr(at.error, kind) == at.error.stored
        )
        for family in families
        for at in family.layers
    }


def heat(families: Sequence[Family], kind: str, top: float, size: str) -> str:
    """Families by layers, coloured by relative error from 0 to `top`; exact cells have a colour of their own.

    Wide: layers run to the right. Narrow: they run down.
    """
    shown = cells(families, kind)
    layers: list[int | None] = [*range(1 + max((layer or 0 for _, layer in shown), default=0))]
    layers += [None] * any(layer is None for _, layer in shown)
    across = size == "wide"
    inches = 0.235 * len(families) + 0.5 if across else 0.125 * len(layers) + 1.35
    titles = {}
    with _Drawing(size, inches) as (figure, axes):
        for row, family in enumerate(families):
            for column, layer in enumerate(layers):
                cell = shown.get((family.name, layer))
                if cell is not None:
                    gid = f"{kind}-{row}-{column}"
                    # What lies outside of any layer stands a little apart.
                    along = column + (layer is None)
                    at = (along, row) if across else (row, along)
                    axes.add_patch(_square(at, _heat_colour(cell, top), gid))
                    titles[gid] = f"{printable(family.name)}, {_layer_name(layer)}: {cell.words}"
        _heat_axes(axes, families, layers, across)
        return _svg(figure, f"heat-{kind}-{size}", titles)


def _layer_name(layer: int | None) -> str:
    return "outside the layers" if layer is None else f"layer {layer}"


def _square(at: tuple[int, int], colour: str, gid: str) -> Any:
    from matplotlib.patches import Rectangle

    square = Rectangle(at, 1, 1, facecolor=colour, edgecolor=paint.PAPER, linewidth=0.9)
    square.set_gid(gid)
    return square


def _heat_colour(cell: Cell, top: float) -> str:
    if cell.error is None:
        return paint.SERVED
    if cell.exact:
        return paint.EXACT
    return paint.HEAT[min(int(cell.error / top * paint.HEAT_STEPS), paint.HEAT_STEPS - 1)]


def _heat_axes(axes: Axes, families: Sequence[Family], layers: Sequence[int | None], across: bool) -> None:
    numbers = [layer for layer in layers if layer is not None]
    ticks = [layer + 0.5 for layer in numbers if layer % 5 == 0]
    labels = [str(layer) for layer in numbers if layer % 5 == 0]
    length = len(numbers)
    if None in layers:
        ticks, labels, length = [*ticks, length + 1.5], [*labels, "other"], length + 2
    places = [place + 0.5 for place in range(len(families))]
    names = [label(family.name) for family in families]
    if across:
        axes.set_xlim(0, length)
        axes.set_ylim(len(families), 0)
        axes.set_xticks(ticks, labels)
        axes.set_yticks(places, names)
        axes.set_xlabel("layer (of the vision tower: block)", loc="left")
    else:
        axes.set_xlim(0, len(families))
        axes.set_ylim(length, 0)
        axes.set_yticks(ticks, labels, color=paint.MUTED)
        axes.set_xticks(places, names, rotation=40, ha="left", color=paint.INK)
        axes.xaxis.tick_top()
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)


def scale(top: float) -> str:
    """The key of the heat maps' colours."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    with _Drawing("key", 0.3) as (figure, axes):
        mapped = ScalarMappable(Normalize(0, 100 * top), ListedColormap(paint.HEAT))
        ends = [0, 100 * top]
        bar = figure.colorbar(mapped, cax=axes, orientation="horizontal", ticks=ends, format="%.1f %%")
        assert bar.solids is not None
        bar.solids.set(edgecolor="face", rasterized=False)
        bar.outline.set(visible=False)
        first, last = axes.get_xticklabels()
        first.set_ha("left")
        last.set_ha("right")
        axes.tick_params(length=0)
        return _svg(figure, "scale")


def histogram(shown: Histogram, rerounded: bool, name: str) -> str:
    """Two small plots of one weight: elements by relative error (stored, served) and codes by power of two."""
    with _Drawing("narrow", 1.35, 2) as (figure, both):
        errors, codes = both
        stored = shares(shown.stored)
        edges = [STEP_PERCENT * step for step in range(len(stored))]
        errors.bar(edges[:-1], stored[1:], width=STEP_PERCENT, align="edge", color=paint.STORED)
        if rerounded:
            errors.stairs(shares(shown.served)[1:], edges, color=paint.SERVED, linewidth=1.3)
        errors.set_xlabel("error of an element, %")
        errors.set_xticks([0, 4, 8, 12])
        exponents = shares(shown.codes)
        codes.bar(range(len(exponents)), exponents, width=0.82, color=paint.MUTED)
        codes.set_xticks([0, _BIN_OF_ONE, len(exponents) - 1], ["0", "1", "256–448"])
        codes.set_xlabel("size of a code")
        for axes in both:
            axes.set_yticks([])
            axes.spines["left"].set_visible(False)
            axes.tick_params(length=2)
        return _svg(figure, name)


class _Drawing:
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


def _svg(figure: Figure, name: str, titles: Mapping[str, str] | None = None) -> str:
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
