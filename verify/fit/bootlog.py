"""A vLLM boot log beside the prediction, term by term. Lines as vLLM 0.33.0 writes them; older spellings too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardmill.verify.fit.answer import Answer
from shardmill.verify.fit.planner import KvPlan

GIB = 1 << 30

# what a line tells -> pattern; numbers in GiB unless the name says otherwise. The last hit of a log counts.
LINES: Mapping[str, re.Pattern[str]] = {
    "weights": re.compile(r"Model loading took ([\d.]+) GiB"),
    "available": re.compile(r"Available KV cache memory: (-?[\d.]+) GiB"),
    "pinned": re.compile(r"reserved ([\d.]+) GiB memory for KV Cache"),
    "free at boot": re.compile(r"Initial free memory ([\d.]+) GiB"),
    "pool tokens": re.compile(r"KV cache size: ([\d,]+) tokens"),
    "max length": re.compile(r"Maximum concurrency for ([\d,]+) tokens"),
    "concurrency": re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x"),
    "block tokens": re.compile(r"Setting attention block size to (\d+) tokens"),
    "CUDA graphs": re.compile(r"Graph capturing finished in [\d.]+ secs, took ([\d.]+) GiB"),
}


class LogError(ValueError):
    """The file is not a boot log. The message names it and what was looked for."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One term: a predicted range and the logged figure, in `unit`."""

    term: str
    low: float
    high: float
    logged: float
    unit: str

    @property
    def residual(self) -> float:
        """Logged less the nearest end of the range, as a share of it; 0 inside."""
        nearest = min(max(self.logged, self.low), self.high)
        return (self.logged - nearest) / nearest if nearest else self.logged


def read_log(path: Path) -> dict[str, float]:
    """The figures that a boot log holds. Raises LogError where it holds none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}") from None
    found = {name: pattern.findall(text) for name, pattern in LINES.items()}
    figures = {name: float(hits[-1].replace(",", "")) for name, hits in found.items() if hits}
    if not figures:
        raise LogError(
            f"{path}: no line of a vLLM boot log found, such as 'Available KV cache memory: ... GiB'"
        )
    return figures


def compare(answer: Answer, figures: Mapping[str, float]) -> list[Compared]:
    """Predicted against logged. The pool's tokens are predicted from the pool that the log itself prints."""
    plan, rows = answer.plan, []
    graphs = next((term for term in answer.terms if term.name == "CUDA graphs"), None)
    weights = answer.weights.total / GIB
    ranges: dict[str, tuple[float, float, str]] = {
        "weights": (weights, weights, "GiB"),
        "free at boot": (answer.card.free_at_boot / GIB, answer.card.free_at_boot / GIB, "GiB"),
        "block tokens": (_block_tokens(plan), _block_tokens(plan), "tokens"),
        "available": (answer.pool_low / GIB, answer.pool_high / GIB, "GiB"),
    }
    if graphs:
        ranges["CUDA graphs"] = (graphs.low / GIB, graphs.high / GIB, "GiB")
    ranges |= _pool(answer, figures)
    for term, (low, high, unit) in ranges.items():
        if term in figures:
            rows.append(Compared(term, low, high, figures[term], unit))
    return rows


def _pool(answer: Answer, figures: Mapping[str, float]) -> dict[str, tuple[float, float, str]]:
    """Tokens and concurrency for the pool as logged, which is rounded to 0.01 GiB; a pin is known to the byte."""
    plan, preset = answer.plan, answer.preset
    length = int(figures.get("max length", preset.max_model_len))
    logged = figures.get("available", figures.get("pinned"))
    if preset.pin is not None and "available" not in figures:
        pools = [preset.pin, preset.pin]
    elif logged is not None:
        pools = [int((logged + half) * GIB) for half in (-0.005, 0.005)]
    else:
        return {}
    tokens = [float(plan.pool_tokens(pool, length)) for pool in pools]
    times = [plan.concurrency(pool, length) for pool in pools]
    return {
        "pool tokens": (tokens[0], tokens[1], "tokens"),
        "concurrency": (times[0] - 0.005, times[1] + 0.005, "requests"),
    }


def _block_tokens(plan: KvPlan) -> int:
    return next(layer.block_tokens for group in plan.groups for layer in group if layer.kind == "paged")
