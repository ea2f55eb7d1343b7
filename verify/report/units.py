"""Numbers for people: bytes, percent, counts."""

from __future__ import annotations

SPACE = "\N{NO-BREAK SPACE}"  # a number and its unit stay on one line


def human(count: int | None) -> str:
    """1536 -> '1.5 KiB'; a dash for what is not known."""
    if count is None:
        return "–"
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            digits = 0 if unit == "B" else 1
            return f"{value:.{digits}f}{SPACE}{unit}"
        value /= 1024
    return f"{value:.2f}{SPACE}GiB"


def percent(value: float | None, digits: int = 3) -> str:
    """A share as percent, with as many digits as `verify roundtrip` prints; a dash for what is not known."""
    if value is None:
        return "–"
    return f"0{SPACE}%" if value == 0 else f"{100 * value:.{digits}f}{SPACE}%"


def count(value: int | None) -> str:
    """150775 -> '150,775'."""
    return "–" if value is None else f"{value:,}"


def change(after: int, before: int) -> str:
    """(100, 200) -> '−50.0 %'."""
    return f"{100 * (after / before - 1):+.1f}{SPACE}%".replace("-", "\N{MINUS SIGN}")
