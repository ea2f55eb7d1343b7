"""The report's bars and histograms as SVG text to stand inside the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardmill.verify.report import paint
from shardmill.verify.report.canvas import Drawing, label, svg_of
from shardmill.verify.report.facts import Facts, Family, Histogram
from shardmill.verify.report.histogram import EXPONENT_BIAS, STEP_PERCENT, shares
from shardmill.verify.report.units import human

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def whole(facts: Facts, size: str) -> str:
    """Two stacked bars: the parent's bytes and the checkpoint's, those of converted weights apart from the rest."""
    converted = [family for family in facts.families if family.numerics]
    before = sum(family.bytes_before or 0 for family in converted)
    after = sum(_after(family) for family in converted)
    rows = (("parent", facts.parent_tensor_bytes or 0, before), ("child", facts.tensor_bytes, after))
    largest = max(total for _, total, _ in rows)
    with Drawing(size, 1.0) as (figure, axes):
        for place, (_, total, part) in enumerate(rows):
            colour = paint.STORED if place else paint.BEFORE
            axes.barh(place, part, color=colour, height=0.62)
            axes.barh(place, total - part, left=part, color=paint.NONE, height=0.62)
            axes.text(total + largest * 0.012, place, human(total), va="center", color=paint.INK)
        axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        axes.invert_yaxis()
        _bare(axes, largest * (1.1 if size == "wide" else 1.3))
        return svg_of(figure, f"whole-{size}")


def sizes(families: Sequence[Family], size: str) -> str:
    """A pair of bars for each converted family: bytes before, and after with the scales."""
    narrow = size == "narrow"
    height, at_before, at_after = (0.25, 0.0, 0.25) if narrow else (0.34, -0.19, 0.19)
    largest = max(max(family.bytes_before or 0, _after(family)) for family in families)
    with Drawing(size, (0.62 if narrow else 0.4) * len(families) + 0.1) as (figure, axes):
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
        return svg_of(figure, f"sizes-{size}")


def _after(family: Family) -> int:
    return family.bytes_after + family.scale_bytes


def _bare(axes: Axes, end: float) -> None:
    """Bars that bear their numbers need no axis."""
    axes.set_xlim(0, end)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0)


def histogram(shown: Histogram, rerounded: bool, name: str) -> str:
    """Two small plots of one weight: elements by relative error (stored, served) and codes by power of two."""
    with Drawing("narrow", 1.35, 2) as (figure, both):
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
        codes.set_xticks([0, 1 + EXPONENT_BIAS, len(exponents) - 1], ["0", "1", "256–448"])
        codes.set_xlabel("size of a code")
        for axes in both:
            axes.set_yticks([])
            axes.spines["left"].set_visible(False)
            axes.tick_params(length=2)
        return svg_of(figure, name)
