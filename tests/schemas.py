"""What `--json` prints, held to the published schema of the form that it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

SCHEMAS = Path(__file__).parents[1] / "docs" / "schemas"


def held(text: str) -> Any:
    """The object in `text`, which must be valid by docs/schemas/NAME-VERSION.json of its `format`."""
    said = json.loads(text)
    maker, name, version = said["format"].split("/")
    assert maker == "shardmill"
    jsonschema.validate(said, json.loads((SCHEMAS / f"{name}-{version}.json").read_text()))
    return said
