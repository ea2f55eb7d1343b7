"""A comparison for people, as a table for a model card, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from shardmill.verify.accept.compare import Comparison, Scored
from shardmill.verify.accept.diverge import Divergence
from shardmill.verify.accept.measure import Measure, Proportion, as_plain, failures, soak_seconds
from shardmill.verify.accept.protocol import Published
from shardmill.verify.accept.runs import Run
from shardmill.verify.accept.stats import DOCUMENTS_MIN, Interval, wilson


def percent(interval: Interval | None) -> str:
    """An interval in percent, rounded outward."""
    if interval is None:
        return f"not given: fewer than {DOCUMENTS_MIN} documents"
    low, high = interval.outward(1)
    return f"{low:.1f}-{high:.1f}"


def lines(comparison: Comparison) -> Iterator[str]:
    """The verdict, the noise floor above the result, the gates, the probes, the failures."""
    yield f"{comparison.verdict}: {_who(comparison.test)} against {_who(comparison.base)}"
    yield ""
    if comparison.noise:
        yield "Noise floor, the baseline against itself:"
        yield from _scored(comparison.noise)
    elif comparison.scored:
        yield "Noise floor: not measured; record the baseline twice and give --noise"
    if comparison.scored:
        yield "Teacher-forced, the test against the baseline:"
        yield from _scored(comparison.scored)
    if comparison.variant:
        v = comparison.variant
        yield f"  against {v['folder']}: right alone {v['only_test']} and {v['only_variant']}, McNemar p = {v['p']:.4f}"
    if comparison.divergence:
        yield _greedy(comparison.divergence)
    yield "Gates:"
    yield from (f"  {ruling.sentence}" for ruling in comparison.rulings)
    for phase, measures in comparison.measures.items():
        if measures:
            yield {"run": "Whole run:", "before": "Probes:", "after": "Probes after the soak:"}[phase]
            yield from (f"  {name}: {_measure(measure)}" for name, measure in measures.items())
    if soak := soak_seconds(comparison.test):
        yield f"Soak, seconds each: {', '.join(f'{s:.1f}' for s in soak)}"
    yield from _failures(comparison)


def _greedy(d: Divergence) -> str:
    if d.median_index is None:
        return f"Greedy chains (no gate): all {d.chains} identical"
    text = f"Greedy chains (no gate): {d.identical} of {d.chains} identical; median parting at token {d.median_index:g}"
    if d.margins:
        text += f", where the baseline led by {min(d.margins):.3f} to {max(d.margins):.3f} nats"
    return text


def _scored(scored: Scored) -> Iterator[str]:
    agreement, flips = scored.agreement, scored.flips
    by_position, by_document = scored.agreement_intervals()
    kl = scored.kl_figures()
    yield (
        f"  top-1 agreement {agreement.hits}/{agreement.n} = {100 * agreement.hits / agreement.n:.2f} % "
        f"(Wilson {percent(by_position)}; by document {percent(by_document)}; design effect {agreement.effect:.2f})"
    )
    yield f"  KL, nats: mean {kl['mean']:.5f}, median {kl['median']:.5f}, p99 {kl['p99']:.5f}, max {kl['max']:.5f}"
    yield f"  flips where the baseline was sure (p >= {scored.confident:g}): {flips.hits} of {flips.n}"
    yield f"  largest |delta logprob| of the text's own tokens: {scored.max_delta:.5f}"


def _measure(measure: Measure) -> str:
    if isinstance(measure, Proportion):
        return f"{measure.hits}/{measure.n} ({percent(wilson(measure.hits, measure.n))} %)"
    spread = "" if measure.low is None else f" ({measure.low:.4g} to {measure.high:.4g})"
    return f"{measure.value:.5g}{spread}"


def _failures(comparison: Comparison) -> Iterator[str]:
    for name, run in (("baseline", comparison.base), ("test", comparison.test)):
        counts = failures(run)
        if counts:
            yield f"Failed requests of the {name}, in no score: " + ", ".join(
                f"{k} {n}" for k, n in sorted(counts.items())
            )


def _who(run: Run) -> str:
    i = run.identity
    parts = [
        i.model,
        f"version {i.version}",
        i.rung and f"rung {i.rung}",
        i.checkpoint and i.checkpoint[:21],
        i.image,
    ]
    return ", ".join(part for part in parts if part)


def markdown(comparison: Comparison) -> str:
    """The card's table: a row a gate, the noise floor first, identities below."""
    rows = ["| what | value | bounds | gate | ruling |", "|---|---|---|---|---|"]
    if comparison.noise:
        floor = comparison.noise.agreement
        share = f"{100 * floor.hits / floor.n:.2f} %"
        rows.append(
            f"| noise floor: baseline against itself | {share} | {percent(wilson(floor.hits, floor.n))} | | |"
        )
    for r in comparison.rulings:
        value = "" if r.value is None else f"{r.value:.4f}"
        bounds = "" if r.low is None or r.high is None else f"{r.low:.4f} to {r.high:.4f}"
        outcome = f"{r.outcome}, n = {r.positions:,} would decide" if r.positions else r.outcome
        rows.append(
            f"| {r.gate.metric} | {value} | {bounds} | {str(r.gate).removeprefix(r.gate.metric)} | {outcome} |"
        )
    identities = [
        f"{name}: {_who(run)}" for name, run in (("baseline", comparison.base), ("test", comparison.test))
    ]
    return "\n".join([*rows, "", *identities])


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Everything, as one object."""
    scored = comparison.scored
    return {
        "format": "shardmill/accept/1",
        "verdict": comparison.verdict,
        "baseline": asdict(comparison.base.identity),
        "test": asdict(comparison.test.identity),
        "protocol": comparison.test.protocol,
        "scored": _scored_json(scored) if scored else None,
        "noise_floor": _scored_json(comparison.noise) if comparison.noise else None,
        "greedy": asdict(comparison.divergence) if comparison.divergence else None,
        "variant": comparison.variant,
        "gates": [{**asdict(r), "gate": str(r.gate)} for r in comparison.rulings],
        "measures": {phase: as_plain(measures) for phase, measures in comparison.measures.items()},
        "soak_seconds": soak_seconds(comparison.test),
        "failures": {"baseline": dict(failures(comparison.base)), "test": dict(failures(comparison.test))},
    }


def _scored_json(scored: Scored) -> dict[str, Any]:
    by_position, by_document = scored.agreement_intervals()
    agreement = scored.agreement
    return {
        "positions": agreement.n,
        "agreeing": agreement.hits,
        "design_effect": agreement.effect,
        "wilson": [by_position.low, by_position.high],
        "by_document": [by_document.low, by_document.high] if by_document else None,
        "kl": scored.kl_figures(),
        "confident_flips": asdict(scored.flips),
        "max_logprob_delta": scored.max_delta,
    }


def published_lines(published: tuple[Published, ...]) -> Iterator[str]:
    """Published figures beside the interval that their counts carry."""
    for p in published:
        yield f"  {p.name}: {p.hits}/{p.n} = {100 * p.hits / p.n:.2f} %, interval {percent(wilson(p.hits, p.n))}"
