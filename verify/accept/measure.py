"""From raw answers to numbers: what one run shows by itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from shardmill.verify.accept.items import Item
from shardmill.verify.accept.protocol import Protocol, needle_number
from shardmill.verify.accept.runs import Row, Run

REPLACEMENT = "\ufffd"
REPETITION_TOKENS_MIN = 2700  # a generation shorter than this shows no repetition at long context


@dataclass(frozen=True, slots=True)
class Proportion:
    """`hits` of `n`; `effect` is the design effect of its documents."""

    hits: int
    n: int
    effect: float = 1.0


@dataclass(frozen=True, slots=True)
class Value:
    """A number, with one-sided bounds where it is an estimate."""

    value: float
    low: float | None = None
    high: float | None = None


Measure = Proportion | Value


def probe_measures(run: Run, protocol: Protocol, items: Sequence[Item], phase: str) -> dict[str, Measure]:
    """Every measure of a run's probes in one phase; what was not answered is left out."""
    facts = {item.id: item.facts for item in items}
    found: dict[str, Measure | None] = {
        "worst_4gram": _worst_gram(run.of("repetition", phase)),
        "replacement_characters": _replacements(run.of("unicode", phase)),
        "needles": _needles(run.of("needle", phase), protocol),
        "arithmetic": _answers(run.of("arithmetic", phase), facts),
        "vision": _answers(
            [r for r in run.of("vision", phase) if not facts.get(r.id, {}).get("blind")], facts
        ),
        "vision_prompt_tokens": _picture_tokens(run.of("vision", phase), facts),
        "vision_limit_refused": _refused(run.of("vision_limit", phase)),
    }
    found |= {f"decode_c{c}": _speed(run, phase, c, facts) for c in protocol.probes.speed_concurrency}
    return {name: measure for name, measure in found.items() if measure is not None}


def run_measures(run: Run) -> dict[str, Measure]:
    """What belongs to a whole run: the draft's acceptance, the soak, the memory watermark."""
    found: dict[str, Measure] = {}
    counters: Mapping[str, float] = run.notes.get("acceptance", {})
    drafts = counters.get("drafts", 0)
    for name, accepted in sorted(counters.items()):
        if name.startswith("position ") and drafts:
            key = (
                "mtp_acceptance"
                if name == "position 0"
                else f"mtp_acceptance_{name.removeprefix('position ')}"
            )
            found[key] = Proportion(int(accepted), int(drafts))
    soak = run.of("soak")
    if soak:
        found["soak_served"] = Proportion(sum(row.ok for row in soak), len(soak))
        found["soak_seconds"] = Value(max(row.seconds for row in soak))
    if "least_free_mib" in run.notes:
        found["least_free_mib"] = Value(float(run.notes["least_free_mib"]))
    return found


def soak_seconds(run: Run) -> list[float]:
    """Seconds of each full-context prompt that was served."""
    return [round(row.seconds, 3) for row in run.of("soak") if row.ok]


def failures(run: Run) -> Counter[str]:
    """How many requests failed, by kind of request and of failure; never a score."""
    return Counter(f"{row.kind}: {row.failure}" for row in run.rows.values() if not row.ok)


def text_of(row: Row) -> str:
    """The generated text of a completion or a chat, a reasoning part left out."""
    choice = _choice(row)
    message = choice.get("message")
    if isinstance(message, dict):
        return str(message.get("content") or "")
    return str(choice.get("text") or "")


def generated_ids(row: Row) -> list[int]:
    ids = _choice(row).get("token_ids")
    return [token for token in ids if isinstance(token, int)] if isinstance(ids, list) else []


def worst_gram(tokens: Sequence[int], size: int = 4) -> int:
    """How often the most frequent run of `size` tokens occurs."""
    grams = Counter(tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1))
    return max(grams.values(), default=0)


def replacement_count(text: str) -> int:
    """U+FFFD in a text but at its very end, where the token limit may have cut a character."""
    return text.rstrip(REPLACEMENT).count(REPLACEMENT)


def _choice(row: Row) -> Mapping[str, Any]:
    choices = (row.answer or {}).get("choices") or [{}]
    return choices[0] if isinstance(choices[0], dict) else {}


def _usage(row: Row, key: str) -> int:
    usage = (row.answer or {}).get("usage")
    count = usage.get(key) if isinstance(usage, dict) else None
    return count if isinstance(count, int) else 0


def _worst_gram(rows: Sequence[Row]) -> Value | None:
    counts = [
        worst_gram(generated_ids(row))
        for row in rows
        if row.ok and len(generated_ids(row)) >= REPETITION_TOKENS_MIN
    ]
    return Value(max(counts)) if counts else None


def _replacements(rows: Sequence[Row]) -> Value | None:
    good = [row for row in rows if row.ok]
    return Value(sum(replacement_count(text_of(row)) for row in good)) if good else None


def _needles(rows: Sequence[Row], protocol: Protocol) -> Proportion | None:
    numbers = [str(needle_number(protocol.probes, i)) for i in range(len(protocol.probes.needle_depths))]
    good = [row for row in rows if row.ok]
    hits = sum(number in text_of(row).replace(",", "") for row in good for number in numbers)
    return Proportion(hits, len(good) * len(numbers)) if good else None


def _answers(rows: Sequence[Row], facts: Mapping[str, Mapping[str, Any]]) -> Proportion | None:
    good = [row for row in rows if row.ok and row.id in facts]
    hits = sum(str(facts[row.id]["answer"]).lower() in text_of(row).lower() for row in good)
    return Proportion(hits, len(good)) if good else None


def _picture_tokens(rows: Sequence[Row], facts: Mapping[str, Mapping[str, Any]]) -> Value | None:
    """Prompt tokens that the first picture adds to the same question asked blind; 0 when vision is silently off."""
    blind = next((row for row in rows if row.ok and facts.get(row.id, {}).get("blind")), None)
    seeing = next((row for row in rows if row.ok and row.id.endswith("/0")), None)
    if blind is None or seeing is None:
        return None
    return Value(_usage(seeing, "prompt_tokens") - _usage(blind, "prompt_tokens"))


def _refused(rows: Sequence[Row]) -> Proportion | None:
    """Requests with one picture too many that the server turned away."""
    good = [row for row in rows if row.ok]
    return Proportion(sum(row.detail == "refused" for row in good), len(good)) if good else None


def _speed(run: Run, phase: str, at_once: int, facts: Mapping[str, Mapping[str, Any]]) -> Value | None:
    """Tokens a second in all from usage counts and wall time, prefill included: median, and quartiles as bounds."""
    rows = [row for row in run.of("speed", phase) if f"/c{at_once}/" in row.id and row.ok]
    rates = [
        (_usage(row, "all_tokens") or _usage(row, "completion_tokens")) / row.seconds
        for row in rows
        if row.seconds and not facts.get(row.id, {}).get("warm_up")
    ]
    if len(rates) < 2:
        return Value(rates[0]) if rates else None
    low, _, high = quantiles(rates, n=4, method="inclusive")
    return Value(median(rates), low, high)


def as_plain(measures: Mapping[str, Measure]) -> dict[str, Any]:
    """Measures as JSON values."""
    plain: dict[str, Any] = {}
    for name, measure in measures.items():
        if isinstance(measure, Proportion):
            plain[name] = {"hits": measure.hits, "n": measure.n, "design_effect": measure.effect}
        else:
            plain[name] = {"value": measure.value, "low": measure.low, "high": measure.high}
    return json.loads(json.dumps(plain))  # type: ignore[no-any-return]
