"""Two runs judged: the test against the baseline at the same positions, beside the baseline against itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardmill.verify.accept.diverge import Divergence, diverge
from shardmill.verify.accept.gates import Gate, GateResult, judge_proportion, judge_value
from shardmill.verify.accept.items import Item
from shardmill.verify.accept.measure import Measure, Proportion, Value, probe_measures, run_measures, text_of
from shardmill.verify.accept.protocol import Protocol
from shardmill.verify.accept.runs import Row, Run, RunError
from shardmill.verify.accept.score import Pair, Position, pair, read_positions
from shardmill.verify.accept.stats import Interval, design_effect, document_bootstrap, mcnemar, wilson


@dataclass(frozen=True, slots=True)
class Scored:
    """All positions that both runs answered, and what follows from them."""

    pairs: tuple[Pair, ...]
    confident: float

    def by_document(self) -> dict[str, list[Pair]]:
        grouped: dict[str, list[Pair]] = defaultdict(list)
        for p in self.pairs:
            grouped[p.document].append(p)
        return grouped

    @property
    def agreement(self) -> Proportion:
        groups = list(self.by_document().values())
        hits = [sum(p.agrees for p in group) for group in groups]
        return Proportion(sum(hits), len(self.pairs), design_effect(hits, [len(group) for group in groups]))

    @property
    def flips(self) -> Proportion:
        """Confident positions whose first choice changed."""
        sure = [p for p in self.pairs if p.base_confidence >= self.confident]
        return Proportion(sum(not p.agrees for p in sure), len(sure))

    def agreement_intervals(self) -> tuple[Interval, Interval | None]:
        groups = list(self.by_document().values())
        hits, sizes = [sum(p.agrees for p in g) for g in groups], [len(g) for g in groups]
        return wilson(sum(hits), sum(sizes)), document_bootstrap(hits, sizes)

    def mean_kl(self) -> Value:
        """The mean with one-sided 95 % bounds from resampling documents; exact where nothing differs."""
        groups = list(self.by_document().values())
        sums, sizes = [sum(p.kl for p in g) for g in groups], [len(g) for g in groups]
        mean = sum(sums) / sum(sizes)
        bounds = document_bootstrap(sums, sizes, confidence=0.9) if any(sums) else Interval(0.0, 0.0)
        return Value(mean, bounds.low if bounds else None, bounds.high if bounds else None)

    def kl_figures(self) -> dict[str, float]:
        kl = np.array([p.kl for p in self.pairs])
        return {
            "mean": float(kl.mean()),
            "median": float(np.median(kl)),
            "p99": float(np.quantile(kl, 0.99)),
            "max": float(kl.max()),
        }

    @property
    def max_delta(self) -> float:
        return max(abs(p.actual_delta) for p in self.pairs)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that is said about a test run."""

    base: Run
    test: Run
    scored: Scored | None
    noise: Scored | None
    divergence: Divergence | None
    measures: dict[str, dict[str, Measure]]
    rulings: tuple[GateResult, ...]
    variant: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """FAIL if any gate fails, else INCONCLUSIVE if any is undecided or unmeasured, else PASS."""
        outcomes = {ruling.outcome for ruling in self.rulings}
        if "FAIL" in outcomes:
            return "FAIL"
        return "PASS" if outcomes == {"PASS"} else "INCONCLUSIVE"


def check_pair(base: Run, test: Run, protocol: Protocol) -> None:
    """Both runs must be of this protocol and the same tokens. Raises RunError."""
    for run in (base, test):
        if run.protocol != protocol.digest:
            raise RunError(
                f"{run.folder}: recorded with another protocol than {protocol.name}; record it again"
            )
    if base.tokens != test.tokens:
        raise RunError(
            f"{base.folder} and {test.folder} were asked different tokens; give both the same --tokens"
        )


def check_noise(base: Run, noise: Run, protocol: Protocol) -> None:
    """The noise floor is the baseline against itself: the very same server. Raises RunError."""
    check_pair(base, noise, protocol)
    differences = base.identity.differences(noise.identity)
    if differences:
        raise RunError(f"{noise.folder} is not of the baseline's server: {'; '.join(differences)}")


def score_runs(base: Run, test: Run, protocol: Protocol, items: Sequence[Item]) -> Scored | None:
    """Pairs at every position that both answered to the very same request; None where there is none."""
    pairs: list[Pair] = []
    for item in items:
        first, second = base.rows.get(item.id), test.rows.get(item.id)
        if item.kind != "score" or first is None or second is None or not (first.ok and second.ok):
            continue
        if first.request != second.request:
            raise RunError(
                f"{item.id}: the two servers were asked different windows; give both the same limit"
            )
        both = zip(_positions(first, item, protocol), _positions(second, item, protocol), strict=True)
        pairs += [pair(str(item.facts["document"]), a, b) for a, b in both]
    return Scored(tuple(pairs), protocol.scoring.confident) if pairs else None


def _positions(row: Row, item: Item, protocol: Protocol) -> list[Position]:
    assert row.answer is not None
    entries = row.answer["choices"][0]["prompt_logprobs"]
    return read_positions(item.body["prompt"], entries, protocol.scoring.skip_tokens)


def compare(
    base: Run,
    test: Run,
    protocol: Protocol,
    items: Sequence[Item],
    noise: Run | None = None,
    variant: Run | None = None,
) -> Comparison:
    """The whole judgement. `noise`: the baseline recorded once more. `variant`: another test, paired by McNemar."""
    check_pair(base, test, protocol)
    if noise is not None:
        check_noise(base, noise, protocol)
    scored = score_runs(base, test, protocol, items)
    floor = score_runs(base, noise, protocol, items) if noise else None
    phases = ("before", "after") if protocol.probes.soak_prompts else ("before",)
    measures = {phase: probe_measures(test, protocol, items, phase) for phase in phases}
    measures["run"] = run_measures(test)
    measures["before"] |= _paired_measures(base, test, scored, items)
    paired = _mcnemar(base, test, variant, protocol, items) if variant else None
    return Comparison(
        base, test, scored, floor, diverge(base, test), measures, tuple(rule(protocol, measures)), paired
    )


def _paired_measures(
    base: Run, test: Run, scored: Scored | None, items: Sequence[Item]
) -> dict[str, Measure]:
    found: dict[str, Measure] = {}
    if scored:
        found |= {
            "top1_agreement": scored.agreement,
            "mean_kl": scored.mean_kl(),
            "confident_flips": scored.flips,
        }
        found["max_logprob_delta"] = Value(scored.max_delta)
        found["identical_positions"] = Proportion(sum(p.identical for p in scored.pairs), len(scored.pairs))
    seen = [i.id for i in items if i.kind == "vision" and not i.facts.get("blind")]
    both = [i for i in seen if all(i in run.rows and run.rows[i].ok for run in (base, test))]
    if both:
        same = sum(text_of(base.rows[i]) == text_of(test.rows[i]) for i in both)
        found["vision_agreement"] = Proportion(same, len(both))
    return found


def rule(protocol: Protocol, measures: dict[str, dict[str, Measure]]) -> list[GateResult]:
    """Each gate by the worst phase that measured it."""
    rulings = []
    for gate in protocol.gates:
        found = [m[gate.metric] for m in measures.values() if gate.metric in m]
        ruled = [_judge(gate, measure) for measure in found]
        order = {"FAIL": 0, "INCONCLUSIVE": 1, "NOT MEASURED": 2, "PASS": 3}
        rulings.append(min(ruled, key=lambda r: order[r.outcome], default=judge_value(gate, None)))
    return rulings


# Every one of these must be right; they are not a sample of anything.
EXACT = ("arithmetic", "vision_limit_refused", "soak_served", "identical_positions")


def _judge(gate: Gate, measure: Measure) -> GateResult:
    if isinstance(measure, Value):
        return judge_value(gate, measure.value, measure.low, measure.high)
    if gate.metric in EXACT:
        return judge_value(gate, measure.hits / measure.n if measure.n else None)
    return judge_proportion(gate, measure.hits, measure.n, measure.effect)


def _mcnemar(base: Run, test: Run, variant: Run, protocol: Protocol, items: Sequence[Item]) -> dict[str, Any]:
    """Whether test and variant differ in how often they keep the baseline's first choice."""
    check_pair(base, variant, protocol)
    first, second = (score_runs(base, run, protocol, items) for run in (test, variant))
    if first is None or second is None or len(first.pairs) != len(second.pairs):
        raise RunError(f"{variant.folder}: not the same positions as {test.folder}; record what is missing")
    pairs = list(zip(first.pairs, second.pairs, strict=True))
    only_test = sum(a.agrees and not b.agrees for a, b in pairs)
    only_variant = sum(b.agrees and not a.agrees for a, b in pairs)
    p = mcnemar(only_test, only_variant)
    return {"folder": str(variant.folder), "only_test": only_test, "only_variant": only_variant, "p": p}
