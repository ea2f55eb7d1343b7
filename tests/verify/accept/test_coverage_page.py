"""The page of docs on how often gates pass: whole, within what is claimed, and what docs advise is what it holds."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("scipy", reason="the gates need the extra `accept`")

from tests.verify.accept.coverage import ALLOWED, CORRELATIONS, DOCUMENTS, better, claims
from tests.verify.accept.coverage_page import (
    BETTER_CORRELATIONS,
    PAGE,
    Cell,
    better_table,
    cells,
    enough,
    limit_tables,
    measure,
    worst,
)

TEXT = PAGE.read_text(encoding="utf-8")
ADVICE = (PAGE.parent / "verify-accept.md").read_text(encoding="utf-8")


def rows(after: str) -> list[list[str]]:
    lines = TEXT.partition(after)[2].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_holds_every_gate_and_no_cell_beyond_what_is_allowed():
    for claim in claims():
        found = rows(f"| {claim.name} |")
        assert [row[0] for row in found] == [f"{count} documents" for count in DOCUMENTS]
        assert all(float(cell) <= 100 * ALLOWED for row in found for cell in row[1:])


def test_the_page_holds_every_better_server():
    held = [row[:3] for row in rows("| gate | true value |")]
    asked = [
        [good.name, f"{truth:g}", f"{c:g}"]
        for good in better()
        for truth in good.truths
        for c in BETTER_CORRELATIONS
    ]
    assert held == asked


def test_the_advice_in_docs_is_that_of_the_page():
    """`24 / 96 / 320` are the documents for nine runs of ten at the three correlations."""
    short = {"agreement": "top1_agreement", "confident flips": "confident_flips", "mean KL": "mean_kl",
             "draft acceptance": "mtp_acceptance"}  # fmt: skip
    held = {(row[0], row[1]): [] for row in rows("| gate | true value |")}
    for row in rows("| gate | true value |"):
        held[row[0], row[1]].append(row[-1])
    gate, seen = "", 0
    for line in re.findall(r"^\| (.*?) ?\| ([\d.]+) \| (.* / .* / .*) \|$", ADVICE, re.MULTILINE):
        gate = line[0].strip() or gate
        name, sign, limit = re.fullmatch(r"(.*) ([<>]=) (.*)", gate).groups()
        assert line[2].split(" / ") == held[f"{short[name]} {sign} {limit}", line[1]]
        seen += 1
    assert seen == 8


def test_tables_are_written_of_any_numbers():
    found = {cell: 0.5 if cell.documents > 20 else 0.0 for cell in cells()}
    assert worst(found) == 0.5
    assert sum(line.startswith("| 24 documents | 50 | 50") for line in limit_tables(found)) == len(
        list(claims())
    )
    assert list(better_table(found))[2].endswith("| more than 320 |")
    assert (enough([0, 1, 0.8, 0.9, 1, 1, 1]), enough([1] * 7)) == ("64", "10")


def test_a_cell_is_measured_by_the_gates_own_code():
    agree = next(claims()).name
    assert measure(Cell("limit", agree, 2, 0.0), 5, 1) == 0
    assert measure(Cell("better", "mean_kl <= 0.05", 24, 0.0, 0.01), 5, 1) == 1
    assert measure(Cell("speed", "decode_c1", 2, 0.0), 5, 1) == 0
    assert len(CORRELATIONS) == 6
