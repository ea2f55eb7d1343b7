"""How a run of the tests ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import pytest_terminal_summary


class _Reporter:
    """Stands in for pytest's own."""

    def __init__(self, skipped: list[str]) -> None:
        self.lines: list[str] = []
        self.stats: dict[str, Any] = {"skipped": [_Report(reason) for reason in skipped]}

    def section(self, title: str, **_: Any) -> None:
        self.lines.append(title)

    def write_line(self, line: str) -> None:
        self.lines.append(line)


class _Report:
    def __init__(self, reason: str) -> None:
        self.longrepr = ("a file", 1, f"Skipped: {reason}")


@pytest.mark.parametrize("count", [1, 90])
def test_what_is_left_out_is_one_line_a_reason(count: int) -> None:
    """However many tests have it; and the way to run them."""
    reporter = _Reporter(["needs numba"] * count + ["needs chromium"])
    pytest_terminal_summary(reporter)
    assert "make test-all" in reporter.lines[0]
    assert [line.split(maxsplit=1) for line in reporter.lines[1:]] == [
        ["1", "needs chromium"],
        [str(count), "needs numba"],
    ]


def test_a_whole_run_says_nothing() -> None:
    """No section where nothing is left out."""
    reporter = _Reporter([])
    pytest_terminal_summary(reporter)
    assert reporter.lines == []
