"""The heat maps: what each family lost in each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardmill.verify.report import paint
from shardmill.verify.report.canvas import Drawing, label, svg_of
from shardmill.verify.report.facts import Family
from shardmill.verify.report.units import percent
from shardmill.verify.rules.findings import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    with Drawing(size, inches) as (figure, axes):
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
        return svg_of(figure, f"heat-{kind}-{size}", titles)


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
        tower = any("vision" in family.name for family in families)
        axes.set_xlabel("layer (of the vision tower: block)" if tower else "layer", loc="left")
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

    with Drawing("key", 0.3) as (figure, axes):
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
        return svg_of(figure, "scale")
