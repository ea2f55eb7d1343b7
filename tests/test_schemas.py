"""Every schema in docs/schemas is a schema, names its own form, and allows no key that it does not describe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.schemas import SCHEMAS

FILES = sorted(SCHEMAS.glob("*.json"))


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """The parts of a schema that describe an object with named keys."""
    if isinstance(schema, dict):
        if "properties" in schema:
            yield schema
        for part in schema.values():
            yield from objects(part)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_a_schema_is_closed_and_says_its_form(file: Path) -> None:
    schema = json.loads(file.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    name, _, version = file.stem.rpartition("-")
    assert schema["properties"]["format"] == {"const": f"shardmill/{name}/{version}"}
    assert "format" in schema["required"]
    assert all(part["additionalProperties"] is False for part in objects(schema))


def test_every_schema_is_listed_in_the_documentation() -> None:
    page = (SCHEMAS.parent / "json.md").read_text()
    assert all(f"schemas/{file.name}" in page for file in FILES)
