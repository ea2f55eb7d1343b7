"""A comparison for people, as a table for a model card, and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from shardmill.verify.accept.answered import answered, failures
from shardmill.verify.accept.compare import Comparison
from shardmill.verify.accept.diverge import Divergence
from shardmill.verify.accept.gates import GateResult
from shardmill.verify.accept.measure import Mean, Measure, Median, Proportion, as_plain, finite, soak_seconds
from shardmill.verify.accept.protocol import Published
from shardmill.verify.accept.runs import Run
from shardmill.verify.accept.scored import Scored
from shardmill.verify.accept.stats import DOCUMENTS_MIN, Interval, wilson
from shardmill.verify.rules.findings import printable


def percent(interval: Interval) -> str:
    """An interval in percent, rounded outward."""
    if not interval.known:
        return f"not given: fewer than {DOCUMENTS_MIN} documents"
    low, high = interval.outward(1)
    return f"{low:.1f}-{high:.1f}"


def lines(comparison: Comparison) -> Iterator[str]:
    """The verdict and what was not answered, the noise floor above the result, the gates, the probes."""
    yield f"{comparison.verdict}: {_who(comparison.test)} against {_who(comparison.base)}"
    yield from _verdict(comparison)
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


def _verdict(comparison: Comparison) -> Iterator[str]:
    """What belongs to the verdict: requests without an answer, and first choices that the other does not show."""
    for name, run in (("baseline", comparison.base), ("test", comparison.test)):
        counts = failures(run, comparison.items)
        if counts:
            kinds = ", ".join(f"{kind} {n}" for kind, n in sorted(counts.items()))
            yield f"Not answered by the {name}, in no score: {kinds}"
    if comparison.scored and (outside := comparison.scored.outside).hits:
        yield (
            f"First choice outside the other's top K: at {outside.hits:,} of {outside.n:,} positions; "
            "the divergence is loosest there"
        )


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
    kl, delta = scored.kl_figures(), scored.mean_delta()
    yield (
        f"  top-1 agreement {agreement.hits}/{agreement.n} = {100 * agreement.hits / agreement.n:.2f} % "
        f"(Wilson {percent(by_position)}; by document {percent(by_document)}; design effect {agreement.effect:.2f})"
    )
    yield (
        f"  KL, nats, a lower bound: mean {kl['mean']:.5f}, median {kl['median']:.5f}, p99 {kl['p99']:.5f}, "
        f"max {kl['max']:.5f}; the baseline's mean mass outside what both show: {scored.unseen:.4f}"
    )
    yield (
        f"  delta logprob of the text's own tokens, nats: mean {delta.value:+.5f} ({_interval(delta)}), "
        f"RMS {scored.rms_delta:.5f}, largest {scored.max_delta:.5f}"
    )
    yield f"  flips where the baseline was sure (p >= {scored.confident:g}): {flips.hits} of {flips.n}"
    yield f"  first choice outside the other's top K: {scored.outside.hits} of {scored.outside.n}"


def _interval(mean: Mean) -> str:
    """The two-sided 95 % interval over documents."""
    bounds = mean.bounds(0.975)
    if finite(bounds.low) is None:
        return f"no interval: fewer than {DOCUMENTS_MIN} documents"
    return f"95 %: {bounds.low:+.5f} to {bounds.high:+.5f}"


def _measure(measure: Measure) -> str:
    if isinstance(measure, Proportion):
        return f"{measure.hits}/{measure.n} ({percent(wilson(measure.hits, measure.n))} % if independent)"
    if isinstance(measure, Mean):
        return f"{measure.value:.5g} ({_interval(measure)})"
    if isinstance(measure, Median):
        return f"{measure.value:.5g} ({min(measure.values):.4g} to {max(measure.values):.4g})"
    return f"{measure.value:.5g}"


def _who(run: Run) -> str:
    i = run.identity
    parts = [
        i.model,
        f"version {i.version}",
        i.rung and f"rung {i.rung}",
        i.checkpoint and i.checkpoint[:21],
        i.image,
    ]
    return printable(", ".join(part for part in parts if part))


def _plain_markdown(text: str) -> str:
    """A server's words without meaning in Markdown or HTML."""
    return re.sub(r"([\\`*_{}\[\]<>()#!|~&])", r"\\\1", text).replace("\\<", "&lt;").replace("\\>", "&gt;")


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
        known = finite(r.low) is not None and finite(r.high) is not None
        bounds = f"{r.low:.4f} to {r.high:.4f}" if known else ""
        outcome = f"{r.outcome}: {_plain_markdown(r.why)}" if r.why else r.outcome
        rows.append(
            f"| {r.gate.metric} | {value} | {bounds} | {str(r.gate).removeprefix(r.gate.metric)} | {outcome} |"
        )
    identities = [
        f"{name}: {_plain_markdown(_who(run))}"
        for name, run in (("baseline", comparison.base), ("test", comparison.test))
    ]
    verdict = [f"verdict: {comparison.verdict}", *map(_plain_markdown, _verdict(comparison))]
    return "\n\n".join(["\n".join(rows), *verdict, *identities])


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Everything, as one object."""
    scored, items = comparison.scored, comparison.items
    return {
        "format": "shardmill/accept/2",
        "verdict": comparison.verdict,
        "not_answered": {
            "baseline": dict(failures(comparison.base, items)),
            "test": dict(failures(comparison.test, items)),
        },
        "baseline": asdict(comparison.base.identity),
        "test": asdict(comparison.test.identity),
        "protocol": comparison.test.protocol,
        "scored": _scored_json(scored) if scored else None,
        "noise_floor": _scored_json(comparison.noise) if comparison.noise else None,
        "greedy": asdict(comparison.divergence) if comparison.divergence else None,
        "variant": comparison.variant,
        "gates": [_gate_json(comparison, ruling) for ruling in comparison.rulings],
        "measures": {phase: as_plain(measures) for phase, measures in comparison.measures.items()},
        "soak_seconds": soak_seconds(comparison.test),
    }


def _gate_json(comparison: Comparison, ruling: GateResult) -> dict[str, Any]:
    share = answered(
        ruling.gate.metric, comparison.base, comparison.test, comparison.protocol, comparison.items
    )
    plain = {**asdict(ruling), "low": finite(ruling.low), "high": finite(ruling.high)}
    return {**plain, "gate": str(ruling.gate), "answered": share.answered, "asked": share.asked}


def _scored_json(scored: Scored) -> dict[str, Any]:
    by_position, by_document = scored.agreement_intervals()
    agreement, flips, delta = scored.agreement, scored.flips, scored.mean_delta()
    bounds = delta.bounds(0.975)
    return {
        "documents": len(agreement.sizes),
        "positions": agreement.n,
        "agreeing": agreement.hits,
        "design_effect": agreement.effect,
        "wilson": [by_position.low, by_position.high],
        "by_document": [by_document.low, by_document.high] if by_document.known else None,
        "kl": scored.kl_figures(),
        "confident_flips": {"hits": flips.hits, "n": flips.n, "documents": len(flips.sizes)},
        "logprob_delta": {
            "mean": delta.value,
            "interval": [finite(bounds.low), finite(bounds.high)],
            "rms": scored.rms_delta,
            "max": scored.max_delta,
        },
        "first_choice_outside_top_k": scored.outside.hits,
        "mass_not_shown_by_both": scored.unseen,
    }


def published_lines(published: tuple[Published, ...]) -> Iterator[str]:
    """Published figures beside the interval that their counts carry."""
    for p in published:
        yield f"  {p.name}: {p.hits}/{p.n} = {100 * p.hits / p.n:.2f} %, interval {percent(wilson(p.hits, p.n))}"
