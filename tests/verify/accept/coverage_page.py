"""How often each gate passes a server at its limit, and better ones: the whole table, written into docs.

    python -m tests.verify.accept.coverage_page [--runs 2000] [--workers 1] [--write]

At the limit a gate may pass in at most 6 % of runs; exit code 1 where one passes more often. --write puts the tables
into docs/accept-coverage.md. Some ten minutes of CPU in all; each cell is seeded by itself, so that the tables do not
depend on the number of workers.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.verify.accept.coverage import (
    ALLOWED,
    CORRELATIONS,
    DOCUMENTS,
    better,
    claims,
    share,
    speed_share,
)

PAGE = Path(__file__).parents[3] / "docs/accept-coverage.md"
BETTER_DOCUMENTS, BETTER_CORRELATIONS, BETTER_RUNS = (10, 24, 48, 64, 96, 160, 320), (0.0, 0.05, 0.2), 400
ROUNDS = (2, 5, 10, 24, 80)
POWER = 0.9  # the share of runs in which a good server shall pass


@dataclass(frozen=True)
class Cell:
    """One number of a table. kind: "limit", "better" or "speed"; truth: of a better server."""

    kind: str
    name: str
    documents: int
    correlation: float
    truth: float = 0.0


def cells() -> Iterator[Cell]:
    """Every cell of the page."""
    for claim in claims():
        yield from (Cell("limit", claim.name, d, c) for d in DOCUMENTS for c in CORRELATIONS)
    for good in better():
        yield from (
            Cell("better", good.name, d, c, truth)
            for truth in good.truths
            for c in BETTER_CORRELATIONS
            for d in BETTER_DOCUMENTS
        )
    yield from (Cell("speed", "decode_c1", rounds, 0.0) for rounds in ROUNDS)


def measure(cell: Cell, runs: int, seed: int) -> float:
    """Share of simulated runs that pass."""
    if cell.kind == "speed":
        return speed_share(cell.documents, runs, seed)
    if cell.kind == "limit":
        claim = next(claim for claim in claims() if claim.name == cell.name)
        return share(claim, claim.at_limit, cell.documents, cell.correlation, runs, seed)
    good = next(good for good in better() if good.name == cell.name)
    draw = good.draw(cell.truth, cell.documents * good.positions)
    return share(good, draw, cell.documents, cell.correlation, min(runs, BETTER_RUNS), seed)


def measure_all(runs: int, seed: int, workers: int) -> dict[Cell, float]:
    """Every cell, with a line on stderr as each gate is done."""
    wanted, found = list(cells()), {}
    with ProcessPoolExecutor(workers) as pool:
        results = pool.map(measure, wanted, [runs] * len(wanted), [seed] * len(wanted))
        for number, (cell, passes) in enumerate(zip(wanted, results, strict=True), 1):
            found[cell] = passes
            print(f"\r{number}/{len(wanted)} {cell.name:<60.60}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def percent(passes: float) -> str:
    return f"{100 * passes:.1f}".rstrip("0").rstrip(".")


def limit_tables(found: dict[Cell, float]) -> Iterator[str]:
    """Passes of servers exactly at the limit."""
    for claim in claims():
        yield f"| {claim.name} | {' | '.join(f'{c:g}' for c in CORRELATIONS)} |"
        yield "|---|" + "---|" * len(CORRELATIONS)
        for documents in DOCUMENTS:
            row = (percent(found[Cell("limit", claim.name, documents, c)]) for c in CORRELATIONS)
            yield f"| {documents} documents | {' | '.join(row)} |"
        yield ""


def better_table(found: dict[Cell, float]) -> Iterator[str]:
    """Passes of servers better than the limit, and the documents with which nine runs of ten pass."""
    columns = " | ".join(str(d) for d in BETTER_DOCUMENTS)
    yield f"| gate | true value | correlation | {columns} | documents for {percent(POWER)} % |"
    yield "|---|---|---|" + "---|" * (len(BETTER_DOCUMENTS) + 1)
    for good in better():
        for truth in good.truths:
            for c in BETTER_CORRELATIONS:
                row = [found[Cell("better", good.name, d, c, truth)] for d in BETTER_DOCUMENTS]
                yield f"| {good.name} | {truth:g} | {c:g} | {' | '.join(map(percent, row))} | {enough(row)} |"


def enough(row: list[float]) -> str:
    """The fewest documents from which on at least POWER of the runs pass."""
    good = len(row)
    while good and row[good - 1] >= POWER:
        good -= 1
    return str(BETTER_DOCUMENTS[good]) if good < len(row) else f"more than {BETTER_DOCUMENTS[-1]}"


def page(found: dict[Cell, float], runs: int) -> str:
    """The page of docs."""
    speeds = ", ".join(f"{percent(found[Cell('speed', 'decode_c1', r, 0.0)])} ({r})" for r in ROUNDS)
    lines = [
        "# How often accept's gates pass",
        "",
        "Written by `make accept-coverage`. Percent of simulated runs that PASS. A server is drawn with a true rate or",
        "mean for each document, positions within them, and the gate's own code judges it. *Correlation*: of the",
        "positions within a document. [verify accept](verify-accept.md) tells how a gate judges.",
        "",
        "## A server exactly at the limit",
        f"{runs:,} runs a cell; at most {percent(ALLOWED)} % is allowed. The most here: {percent(worst(found))} %.",
        "",
        *limit_tables(found),
        f"A median of speed at its limit, by rounds: {speeds}.",
        "",
        "## A server better than the limit",
        f"{min(runs, BETTER_RUNS)} runs a cell, columns are numbers of documents. Agreement and KL: 94 scored",
        "positions a document, as the default protocol has on average; flips: 56 sure positions; draft: 60 drafts.",
        "",
        *better_table(found),
    ]
    return "\n".join(lines) + "\n"


def worst(found: dict[Cell, float]) -> float:
    """The most passes of a server at its limit."""
    return max(passes for cell, passes in found.items() if cell.kind != "better")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help="write docs/accept-coverage.md")
    asked = parser.parse_args()
    found = measure_all(asked.runs, asked.seed, asked.workers)
    text = page(found, asked.runs)
    print(text)
    if asked.write:
        PAGE.write_text(text, encoding="utf-8")
    times = os.times()
    spent = times.user + times.system + times.children_user + times.children_system
    print(f"{spent:.0f} s of CPU; the most at a limit: {percent(worst(found))} %", file=sys.stderr)
    return 0 if worst(found) <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
