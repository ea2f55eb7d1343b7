"""What two answers have in common, with intervals, and whether that is the law of their pair.

Positions of one prompt are not independent, so agreement is bounded by Wilson's interval at the design effect and KL
by resampling documents (verify.accept.stats). A document is a short prompt, or 160 positions of the long one. KL is
over the base's twenty best tokens and one bin for the rest: a lower bound of the whole vocabulary's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardmill.verify.accept.stats import design_effect, document_bootstrap, wilson
from tests.runtime_patch.gpu.cases import CASES, PAIRS, Pair

PARTS = ("short", "long", "again", "four", "alone", "pictures")
DOCUMENT = 160
Answer = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One question to both cases. Rates are None where no prompt was scored."""

    bits: bool
    tokens_equal: int
    requests: int
    first_token: int | None  # the earliest greedy token that differs
    first_position: int | None  # the earliest scored position that differs in a bit
    positions: int
    top1: float | None
    top1_low: float | None
    top1_high: float | None
    kl: float | None
    kl_low: float | None
    kl_high: float | None
    worst: float  # the largest |difference| of a log probability, up to the first token that differs


def compare(base: Answer, test: Answer, name: str) -> Part | None:
    """None where one of them was not asked."""
    if name not in base or name not in test:
        return None
    pairs = list(zip(base[name], test[name], strict=True))
    scored = all(a["prompt_logprobs"] and b["prompt_logprobs"] for a, b in pairs)
    firsts = [first for a, b in pairs if (first := _first(a["tokens"], b["tokens"])) is not None]
    hits, sizes, divergences = _documents(pairs) if scored else ([], [], [])
    n, rate = sum(sizes), None
    low = high = kl = kl_low = kl_high = None
    if n:
        rate, effect = sum(hits) / n, design_effect(hits, sizes)
        bound = wilson(sum(hits) / effect, n / effect)
        low, high, kl = bound.low, bound.high, sum(divergences) / n
        interval = document_bootstrap(divergences, sizes) if kl > 0 else None
        kl_low, kl_high = (interval.low, interval.high) if interval else (None, None)
    fields = ("tokens", "logprobs", "prompt_logprobs") if scored else ("tokens", "logprobs")
    return Part(
        bits=all(a[field] == b[field] for a, b in pairs for field in fields),
        tokens_equal=sum(a["tokens"] == b["tokens"] for a, b in pairs),
        requests=len(pairs),
        first_token=min(firsts, default=None),
        first_position=_first_position(pairs) if scored else None,
        positions=n,
        top1=rate,
        top1_low=low,
        top1_high=high,
        kl=kl,
        kl_low=kl_low,
        kl_high=kl_high,
        worst=max((_worst(a, b, scored) for a, b in pairs), default=0.0),
    )


def _first(left: list[int], right: list[int]) -> int | None:
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)


def _first_position(pairs: list[tuple[Answer, Answer]]) -> int | None:
    scored = ((a["prompt_logprobs"], b["prompt_logprobs"]) for a, b in pairs)
    found = [at for p, q in scored for at, (x, y) in enumerate(zip(p, q, strict=True)) if x != y]
    return min(found, default=None)


def _documents(pairs: list[tuple[Answer, Answer]]) -> tuple[list[float], list[float], list[float]]:
    """Agreeing positions, positions and summed KL of each document."""
    hits, sizes, divergences = [], [], []
    for a, b in pairs:
        entries = [(p, q) for p, q in zip(a["prompt_logprobs"], b["prompt_logprobs"], strict=True) if p and q]
        for begin in range(0, len(entries), DOCUMENT):
            part = entries[begin : begin + DOCUMENT]
            hits.append(float(sum(_best(p) == _best(q) for p, q in part)))
            sizes.append(float(len(part)))
            divergences.append(sum(_kl(p, q) for p, q in part))
    return hits, sizes, divergences


def _best(entry: dict[str, float]) -> str:
    return max(entry, key=lambda token: entry[token])


def _kl(p: dict[str, float], q: dict[str, float]) -> float:
    """KL(base || test) over tokens that both list, the rest in one bin."""
    both = p.keys() & q.keys()
    seen_p = sum(math.exp(p[token]) for token in both)
    seen_q = sum(math.exp(q[token]) for token in both)
    total = sum(math.exp(p[token]) * (p[token] - q[token]) for token in both)
    rest_p, rest_q = max(1 - seen_p, 1e-9), max(1 - seen_q, 1e-9)
    return total + rest_p * math.log(rest_p / rest_q)


def _worst(a: Answer, b: Answer, scored: bool) -> float:
    first = _first(a["tokens"], b["tokens"])
    upto = len(a["tokens"]) if first is None else first + 1
    entries = list(zip(a["logprobs"][:upto], b["logprobs"][:upto], strict=False))
    if scored:
        entries += [
            (p, q) for p, q in zip(a["prompt_logprobs"], b["prompt_logprobs"], strict=True) if p and q
        ]
    return max((abs(p[token] - q[token]) for p, q in entries for token in p.keys() & q.keys()), default=0.0)


def holds(pair: Pair, parts: dict[str, Part]) -> bool | None:
    """Whether the pair's law holds; None for a pair that is only reported."""
    if pair.law == "bits":
        return all(part.bits for part in parts.values())
    if pair.law == "until":
        return all(
            (part.first_position or math.inf) >= pair.least for part in parts.values() if part.positions
        )
    if pair.law == "floor":
        return all(part.top1 is None or part.top1 >= pair.least for part in parts.values())
    return None


def judge(folder: Path) -> dict[str, Any]:
    """Every pair whose cases ran, the laws inside one case, what was refused, and what was not run."""
    answers = dict(_answers(folder))
    ran = {name for name, answer in answers.items() if "error" not in answer}
    rows = []
    for pair in PAIRS:
        if not {pair.base, pair.test} <= ran:  # what was not run is listed below
            continue
        found = {
            name: part for name in PARTS if (part := compare(answers[pair.base], answers[pair.test], name))
        }
        rows.append(
            {**asdict(pair), "holds": holds(pair, found), "parts": {n: asdict(p) for n, p in found.items()}}
        )
    inside = [row for name in CASES if name in ran for row in _inside(name, answers[name])]
    refusals = {
        name: {"wanted": case.refused, "got": answers[name].get("error", "started")}
        for name, case in CASES.items()
        if case.refused and name in answers
    }
    return {
        "pairs": rows,
        "inside": inside,
        "refusals": {n: {**r, "holds": r["wanted"] in r["got"]} for n, r in refusals.items()},
        "errors": {n: a["error"] for n, a in answers.items() if "error" in a and not CASES[n].refused},
        "audits": {n: a["audit"] for n, a in answers.items() if "audit" in a},
        "traces": {n: a["trace"] for n, a in answers.items() if "trace" in a},
        "seams": {n: answers[n].get("seams") for n in sorted(ran)},
        "not_run": [name for name in CASES if name not in answers],
    }


def _answers(folder: Path) -> Iterator[tuple[str, Answer]]:
    for path in sorted(folder.glob("*.json")):
        answer = json.loads(path.read_text())
        if "case" in answer:
            yield answer["case"], answer


def _inside(name: str, answer: Answer) -> Iterator[dict[str, Any]]:
    """Within one server: the long prompt from the cache against its first time; four at once against one by one."""
    if "again" not in answer:
        return
    plain = {"prompt_logprobs": []}
    for law, left, right in (
        ("prefix cache hit against miss", answer["long"], answer["again"]),
        ("four at once against one by one", answer["four"][1:], answer["alone"]),
    ):
        part = compare({"x": [a | plain for a in left]}, {"x": [b | plain for b in right]}, "x")
        assert part is not None
        cached = sum(b["cached"] or 0 for b in right)
        yield {"case": name, "law": law, "cached": cached, **asdict(part)}


def markdown(verdict: dict[str, Any]) -> str:
    """The table for BENCHMARKS.md and docs/serving.md."""
    lines = ["| base | test | law | short prompts: top-1, KL | long prompt: top-1, KL | greedy runs equal |"]
    lines.append("|---|---|---|---|---|---|")
    for row in verdict["pairs"]:
        parts = row["parts"]
        law = {True: "holds", False: "**broken**", None: "-"}[row["holds"]]
        name = {
            "bits": "bit for bit",
            "until": f"bit for bit up to position {row['least']:g}",
            "floor": f"top-1 >= {row['least']}",
            "report": "",
        }[row["law"]]
        greedy = f"{sum(p['tokens_equal'] for p in parts.values())} of {sum(p['requests'] for p in parts.values())}"
        cells = [
            row["base"],
            row["test"],
            f"{name} {law}".strip(),
            _cell(parts.get("short")),
            _cell(parts.get("long")) if "pictures" not in parts else f"pictures: {_cell(parts['pictures'])}",
        ]
        lines.append(f"| {' | '.join(cells)} | {greedy} |")
    lines += ["", "| case | within one server | cached tokens | greedy runs equal | largest difference |"]
    lines.append("|---|---|---:|---|---:|")
    for row in verdict["inside"]:
        equal = "bit for bit" if row["bits"] else f"{row['tokens_equal']} of {row['requests']}"
        lines.append(f"| {row['case']} | {row['law']} | {row['cached']} | {equal} | {row['worst']:.2g} |")
    for name, row in verdict["refusals"].items():
        lines.append(f"\n{name}: {'refused' if row['holds'] else '**not refused**'}: {row['got'][:200]}")
    for name, found in verdict["audits"].items():
        lines.append(
            f"\n{name}: of {found['rows']:,} rows scored again in tiles of {found['budget_bytes'] >> 20} MiB, "
            f"{found['parted']} chose other pools ({found['unequal']} of them with other scores); {found['tied']} had "
            f"equal scores at the edge; {found['scores_parted']} of {found['scores']:,} scores differ from one tile's"
        )
    for name, found in verdict["traces"].items():
        parted = ", ".join(f"{module} ({count})" for module, count in list(found["parted"].items())[:8])
        lines.append(
            f"\n{name}: other bits for the same input in {parted or 'no module'}; first {found['first']}"
        )
    for name, error in verdict["errors"].items():
        lines.append(f"\n{name}: **failed**: {error[:300]}")
    lines.append("\nNot run: " + (", ".join(verdict["not_run"]) or "nothing"))
    return "\n".join(lines) + "\n"


def _cell(part: dict[str, Any] | None) -> str:
    if part is None:
        return "-"
    if part["bits"]:
        return "equal bit for bit"
    if part["top1"] is None:
        return f"max {part['worst']:.2g}"
    interval = f"[{part['top1_low'] * 100:.2f}, {part['top1_high'] * 100:.2f}]"
    kl = f"{part['kl']:.2e}"
    if part["kl_low"] is not None:
        kl += f" [{part['kl_low']:.1e}, {part['kl_high']:.1e}]"
    # What differs from a late position on was one event there, which everything behind it then saw.
    late = (
        f"; equal bit for bit up to position {part['first_position']}"
        if (part["first_position"] or 0) > 64
        else ""
    )
    return f"{part['top1'] * 100:.2f} % {interval}, KL {kl}{late}"
