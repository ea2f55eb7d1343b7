"""Two runs judged: the test against the baseline at the same positions, beside the baseline against itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardmill.verify.accept.answered import Answered, answered
from shardmill.verify.accept.diverge import Divergence, diverge
from shardmill.verify.accept.gates import (
    Gate,
    GateResult,
    judge_mean,
    judge_median,
    judge_proportion,
    judge_value,
)
from shardmill.verify.accept.items import Item
from shardmill.verify.accept.measure import (
    Mean,
    Measure,
    Median,
    Proportion,
    Value,
    each,
    probe_measures,
    run_measures,
    text_of,
)
from shardmill.verify.accept.protocol import Protocol
from shardmill.verify.accept.rows import Row
from shardmill.verify.accept.runs import Run, RunError
from shardmill.verify.accept.score import Pair, Position, entries_of, pair, read_positions
from shardmill.verify.accept.scored import Scored
from shardmill.verify.accept.stats import mcnemar


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that is said about a test run."""

    base: Run
    test: Run
    protocol: Protocol
    scored: Scored | None
    noise: Scored | None
    divergence: Divergence | None
    measures: dict[str, dict[str, Measure]]
    rulings: tuple[GateResult, ...]
    variant: dict[str, Any] | None = None
    items: tuple[Item, ...] = ()

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
    if base.rows and base.identity == test.identity and base.rows == test.rows:
        raise RunError(f"{base.folder} and {test.folder} are one recording; record the server once more")


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
    scoring = protocol.scoring
    return read_positions(
        item.body["prompt"], entries_of(row.answer) or [], scoring.skip_tokens, scoring.top_k
    )


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
        base,
        test,
        protocol,
        scored,
        floor,
        diverge(base, test),
        measures,
        tuple(_withhold(base, test, protocol, items, ruling) for ruling in rule(protocol, measures)),
        paired,
        items=tuple(items),
    )


def _paired_measures(
    base: Run, test: Run, scored: Scored | None, items: Sequence[Item]
) -> dict[str, Measure]:
    found: dict[str, Measure] = {}
    if scored:
        found = {
            "top1_agreement": scored.agreement,
            "mean_kl": scored.mean_kl(),
            "confident_flips": scored.flips,
            "mean_logprob_delta": scored.mean_delta(),
            "max_logprob_delta": Value(scored.max_delta),
            "identical_positions": scored.identical,
            "outside_top_k": scored.outside,
        }
    seen = [i.id for i in items if i.kind == "vision" and not i.facts.get("blind")]
    both = [i for i in seen if all(i in run.rows and run.rows[i].ok for run in (base, test))]
    same = each(text_of(base.rows[i]) == text_of(test.rows[i]) for i in both)
    return found | ({"vision_agreement": same} if same else {})


def rule(protocol: Protocol, measures: dict[str, dict[str, Measure]]) -> list[GateResult]:
    """Each gate by the worst phase that measured it."""
    rulings = []
    for gate in protocol.gates:
        found = [m[gate.metric] for m in measures.values() if gate.metric in m]
        ruled = [_judge(gate, measure) for measure in found]
        order = {"FAIL": 0, "INCONCLUSIVE": 1, "NOT MEASURED": 2, "PASS": 3}
        rulings.append(min(ruled, key=lambda r: order[r.outcome], default=judge_value(gate, None)))
    return rulings


def _judge(gate: Gate, measure: Measure) -> GateResult:
    if isinstance(measure, Proportion):
        return judge_proportion(gate, measure.by_document, measure.sizes)
    if isinstance(measure, Mean):
        return judge_mean(gate, measure.sums, measure.sizes, measure.positive)
    if isinstance(measure, Median):
        return judge_median(gate, measure.values)
    return judge_value(gate, measure.value)


def _withhold(
    base: Run, test: Run, protocol: Protocol, items: Sequence[Item], ruling: GateResult
) -> GateResult:
    """The ruling, undecided where too little was answered; only what a single answer refutes stays a FAIL."""
    share: Answered = answered(ruling.gate.metric, base, test, protocol, items)
    why = share.why(protocol.answered_at_least)
    refuted = ruling.outcome == "FAIL" and ruling.low is None
    if not why or refuted:
        return ruling
    undecided = replace(ruling, positions=None, why=why)
    return undecided if ruling.value is None else replace(undecided, outcome="INCONCLUSIVE")


def _mcnemar(base: Run, test: Run, variant: Run, protocol: Protocol, items: Sequence[Item]) -> dict[str, Any]:
    """Whether test and variant differ in how often they keep the baseline's first choice."""
    check_pair(base, variant, protocol)
    check_pair(test, variant, protocol)
    first, second = (score_runs(base, run, protocol, items) for run in (test, variant))
    if first is None or second is None or len(first.pairs) != len(second.pairs):
        raise RunError(f"{variant.folder}: not the same positions as {test.folder}; record what is missing")
    pairs = list(zip(first.pairs, second.pairs, strict=True))
    only_test = sum(a.agrees and not b.agrees for a, b in pairs)
    only_variant = sum(b.agrees and not a.agrees for a, b in pairs)
    p = mcnemar(only_test, only_variant)
    return {"folder": str(variant.folder), "only_test": only_test, "only_variant": only_variant, "p": p}
