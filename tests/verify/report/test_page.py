"""The page and the card as texts: self-contained, whole, safe against hostile names, usable without eyes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib", reason="the report's figures need the extra `report`")
pytest.importorskip("jinja2", reason="the report needs the extra `report`")

from shardmill.verify.report.facts import Error, Facts
from shardmill.verify.report.heatmap import cells, heat
from shardmill.verify.report.page import (
    NAMES_SHOWN_MAX,
    done_why,
    error_range,
    heat_top,
    render_card,
    render_page,
    told_findings,
)
from tests.verify.report.real import FINDINGS

VOID = {"meta", "link", "input", "wbr", "br"}


class Outline(HTMLParser):
    """What a reader without eyes or a network gets: elements, ids, references, and whether tags nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.refers: set[str] = set()
        self.loads: list[str] = []
        self.figures: list[dict[str, str | None]] = []
        self.svgs: list[dict[str, str | None]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        at = dict(attrs)
        self.count[tag] += 1
        self.ids.update([at["id"]] if at.get("id") else [])
        self.refers.update((at.get("aria-labelledby") or "").split())
        if (at.get("href") or "").startswith("#"):
            self.refers.add((at["href"] or "")[1:])
        elif tag in ("link", "img", "script", "iframe") and (at.get("href") or at.get("src")):
            self.loads.append(str(at.get("href") or at.get("src")))
        if tag == "figure":
            self.figures.append(at)
        if tag == "svg":
            self.svgs.append(at)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(facts: Facts) -> str:
    return render_page(facts)


def test_every_element_is_closed_and_every_reference_meets_one_id(page: str, real_page: str) -> None:
    for text in (page, real_page):
        outline = Outline(text)
        assert outline.open == []
        assert [name for name, times in outline.ids.items() if times > 1] == []
        assert outline.refers <= set(outline.ids)


def test_the_page_fetches_nothing(page: str) -> None:
    """No address in it is followed, and its own policy forbids what a mistake could add."""
    assert Outline(page).loads == ["data:,"]
    assert "default-src 'none'" in page
    assert "url(" not in page.replace("url(#", "")
    assert "@import" not in page


def test_every_figure_has_a_caption_and_its_numbers_in_words(page: str, facts: Facts) -> None:
    """Figures are hidden from screen readers, since captions and tables beside them say the same."""
    outline = Outline(page)
    assert len(outline.figures) == outline.count["figcaption"] == 4
    assert all(figure["role"] == "group" and figure["aria-labelledby"] for figure in outline.figures)
    assert all(svg["aria-hidden"] == "true" for svg in outline.svgs)
    table = page[page.index("The same as a table") :]
    for family in facts.families:
        for at in family.layers:
            assert f"{100 * (at.error.stored or 0):.3f}" in table


def test_figures_take_their_colours_from_the_page(page: str) -> None:
    """None is written into them, so that light, dark and paper each have their own."""
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        assert set(re.findall(r"#[0-9a-fA-F]{3,8}\b", svg.replace('href="#', ""))) <= set()
        assert "var(--" in svg


def test_hostile_names_are_shown_and_do_nothing(page: str, facts: Facts) -> None:
    """Angle brackets, ampersands, dollars and bars are letters here."""
    assert "norms &lt;b&gt;&amp;" in page
    assert "vectors: &lt;i&gt;no&lt;/i&gt; Linear" in page
    assert "<h1>small | $mall</h1>" in page
    assert "<b>" not in page
    assert "`small | $mall`" in render_card(facts)


def test_any_family_name_can_be_drawn(changed: Callable[..., Facts], facts: Facts) -> None:
    """Also one that the font has no letters for, or UTF-8 no bytes; a table of the card stays a table."""
    first, *others = facts.families
    name = "\ud800\x00\x1b[1m漢|$x_1$\n<script>alert(1)</script>"
    odd = changed(families=(replace(first, name=name), *others))
    page = render_page(odd)
    assert Outline(page).open == []
    assert page.count("<script>") == 1
    page.encode(errors="backslashreplace")
    rows = [line for line in render_card(odd).splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


def test_an_error_that_is_no_number_is_told_as_the_worst(changed: Callable[..., Facts], facts: Facts) -> None:
    """JSON has no word for it, so it is None; the table sorts it behind every number."""
    nothing = Error(None, None, None, 4, None, None, None, None, None, None, 0, 0)
    first, *others = facts.weights
    family, *families = facts.families
    layers = tuple(replace(at, error=nothing) for at in family.layers)
    page = render_page(
        changed(
            weights=(replace(first, error=nothing), *others),
            families=(replace(family, error=nothing, worst=None, layers=layers), *families),
        )
    )
    assert Outline(page).open == []
    assert page.count('data-sort="Infinity">–') == 3


def test_what_was_left_out_renamed_or_repaired_is_listed_up_to_a_limit(changed: Callable[..., Facts]) -> None:
    dropped = tuple(f"gone.{n:03}.weight" for n in range(NAMES_SHOWN_MAX + 5))
    repairs = tuple(
        {"repair": "reconcile/1", "tensor": f"t{n}", "error_before_ppm": 1000 * n} for n in (9, 800)
    )
    odd = changed(dropped=dropped, renamed={"a.b": "c<d"}, repairs=repairs)
    page = render_page(odd)
    assert Outline(page).open == []
    assert f"Left out: {NAMES_SHOWN_MAX + 5} tensors" in page
    assert page.count("gone.<wbr>") == NAMES_SHOWN_MAX
    assert "<code>a.<wbr>b</code> → <code>c&lt;d</code>" in page
    assert "repair: <code>reconcile/1</code>, tensor: <code>t800</code>" in page
    assert "- reconcile/1: 2; error before 0.900 % to 80.000 %" in render_card(odd)
    assert f"{NAMES_SHOWN_MAX + 5} tensors of the parent are left out and 1 renamed" in render_card(odd)


def test_a_checkpoint_that_converts_nothing_is_told_so(changed: Callable[..., Facts], facts: Facts) -> None:
    kept = tuple(family for family in facts.families if not family.numerics)
    page = render_page(changed(families=kept, weights=(), worst=()))
    assert Outline(page).open == []
    assert "Nothing: every tensor is the parent's." in page
    assert "No weight here has another form in the parent" in page
    assert "No weight was converted." in page


def test_without_a_parent_the_page_says_what_it_leaves_out(facts_alone: Facts) -> None:
    page = render_page(facts_alone)
    assert "No parent was given" in page
    assert 'id="errors"' not in page
    assert 'id="worst"' not in page
    assert "not measured" in page
    assert "no error is given" in render_card(facts_alone)


def test_kept_families_stand_with_their_reasons(real: Facts, real_page: str) -> None:
    kept = [family for family in real.families if not family.numerics]
    assert len(kept) == 11
    for family in kept:
        assert family.reason
        assert f">{family.name}</th>" in real_page
        assert family.reason.replace("'", "&#39;") in real_page
        assert family.reason in render_card(real)


def test_the_card_holds_the_published_figures_of_the_real_layout(real: Facts) -> None:
    """Tensors, bytes and files of the real conversion, from its headers."""
    card = render_card(real)
    assert "549 weights were converted. Weight files: 47 rewritten, 74 passed on" in card
    assert "Tensor data: 186,129,041,784 bytes (173.35 GiB), the parent's 194,644,952,184" in card
    assert "; 150,775 tensors." in card
    assert "| KDA q/k/v + b/f_a/g_a | [32,32] | amax/1 | 204 | 6.46 GiB | 3.24 GiB |" in card
    assert "| recover/1 | 36 | 768.0 MiB | 384.1 MiB | 0.151 % | 0 % | 2.565 % | 24,576 of 24,576 |" in card


def test_exact_layers_have_a_colour_of_their_own(real: Facts) -> None:
    measured = [family for family in real.families if family.layers]
    svg = heat(measured, "stored", heat_top(measured), "wide")
    assert sum(cell.exact for cell in cells(measured, "stored").values()) == 12 + 46
    assert len(re.findall(r"fill: var\(--exact\)", svg)) == 12 + 46
    assert svg.count(", the parent&#x27;s bits") == 12 + 46
    assert not any(cell.exact for cell in cells(measured, "served").values())
    assert svg.count("<title>") == sum(len(family.layers) for family in measured)


def test_the_page_of_the_real_layout_is_small_and_lists_converted_weights_alone(
    real: Facts, real_page: str
) -> None:
    """150,775 tensors are summed up; 549 rows and the first findings of each rule are shown."""
    assert real.tensors == 150_775
    table = real_page[real_page.index('<table id="weights">') :]
    assert Outline(real_page).count["tr"] < 1000
    assert table.count("<tr>") == 1 + 549
    assert f"The first 20 of {FINDINGS:,}" in real_page
    assert len(real_page.encode()) < 1_500_000


def test_what_was_done_stands_before_the_reason_where_it_is_not_keeping(facts: Facts) -> None:
    family = facts.families[-1]
    assert done_why(replace(family, action="keep", reason="small")) == "small"
    assert done_why(replace(family, action="drop", reason="text only")) == "drop: text only"
    assert done_why(replace(family, action="reconcile", reason=None)) == "reconcile"


def test_ranges_and_counts_read_as_sentences(real: Facts) -> None:
    converted = [family for family in real.families if family.numerics]
    assert error_range([], "stored") == ""
    assert error_range(converted[:1], "stored") == f"{100 * (converted[0].error.stored or 0):.3f}\u00a0%"  # type: ignore[union-attr]
    assert error_range(converted, "stored").startswith("0.15")
    assert told_findings(()) == ["clean", "no findings"]
    assert told_findings(real.lint.rules) == [f"{FINDINGS:,} warnings"]
