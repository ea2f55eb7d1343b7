"""What was asked and not answered: it counts against a claim, whatever the answers that came say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardmill.verify.accept.items import Item
from shardmill.verify.accept.metrics import PAIRED, rests_on
from shardmill.verify.accept.protocol import Protocol
from shardmill.verify.accept.runs import Run, RunError, request_digest
from shardmill.verify.accept.score import entries_of, read_positions


@dataclass(frozen=True, slots=True)
class Answered:
    """How much of what a metric rests on was answered: scored positions, or requests."""

    answered: int
    asked: int
    unit: str

    @property
    def share(self) -> float:
        return self.answered / self.asked if self.asked else 1.0

    def why(self, least: float) -> str:
        """Why a claim is not made; empty where enough was answered."""
        if self.share >= least:
            return ""
        return (
            f"{self.answered:,} of {self.asked:,} {self.unit} were answered, at least {least:.0%} are needed"
        )


def answered(metric: str, base: Run, test: Run, protocol: Protocol, items: Sequence[Item]) -> Answered:
    """How much of what `metric` rests on was answered, of the metrics of two runs by both."""
    runs = (base, test) if metric in PAIRED else (test,)
    kinds = rests_on(metric) or ()
    asked = [item for item in items if item.kind in kinds]
    good = [item for item in asked if all(_ok(run, item) for run in runs)]
    if kinds == ("score",):
        right, all_ = (sum(_positions(item, protocol) for item in some) for some in (good, asked))
        return Answered(right, all_, "positions")
    return Answered(len(good), len(asked), "requests")


def _ok(run: Run, item: Item) -> bool:
    row = run.rows.get(item.id)
    return row is not None and row.ok


def _positions(item: Item, protocol: Protocol) -> int:
    return len(item.body["prompt"]) - max(protocol.scoring.skip_tokens, 1)


def failures(run: Run, items: Sequence[Item]) -> Counter[str]:
    """How many requests failed, by kind of request and of failure, those never recorded too; never a score."""
    counts = Counter(f"{row.kind}: {row.failure}" for row in run.rows.values() if not row.ok)
    counts.update(f"{item.kind}: not recorded" for item in items if item.id not in run.rows)
    return counts


def check_rows(run: Run, items: Sequence[Item], protocol: Protocol) -> None:
    """Every row answers a request of this protocol, and every score can be read. Raises RunError with file and line.

    items: what this run's server was asked, by its own limit.
    """
    asked = {item.id: item for item in items}
    for id_, row in run.rows.items():
        item = asked.get(id_)
        if item is None or item.kind != row.kind:
            raise RunError(f"{run.place(id_)}: {id_}: the protocol {protocol.name} does not ask this")
        if row.request != request_digest(item):
            raise RunError(
                f"{run.place(id_)}: {id_}: the answer to another request than the protocol's; record again"
            )
        if row.ok and item.kind == "score":
            try:
                read_positions(item.body["prompt"], entries_of(row.answer) or [], 0, protocol.scoring.top_k)
            except ValueError as error:
                raise RunError(f"{run.place(id_)}: {id_}: no scores: {error}; record again") from None
