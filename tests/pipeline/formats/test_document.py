"""docs/formats.md is what the formats say."""

from __future__ import annotations

from shardmill.pipeline.formats.document import PAGE, written


def test_the_table_of_formats_is_todays() -> None:
    """The page holds the table that the formats give; `python -m shardmill.pipeline.formats.document` writes it."""
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page
