"""Numbers and lists in a config that would make a careless judge count, allocate or match without end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from shardmill.verify.formats.matrices import STRIP_ELEMENTS, Matrix, strips
from shardmill.verify.formats.schemes import Linear
from shardmill.verify.reading.header import Tensor
from tests.verify.fuzz import QUESTIONS, Corpus
from tests.verify.memory import Memory

CORPUS = Corpus()
QUANT = "quantization_config"


def _entries(config: dict[str, Any], group: int) -> None:
    for entry in config[QUANT]["quantized_layers"].values():
        entry["group_size"] = group


@pytest.mark.parametrize(
    "edit",
    [
        lambda c: c["text_config"].update(num_hidden_layers=10**40),
        lambda c: c["text_config"].update(num_hidden_layers=-1, num_nextn_predict_layers=10**30),
        lambda c: c["text_config"].update(n_routed_experts=10**15),
        lambda c: _entries(c, (1 << 32) - 1),
        lambda c: _entries(c, 1),
        lambda c: c[QUANT].update(ignore=["*" * 5_000] * 40_000),
        lambda c: c[QUANT].update(ignore=[f"*a{i}*b{i}*c{i}*" for i in range(40_000)]),
        lambda c: c[QUANT].update(ignore=[f"re:.*{i}.*" for i in range(40_000)]),
        lambda c: c[QUANT].update(ignore=["[" * 400, "[!" + "a" * 400, "?" * 400]),
        lambda c: c[QUANT].update(
            weight_block_size=[1 << 31, 1 << 31], quant_method="fp8", quantized_layers=None
        ),
        lambda c: c[QUANT].update(
            config_groups={"g": {"weights": [], "targets": {}}}, quant_method="compressed-tensors"
        ),
        lambda c: c.update(text_config=[], model_type=["glm5_next"]),
        lambda c: c[QUANT].update(quant_method={}, quant_algo=[], scale_fmt={}),
    ],
)
def test_it_ends_soon_and_in_findings(edit: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads(CORPUS.files["config.json"])
    edit(config)
    source = Memory({**CORPUS.files, "config.json": json.dumps(config).encode()})
    for question in QUESTIONS:
        begin = time.process_time()
        json.loads(question(source, source).as_json())
        assert time.process_time() - begin < 5


def test_a_weight_with_one_scale_is_read_in_strips_too() -> None:
    weight = Tensor("w.weight", "F8_E4M3", (4096, 8192), "f", 0, 4096 * 8192)
    scale = Tensor("w.weight_scale", "F32", (), "f", 0, 4)
    matrix = Matrix(weight, Linear("w", "fp8-tensor", weight, {"weight_scale": scale}), (4096, 8192))
    cut = list(strips(matrix))
    assert all((last - first) * 8192 <= STRIP_ELEMENTS for first, last in cut)
    assert (cut[0][0], cut[-1][1]) == (0, 4096)
