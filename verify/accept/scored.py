"""All positions that two runs answered, and the figures that follow from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import numpy as np

from shardmill.verify.accept.measure import Mean, Proportion
from shardmill.verify.accept.score import Pair
from shardmill.verify.accept.stats import Interval, document_bootstrap, wilson


@dataclass(frozen=True, slots=True)
class Scored:
    """All positions that both runs answered, and what follows from them. confident: a sure baseline's least share."""

    pairs: tuple[Pair, ...]
    confident: float

    def by_document(self) -> dict[str, list[Pair]]:
        grouped: dict[str, list[Pair]] = defaultdict(list)
        for p in self.pairs:
            grouped[p.document].append(p)
        return grouped

    def _share(self, right: Callable[[Pair], bool], counted: Callable[[Pair], bool]) -> Proportion:
        groups = [[p for p in group if counted(p)] for group in self.by_document().values()]
        groups = [group for group in groups if group]
        return Proportion(tuple(sum(map(right, group)) for group in groups), tuple(map(len, groups)))

    def _mean(self, of: Callable[[Pair], float], positive: bool) -> Mean:
        groups = self.by_document().values()
        return Mean(tuple(sum(map(of, g)) for g in groups), tuple(map(len, groups)), positive)

    @property
    def agreement(self) -> Proportion:
        return self._share(lambda p: p.agrees, lambda p: True)

    @property
    def flips(self) -> Proportion:
        """Confident positions whose first choice changed; documents without such a position do not count."""
        return self._share(lambda p: not p.agrees, lambda p: p.base_confidence >= self.confident)

    @property
    def identical(self) -> Proportion:
        return self._share(lambda p: p.identical, lambda p: True)

    @property
    def outside(self) -> Proportion:
        """Positions where a first choice is not among the other's top K: the divergence is loosest there."""
        return self._share(lambda p: p.outside, lambda p: True)

    def agreement_intervals(self) -> tuple[Interval, Interval]:
        agreement = self.agreement
        by_document = document_bootstrap(agreement.by_document, agreement.sizes)
        return wilson(agreement.hits, agreement.n), by_document

    def mean_kl(self) -> Mean:
        return self._mean(lambda p: p.kl, positive=True)

    def mean_delta(self) -> Mean:
        """Of the text's own tokens: test minus baseline, in nats; minus the log of the perplexities' ratio."""
        return self._mean(lambda p: p.actual_delta, positive=False)

    @property
    def rms_delta(self) -> float:
        return sqrt(sum(p.actual_delta**2 for p in self.pairs) / len(self.pairs))

    @property
    def max_delta(self) -> float:
        return max(abs(p.actual_delta) for p in self.pairs)

    @property
    def unseen(self) -> float:
        """The baseline's mean probability on tokens that not both runs show."""
        return sum(p.unseen for p in self.pairs) / len(self.pairs)

    def kl_figures(self) -> dict[str, float]:
        kl = np.array([p.kl for p in self.pairs])
        return {
            "mean": float(kl.mean()),
            "median": float(np.median(kl)),
            "p99": float(np.quantile(kl, 0.99)),
            "max": float(kl.max()),
        }
