"""The recipes of recipes/ are what `init` drafts from layouts of the true size, and those are the published ones."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest

from shardmill.pipeline.recipe import read as recipes
from tests.pipeline.init.layouts import MODELS, tensors
from tests.pipeline.init.redraft import DRAFTED, RECIPES, redraft

# Tensors and elements by dtype as the hub publishes them of each model (`safetensors.parameters`), but for
# Kimi-Linear, whose figures were not found: its layout rests on its config and modelling code alone.
PUBLISHED = {
    "llama-3.1-8b": {"BF16": 8_030_261_248},
    "qwen3-8b": {"BF16": 8_190_735_360},
    "qwen3-30b-a3b": {"BF16": 30_532_122_624},
    "deepseek-v3": {"BF16": 3_918_786_560, "F8_E4M3": 680_571_043_840, "F32": 41_555_600},
    "glm-4.5-air": {"BF16": 110_468_818_944, "F32": 5_888},
}

# recipe -> tensor bytes of the child, weights that convert, sizes at which it loads
COMES_TO = {
    "llama-3.1-8b-fp8": (9_082_904_576, 224, (1, 2, 4, 8)),
    "qwen3-8b-fp8": (9_437_399_040, 252, (1, 2, 4, 8)),
    "qwen3-30b-a3b-fp8": (31_174_545_408, 18_624, (1, 2)),
    "deepseek-v3-bf16": (1_368_979_721_216, 45_808, (1, 2, 4, 8)),
    "kimi-linear-48b-a3b-fp8": (50_545_147_328, 20_083, (1, 2, 4, 8)),
    "glm-4.5-air-fp8": (113_171_413_760, 17_990, (1,)),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_layout_has_the_published_number_of_elements_of_each_dtype(model: str) -> None:
    elements: Counter[str] = Counter()
    for _, dtype, shape in tensors(MODELS[model]):
        elements[dtype] += prod(shape)
    assert elements == PUBLISHED[model]


@pytest.mark.parametrize("name", DRAFTED)
def test_a_recipe_is_what_init_drafts_and_plans_at_true_size(name: str) -> None:
    made = redraft(name)
    assert (RECIPES / f"{name}.toml").read_text() == made.text
    assert recipes.load(RECIPES / f"{name}.toml").name == name
    sizes = tuple(at.tensor_parallel for at in made.plan.loads if at.reason is None)
    assert (made.plan.tensor_bytes, len(made.plan.conversions), sizes) == COMES_TO[name]
    assert made.unknown == ()


def test_every_recipe_is_tested() -> None:
    drafted = {
        path.stem for path in RECIPES.glob("*.toml") if "drafted by `shardmill init`" in path.read_text()
    }
    assert drafted == set(DRAFTED) == set(COMES_TO)
