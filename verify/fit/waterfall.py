"""A picture of one rank's memory: what each use takes of the card, low to high. Needs the extra `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardmill.verify.fit.answer import Answer

GIB = 1 << 30
COLOURS = {"derived": "#3b6ea5", "measured by others": "#d98e04", "guess": "#b0483b"}


def steps(answer: Answer) -> list[tuple[str, int, int, str]]:
    """(name, low, high, standing) of every use of a rank's memory, the largest kinds first."""
    weights = [(name, size, size, "derived") for name, size in answer.weights.families.items()]
    terms = [(term.name, term.low, term.high, term.standing) for term in answer.terms]
    context = ("CUDA context", answer.card.context_bytes, answer.card.context_bytes, "measured by others")
    return [context, *weights, ("KV pool", answer.pool_low, answer.pool_high, "derived"), *terms]


def draw(answer: Answer, path: Path) -> None:
    """Write the picture; SVG or PNG by the file's suffix. The same answer gives the same SVG bytes."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "shardmill"
    from matplotlib import pyplot

    rows = steps(answer)
    figure, axes = pyplot.subplots(figsize=(9, 0.34 * len(rows) + 1.2))
    _bars(axes, rows)
    total = answer.card.total_bytes / GIB
    axes.axvline(total, color="black", linewidth=1)
    axes.set_xlim(_begin(rows, total), total * 1.01)
    axes.set_xlabel(f"GiB of {total:.2f} on one rank ({answer.card.name}); pale: up to the high end")
    axes.set_title(f"{answer.preset.name}, rung {answer.preset.rung}: {answer.verdict}")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _begin(rows: list[tuple[str, int, int, str]], total: float) -> float:
    """Where the axis begins: a kind that fills most of the card is cut, so that the others can be seen."""
    end = 0.0
    for _, low, _, _ in rows:
        end += low / GIB
        if low / GIB > 0.6 * total:
            return float(int(end - 0.02 * total))
    return 0.0


def _bars(axes: Any, rows: list[tuple[str, int, int, str]]) -> None:
    """Each bar starts where the low ends before it stop; its pale part reaches to its own high end."""
    left = 0.0
    for i, (_, low, high, standing) in enumerate(rows):
        axes.barh(i, low / GIB, left=left, color=COLOURS[standing])
        axes.barh(i, (high - low) / GIB, left=left + low / GIB, color=COLOURS[standing], alpha=0.35)
        left += low / GIB
    labels = [f"{name}  {_size(low, high)}" for name, low, high, _ in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    handles = [axes.barh(0, 0, color=colour, label=name) for name, colour in COLOURS.items()]
    axes.legend(handles=handles, loc="lower left", fontsize="small")


def _size(low: int, high: int) -> str:
    return f"{low / GIB:.2f}" if high == low else f"{low / GIB:.2f}-{high / GIB:.2f}"
