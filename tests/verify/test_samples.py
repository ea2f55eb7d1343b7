"""Samples are drawn from the system's randomness and say their seed, which replays them; exit codes are the docs'."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardmill.verify.commands.group import verify
from tests.verify.zoo.clean import mixed_child, nvfp4_parent
from tests.verify.zoo.model import patch
from tests.verify.zoo.published import PUBLISHED, parent

SAMPLED = (
    ("reproduce", "--parent", "P", "--blocks", "5"),
    ("all", "--parent", "P"),
    ("origin", "--parent", "P"),
    ("lint", "--sample", "64"),
)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A child in block FP8 and NVFP4 with a manifest, and its parent."""
    mixed_child().write(tmp_path / "child")
    nvfp4_parent().write(tmp_path / "parent")
    return tmp_path


def _ask(folder: Path, question: str, *more: str) -> Result:
    words = [str(folder / "parent") if word == "P" else word for word in more]
    return CliRunner().invoke(verify, [question, str(folder / "child"), *words])


def _seed(facts: Any) -> int | None:
    if not isinstance(facts, dict):
        return None
    own = [facts["seed"]] if "seed" in facts else []
    return next((seed for seed in (*own, *map(_seed, facts.values())) if seed is not None), None)


@pytest.mark.parametrize("asked", SAMPLED, ids=lambda asked: asked[0])
def test_a_sample_says_its_seed_in_text_and_json_and_draws_another_each_time(
    pair: Path, asked: tuple[str, ...]
) -> None:
    if asked[0] == "origin":  # which tries formulas where no manifest says them
        (pair / "child" / "shardmill.manifest.json").unlink()
    shown = _ask(pair, *asked)
    assert re.search(r"\bseed\b.*\d{3,}", shown.output), shown.output
    seeds = [_seed(json.loads(_ask(pair, *asked, "--json").stdout)["facts"]) for _ in range(2)]
    assert None not in seeds
    assert seeds[0] != seeds[1]
    again = [_ask(pair, *asked, "--json", "--seed", str(seeds[0])).stdout for _ in range(2)]
    assert again[0] == again[1]


CODES = (  # question, what follows, exit code of a clean pair
    ("integrity", (), 0),
    ("integrity", ("--parent", "P"), 0),
    ("lint", (), 0),
    ("lint", ("--tp", "0"), 2),
    ("lint", ("--select", "nothing-of-this-name"), 2),
    ("loads", ("--loader", "nobody"), 2),
    ("all", ("--parent", "P"), 0),
    ("all", ("--parent", "P", "--strict"), 1),
    ("all", ("--parent", "nowhere"), 2),
    ("roundtrip", ("--parent", "P"), 0),
    ("roundtrip", (), 2),
    ("reproduce", ("--parent", "P", "--all"), 0),
    ("reproduce", ("--parent", "P", "--blocks", "0"), 2),
    ("reproduce", ("--parent", "P", "--numerics", "mine/1"), 2),
    ("diff", ("P",), 1),
    ("signature", ("--public-key", "nowhere.pem"), 2),
    ("no-such-question", (), 2),
)


@pytest.mark.parametrize(("question", "more", "code"), CODES, ids=lambda value: str(value)[:40])
def test_exit_codes_are_those_of_the_docs(
    pair: Path, question: str, more: tuple[str, ...], code: int
) -> None:
    """0 done, 1 findings or an unasked question under --strict, 2 usage."""
    result = _ask(pair, question, *more)
    assert (result.exit_code, "Traceback" in result.output) == (code, False), result.output


@pytest.mark.parametrize("question", ["integrity", "lint", "all", "roundtrip", "reproduce"])
def test_a_fault_is_an_exit_of_1_in_every_question_that_sees_it(tmp_path: Path, question: str) -> None:
    model = next(one for one in PUBLISHED if one.name == "block fp8").model()
    patch(model["model.layers.0.self_attn.q_proj.weight_scale_inv"], 0, b"\0\0\xc0\x7f")
    model.write(tmp_path / "child")
    parent(False).write(tmp_path / "parent")
    more = ("--parent", "P") if question in ("roundtrip", "reproduce") else ()
    more += ("--numerics", "amax/1") if question == "reproduce" else ()
    assert _ask(tmp_path, question, *more).exit_code == 1
