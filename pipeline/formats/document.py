"""The table of docs/formats.md, from the formats themselves: `python -m shardmill.pipeline.formats.document`."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

from shardmill.pipeline.formats import formats
from shardmill.pipeline.formats.base import Format, Params
from shardmill.pipeline.types import DTYPE_BITS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "formats.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
_SHAPE = (4096, 4096)  # bits a weight are counted on such a matrix


def table() -> str:
    """Rows of Markdown, one a format."""
    head = "| format | what it is | bits a weight | stored parts | laws | written under | also read as |"
    return "\n".join([head, "|---|---|---:|---|---|---|---|", *map(_row, formats().values())]) + "\n"


def _row(form: Format) -> str:
    written = [each.profile for each in form.spellings if each.entry]
    read = [each.profile for each in form.spellings if not each.entry]
    if form.name == "bf16":
        written, read = ["every profile"], []
    cells = (
        f"`{form.name}`",
        form.title,
        f"{_bits(form):.4g}",
        "<br>".join(_parts(form)),
        "<br>".join(f"`{law}`: {words}" for law, words in form.laws.items()) or "only read",
        ", ".join(written) or "-",
        ", ".join(read) or "-",
    )
    return "| " + " | ".join(cells) + " |"


def _bits(form: Format) -> float:
    parts = form.parts(_SHAPE, Params())
    return sum(DTYPE_BITS[part.dtype] * prod(part.shape) for part in parts) / prod(_SHAPE)


def _parts(form: Format) -> Iterator[str]:
    spelling = form.spellings[0]
    for part in form.stored(_SHAPE, Params(), spelling):
        yield f"`{spelling.ends[part.role]}` {part.dtype} {list(part.shape)}"


def written(page: str) -> str:
    """The page with today's table."""
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    return f"{before}{BEGIN}\n\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
