"""From raw answers to numbers: what one run shows by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

from shardmill.verify.accept.clusters import mean_bounds
from shardmill.verify.accept.items import Item
from shardmill.verify.accept.protocol import Protocol, needle_number
from shardmill.verify.accept.rows import Row
from shardmill.verify.accept.runs import Run
from shardmill.verify.accept.stats import Interval, design_effect

REPLACEMENT = "\ufffd"
REPETITION_TOKENS_MIN = 2700  # a generation shorter than this shows no repetition at long context


@dataclass(frozen=True, slots=True)
class Proportion:
    """What came out right, and what was counted, of each document (or prompt, or picture): the unit that is drawn."""

    by_document: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def hits(self) -> int:
        return sum(self.by_document)

    @property
    def n(self) -> int:
        return sum(self.sizes)

    @property
    def effect(self) -> float:
        return design_effect(self.by_document, self.sizes)


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over positions: sums and numbers of positions of each document. positive: no value is below 0."""

    sums: tuple[float, ...]
    sizes: tuple[int, ...]
    positive: bool = False

    @property
    def value(self) -> float:
        return sum(self.sums) / sum(self.sizes)

    def bounds(self, confidence: float = 0.95) -> Interval:
        """Two one-sided bounds."""
        return mean_bounds(self.sums, self.sizes, confidence, self.positive)


@dataclass(frozen=True, slots=True)
class Median:
    """A median of repeated measurements, in their order."""

    values: tuple[float, ...]

    @property
    def value(self) -> float:
        return median(self.values)


@dataclass(frozen=True, slots=True)
class Value:
    """A number that is no estimate."""

    value: float


Measure = Proportion | Mean | Median | Value


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
    found: dict[str, Measure] = dict(_acceptance(run))
    soak = run.of("soak")
    if soak:
        found["soak_served"] = Proportion(tuple(int(row.ok) for row in soak), (1,) * len(soak))
        found["soak_seconds"] = Value(max(row.seconds for row in soak))
    if "least_free_mib" in run.notes:
        found["least_free_mib"] = Value(float(run.notes["least_free_mib"]))
    return found


def _acceptance(run: Run) -> Iterator[tuple[str, Proportion]]:
    """Accepted of drafted tokens by position, each prompt a document: what is asked again is no further one."""
    by_prompt: dict[str, Counter[str]] = {}
    for row in run.rows.values():
        if row.ok and row.counters:
            by_prompt.setdefault(row.request, Counter()).update(dict(row.counters))
    drafted = [gained for gained in by_prompt.values() if gained["drafts"] > 0]
    for name in sorted({name for gained in drafted for name in gained if name.startswith("position ")}):
        place = name.removeprefix("position ")
        key = "mtp_acceptance" if place == "0" else f"mtp_acceptance_{place}"
        accepted = tuple(int(min(gained[name], gained["drafts"])) for gained in drafted)
        yield key, Proportion(accepted, tuple(int(gained["drafts"]) for gained in drafted))


def soak_seconds(run: Run) -> list[float]:
    """Seconds of each full-context prompt that was served."""
    return [round(row.seconds, 3) for row in run.of("soak") if row.ok]


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
    choices = (row.answer or {}).get("choices")
    first = choices[0] if isinstance(choices, list) and choices else {}
    return first if isinstance(first, dict) else {}


def _usage(row: Row, key: str) -> int:
    usage = (row.answer or {}).get("usage")
    count = usage.get(key) if isinstance(usage, dict) else None
    return count if type(count) is int and 0 <= count < 1 << 53 else 0


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
    """Numbers found, each prompt a document: needles of one haystack are found or lost together."""
    numbers = [str(needle_number(protocol.probes, i)) for i in range(len(protocol.probes.needle_depths))]
    texts = [text_of(row).replace(",", "") for row in rows if row.ok]
    hits = tuple(sum(number in text for number in numbers) for text in texts)
    return Proportion(hits, (len(numbers),) * len(texts)) if texts else None


def _answers(rows: Sequence[Row], facts: Mapping[str, Mapping[str, Any]]) -> Proportion | None:
    good = [row for row in rows if row.ok and row.id in facts]
    return each(str(facts[row.id]["answer"]).lower() in text_of(row).lower() for row in good)


def each(outcomes: Iterable[bool]) -> Proportion | None:
    """Every outcome is a document of its own; None where there is none."""
    hits = tuple(int(outcome) for outcome in outcomes)
    return Proportion(hits, (1,) * len(hits)) if hits else None


def _picture_tokens(rows: Sequence[Row], facts: Mapping[str, Mapping[str, Any]]) -> Value | None:
    """Prompt tokens that the first picture adds to the same question asked blind; 0 when vision is silently off."""
    blind = next((row for row in rows if row.ok and facts.get(row.id, {}).get("blind")), None)
    seeing = next((row for row in rows if row.ok and row.id.endswith("/0")), None)
    if blind is None or seeing is None:
        return None
    return Value(_usage(seeing, "prompt_tokens") - _usage(blind, "prompt_tokens"))


def _refused(rows: Sequence[Row]) -> Proportion | None:
    """Requests with one picture too many that the server turned away."""
    return each(row.detail == "refused" for row in rows if row.ok)


def _speed(run: Run, phase: str, at_once: int, facts: Mapping[str, Mapping[str, Any]]) -> Median | None:
    """Tokens a second in all from usage counts and wall time, prefill included, of each round after the warm-up."""
    rows = [row for row in run.of("speed", phase) if f"/c{at_once}/" in row.id and row.ok]
    rates = tuple(
        (_usage(row, "all_tokens") or _usage(row, "completion_tokens")) / row.seconds
        for row in rows
        if row.seconds and not facts.get(row.id, {}).get("warm_up")
    )
    return Median(rates) if rates else None


def as_plain(measures: Mapping[str, Measure]) -> dict[str, Any]:
    """Measures as JSON values."""
    return {name: _plain(measure) for name, measure in measures.items()}


def _plain(measure: Measure) -> dict[str, Any]:
    if isinstance(measure, Proportion):
        plain = {"hits": measure.hits, "n": measure.n, "documents": len(measure.sizes)}
        return {**plain, "design_effect": measure.effect}
    if isinstance(measure, Mean):
        low, high = (finite(end) for end in (measure.bounds().low, measure.bounds().high))
        return {"value": measure.value, "low": low, "high": high, "documents": len(measure.sizes)}
    if isinstance(measure, Median):
        return {"value": measure.value, "least": min(measure.values), "most": max(measure.values)}
    return {"value": measure.value}


def finite(number: float | None) -> float | None:
    """None for an infinite bound, which JSON does not know."""
    return number if number is not None and isfinite(number) else None
