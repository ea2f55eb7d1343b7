"""The longest context that vLLM 0.33.0 starts with: asked of it at this length, and refused by it at one more."""

from __future__ import annotations

import pytest

from shardmill.verify.fit.shape import read_shape
from tests.runtime_patch.vllm.fit_published import CONFIGS

LLAMA = CONFIGS["Llama-3.1-8B"]


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("Llama-3.1-8B", 131_072),
        ("Mistral-7B-v0.1", 32_768),
        ("Qwen3-8B-yarn", 40_960),  # YaRN's factor of 4 is not applied again
        ("DeepSeek-V3", 163_840),
        ("gpt-oss-20b", 131_072),
        (
            "gemma-3-27b",
            131_072,
        ),  # of the class: config.json names none, and its linear factor of 8 is counted in
        ("Kimi-Linear-48B", 1_048_576),  # its key is model_max_length
    ],
)
def test_the_longest_context_of_a_published_model(name, longest):
    assert read_shape(CONFIGS[name]).max_position == longest


@pytest.mark.parametrize(("key", "kind"), [("rope_scaling", "type"), ("rope_parameters", "rope_type")])
def test_a_linear_factor_lengthens_it(key, kind):
    config = {
        **LLAMA,
        "rope_scaling": None,
        "max_position_embeddings": 4096,
        key: {kind: "linear", "factor": 4.0},
    }
    assert read_shape(config).max_position == 16_384


def test_a_model_that_names_no_length_but_model_max_length_has_that():
    silent = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    assert read_shape(silent | {"model_max_length": 5000}).max_position == 5000
