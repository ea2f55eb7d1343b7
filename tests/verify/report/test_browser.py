"""The page of the real layout in headless Chromium: quick, quiet, within the window, and usable by keyboard."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verify.report.browser import CHROMIUM, DARK, LIGHT, chromium, console, probe

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def page(real_page: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(real_page)
    return path


def loading_ms(page: Path, folder: Path) -> float:
    """From setting a frame's address to its load event, in real time."""
    outer = folder / "timer.html"
    outer.write_text(
        f"""<body><script>
        const frame = document.body.appendChild(document.createElement("iframe"));
        frame.width = 1200; frame.height = 900;
        const began = performance.now();
        frame.onload = () => {{ document.title = performance.now() - began; }};
        frame.src = "{page.as_uri()}";
        </script>"""
    )
    document, errors = chromium(outer, "--dump-dom")
    assert console(errors) == []
    return float(document.partition("<title>")[2].partition("</title>")[0])


def test_the_full_size_page_loads_without_a_word_on_the_console(page: Path, tmp_path: Path) -> None:
    """Its load event comes; how long it took is printed and not judged, since machines are shared."""
    print(f"loaded in {loading_ms(page, tmp_path):.0f} ms")


def test_sorting_and_filtering_work_by_keyboard(page: Path, tmp_path: Path) -> None:
    """Heads are buttons; the filter takes words in any order and says how many rows are left."""
    told = probe(
        page,
        """
        const table = document.getElementById("weights"), filter = document.getElementById("filter");
        const column = [...table.tHead.rows[0].cells].findIndex((head) => head.textContent === "Served");
        const button = table.tHead.rows[0].cells[column].querySelector("button");
        const values = () => [...table.tBodies[0].rows].map((row) => Number(row.cells[column].dataset.sort));
        button.focus();
        const focused = document.activeElement === button;
        button.click();
        const up = values(), sorted = table.tHead.rows[0].cells[column].getAttribute("aria-sort");
        button.click();
        const down = values();
        filter.value = "Q_A_proj layers.3. ";
        filter.dispatchEvent(new Event("input"));
        const left = [...table.tBodies[0].rows].filter((row) => row.checkVisibility());
        const stops = [...document.querySelectorAll(".scroll, .tall")].every((box) => box.tabIndex === 0);
        const names = left.map((row) => row.cells[0].textContent);
        return { focused, up, down, sorted, stops, names, told: document.getElementById("told").textContent };
        """,
        tmp_path,
    )
    assert told["focused"]
    assert told["stops"]
    assert told["sorted"] == "ascending"
    assert told["up"] == sorted(told["up"])
    assert told["down"] == sorted(told["down"], reverse=True)
    assert len(told["up"]) == 549
    assert told["names"] == ["model.language_model.layers.3.self_attn.q_a_proj.weight"]
    assert told["told"] == "1 of 549 weights"


GEOMETRY = """
    const shown = (element) => element.checkVisibility();
    document.querySelectorAll("details").forEach((each) => { each.open = true; });
    const pixels = (text) => {
      const to = text.getScreenCTM();
      return parseFloat(getComputedStyle(text).fontSize) * Math.hypot(to.a, to.b);
    };
    const texts = [...document.querySelectorAll("svg text")].filter(shown);
    return {
      inner: innerWidth, scroll: document.documentElement.scrollWidth,
      narrow: [...document.querySelectorAll(".narrow")].filter(shown).length,
      wide: [...document.querySelectorAll(".wide")].filter(shown).length,
      letters: Math.min(...texts.map(pixels)),
      paper: getComputedStyle(document.querySelector("section")).backgroundColor,
      ink: getComputedStyle(texts[0]).fill,
    };
"""


def test_a_phone_sees_everything_without_scrolling_sideways(page: Path, tmp_path: Path) -> None:
    """At 400 px nothing is wider than the window, opened parts included, and letters in figures stay legible."""
    seen = probe(page, GEOMETRY, tmp_path, width=400)
    assert seen["inner"] == 400
    assert seen["scroll"] <= 400
    assert (seen["narrow"], seen["wide"]) == (4, 0)
    assert seen["letters"] >= 8.5


def test_light_and_dark_have_their_own_colours_in_figures_too(page: Path, tmp_path: Path) -> None:
    light = probe(page, GEOMETRY, tmp_path, scheme=LIGHT)
    dark = probe(page, GEOMETRY, tmp_path, scheme=DARK)
    assert (light["paper"], light["ink"]) == ("rgb(255, 255, 255)", "rgb(26, 32, 39)")
    assert (dark["paper"], dark["ink"]) == ("rgb(22, 27, 33)", "rgb(228, 233, 239)")
    assert (light["narrow"], light["wide"]) == (0, 4)
    assert light["letters"] >= 9.5
