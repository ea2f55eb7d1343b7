"""Names from files as a terminal may show them: a control character would clear the screen or forge a line."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` with what is not printable escaped as Python writes it; line feeds stay."""
    return "".join(sign if sign.isprintable() or sign == "\n" else ascii(sign)[1:-1] for sign in text)
