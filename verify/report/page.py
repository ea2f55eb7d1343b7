"""The report's two texts, rendered from Facts alone: one self-contained HTML page and a Markdown section for a card.

The page fetches nothing: style, script and figures stand inside it, and its own policy forbids the rest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from shardmill.verify.report import heatmap, plots
from shardmill.verify.report.canvas import SIZES
from shardmill.verify.report.facts import Facts, Family, RuleFindings, Weight
from shardmill.verify.report.histogram import shares
from shardmill.verify.report.units import SPACE, change, count, human, percent
from shardmill.verify.rules.findings import printable

CHARS_MAX = 500  # of a text that the manifest gives
NAMES_SHOWN_MAX = 200  # of dropped and renamed tensors; report.json has them all


def render_page(facts: Facts) -> str:
    """The HTML page, with figures where there is something to draw."""
    converted = _converted(facts)
    measured = [family for family in converted if family.layers]
    top = heat_top(measured)
    figures = {"whole": _both_sizes(plots.whole, facts), "sizes": "", "stored": "", "served": "", "scale": ""}
    if converted:
        figures["sizes"] = _both_sizes(plots.sizes, converted)
    if measured:
        figures["stored"] = _both_sizes(heatmap.heat, measured, "stored", top)
        figures["served"] = _both_sizes(heatmap.heat, measured, "served", top)
        figures["scale"] = Markup(heatmap.scale(top))
    return (
        _environment(True)
        .get_template("report.html.j2")
        .render(
            **_common(facts),
            figures=figures,
            measured=measured,
            worst=_worst(facts),
            layers=_layers(measured),
        )
    )


def render_card(facts: Facts) -> str:
    """A section in Markdown for the checkpoint's model card."""
    card = _environment(False).get_template("card.md.j2").render(**_common(facts))
    return card.replace(SPACE, " ")


def _environment(is_html: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader("shardmill.verify.report"),
        autoescape=is_html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"human": human, "percent": percent, "count": count, "change": change}
    environment.filters |= {"breakable": breakable, "cell": cell, "code": code, "done_why": done_why}
    return environment


def _common(facts: Facts) -> dict[str, Any]:
    converted = _converted(facts)
    return {
        "facts": facts,
        "converted": converted,
        "kept": [family for family in facts.families if family not in converted and family.tensors],
        "kinds": Counter(file.kind for file in facts.files),
        "stored": error_range(converted, "stored"),
        "served": error_range(converted, "served"),
        "exact": exact_blocks(converted),
        "repairs": told_repairs(facts.repairs),
        "names_shown_max": NAMES_SHOWN_MAX,
        "findings": told_findings(facts.lint.rules),
    }


def _converted(facts: Facts) -> list[Family]:
    return [family for family in facts.families if family.numerics]


def told_findings(rules: Iterable[RuleFindings]) -> list[str]:
    """Findings by severity, the worst first: ['1 error', '12 warnings']; what is clean or all but clean says so."""
    totals: Counter[str] = Counter()
    for rule in rules:
        totals[rule.severity] += rule.count
    plurals = {"error": "errors", "warning": "warnings", "info": "notes"}
    told = [
        f"{count(totals[name])} {plural[:-1] if totals[name] == 1 else plural}"
        for name, plural in plurals.items()
        if totals[name]
    ]
    return told if totals["error"] or totals["warning"] else ["clean", *(told or ["no findings"])]


def told_repairs(repairs: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for each kind of repair: how many, and the range of each number in parts per million."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for repair in repairs:
        kinds.setdefault(str(repair.get("repair")), []).append(repair)
    return [f"{kind}: {count(len(group))}{_ranges(group)}" for kind, group in sorted(kinds.items())]


def _ranges(group: list[Mapping[str, Any]]) -> str:
    told = ""
    for key in sorted(key for key in group[0] if key.endswith("_ppm")):
        numbers = [repair[key] / 1_000_000 for repair in group if type(repair.get(key)) is int]
        if not numbers:
            continue
        name = key.removesuffix("_ppm").replace("_", " ")
        told += f"; {name} {percent(min(numbers))} to {percent(max(numbers))}"
    return told


def done_why(family: Family) -> str:
    """The reason of a family that was not converted, after what was done if that is not keeping it."""
    done = [] if family.action == "keep" and family.reason else [family.action]
    return ": ".join([*done, *([family.reason] if family.reason else [])])


def error_range(families: Iterable[Family], kind: str) -> str:
    """The smallest and largest error of the families, `stored` or `served`: '0.164–2.650 %'; '' if none is known."""
    errors = [getattr(family.error, kind) for family in families if family.error is not None]
    known = sorted(error for error in errors if error is not None)
    if not known:
        return ""
    low, high = percent(known[0]), percent(known[-1])
    return high if low == high else f"{low.removesuffix(f'{SPACE}%')}–{high}"


def exact_blocks(families: Iterable[Family]) -> tuple[int, int] | None:
    """(exact, all) blocks of the families whose numerics count them; None where none do."""
    counted = [family for family in families if family.exact_blocks is not None]
    if not counted:
        return None
    return sum(family.exact_blocks or 0 for family in counted), sum(family.blocks or 0 for family in counted)


def heat_top(families: Iterable[Family]) -> float:
    """The error at the end of the heat maps' colours: the largest one, rounded up to a half percent."""
    errors = (
        error
        for family in families
        for at in family.layers
        for error in (at.error.stored, at.error.served)
        if error is not None
    )
    return (int(max(errors, default=0.0) * 200) + 1) / 200


def breakable(name: str) -> Markup:
    """A dotted name that may be broken after each dot."""
    return Markup("<wbr>").join(escape(part) for part in _parts(name))


_MARKDOWN = re.compile(r"([\\`*\[\]|]|(?<!\w)_|_(?!\w)|^[#>+-])")


def cell(text: object) -> str:
    """The text as it may stand anywhere in Markdown: one line, no link, no tag, no heading, no end of a cell."""
    one_line = " ".join(printable(" ".join(str(text).split()), CHARS_MAX).split())
    return _MARKDOWN.sub(r"\\\1", one_line).replace("<", "&lt;")


def code(text: object) -> str:
    """The text as a span of code; as escaped text where it holds what could end the span, or looks like more."""
    plain = str(text)
    fits = plain and plain.isprintable() and not any(sign in plain for sign in ("`", "<", "]("))
    return f"`{plain[:CHARS_MAX]}`" if fits else cell(text)


def _parts(name: str) -> list[str]:
    parts = name.split(".")
    return [f"{part}." for part in parts[:-1]] + parts[-1:]


def _both_sizes(draw: Any, *what: Any) -> Markup:
    drawn = (f'<div class="{size}">{draw(*what, size)}</div>' for size in SIZES)
    return Markup("".join(drawn))


def _worst(facts: Facts) -> list[Mapping[str, Any]]:
    weights: dict[str, Weight] = {weight.name: weight for weight in facts.weights}
    return [
        {
            "weight": weights[shown.name],
            "figure": Markup(plots.histogram(shown, weights[shown.name].rerounded, f"worst-{place}")),
            "untouched": shares(shown.stored)[0],
        }
        for place, shown in enumerate(facts.worst)
    ]


def _layers(families: Iterable[Family]) -> list[Mapping[str, Any]]:
    """The heat maps as a table: a row for each layer, in it (stored, served) of each family or None."""
    families = list(families)
    found = {(family.name, at.layer): at.error for family in families for at in family.layers}
    numbers = sorted({layer for _, layer in found if layer is not None})
    order: list[int | None] = [*numbers, *([None] if any(layer is None for _, layer in found) else [])]
    return [
        {
            "layer": "other" if layer is None else str(layer),
            "errors": [found.get((family.name, layer)) for family in families],
        }
        for layer in order
    ]
