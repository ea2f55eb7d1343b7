"""A value of config.json that is of another kind than expected is never a traceback, whatever the field."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.lint import LintOptions, lint
from shardmill.verify.questions.loads import loads
from shardmill.verify.questions.unasked import UnaskedError
from tests.verify.memory import Memory
from tests.verify.mutants import files_of
from tests.verify.zoo.published import PUBLISHED

ODD: tuple[Any, ...] = ([128, 128], {"a": []}, "x", True)
MODELS = ("block fp8", "ct nvfp4 w4a4")


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in rows:
        yield (*path, key)
        yield from _places(inner, (*path, key))


def _with(config: dict[str, Any], place: tuple[Any, ...], value: Any) -> bytes:
    changed = copy.deepcopy(config)
    inner: Any = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return json.dumps(changed).encode()


@pytest.mark.parametrize("name", MODELS)
def test_no_field_of_the_config_can_hold_what_ends_in_a_traceback(name: str) -> None:
    model = next(one for one in PUBLISHED if one.name == name).model()
    files, config = files_of(model), model.config
    assert config is not None
    asked = 0
    for place in _places(
        config if name == MODELS[0] else {"quantization_config": config["quantization_config"]}
    ):
        for odd in ODD:
            source = Memory({**files, "config.json": _with(config, place, odd)})
            for question in (
                lambda s: integrity(s, read_data=False),
                lambda s: lint(s, LintOptions(read_data=False)),
                lambda s: loads(s, beside=True),
            ):
                try:
                    asked += bool(question(source).question)
                except UnaskedError:
                    asked += 1
    assert asked > 150
