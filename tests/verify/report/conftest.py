"""A built checkpoint of families with real block sizes, its facts, and the report of the real layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardmill.kernels.formats import E4M3_VALUES, f32_to_bf16
from shardmill.verify.reading.source import Folder
from shardmill.verify.report.facts import Facts
from shardmill.verify.report.gather import gather
from tests.pipeline.parents import Tensor, Tensors, bf16, build, rng, write_parent
from tests.verify.report.real import real_facts

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
RECIPE = """\
format = 1
name = "small | $mall"

[parent]
repository = "nobody/small"
revision = "0123456789abcdef0123456789abcdef01234567"

[[family]]
name = "re-rounded"
match = "model.layers.*.big.weight"
action = "quantize"
block = [128, 128]
expect = 2

[[family]]
name = "native"
match = "model.layers.*.native.weight"
action = "quantize"
block = [128, 128]
numerics = "recover/1"
expect = 1

[[family]]
name = "left alone"
match = ["model.layers.*.little.weight", "lm_head.weight"]
action = "quantize"
block = [32, 32]
expect = 2

[[family]]
name = "norms <b>&"
match = "model.layers.*.norm.weight"
action = "keep"
reason = "vectors: <i>no</i> Linear"
"""


def native(name: str, rows: int, cols: int) -> Tensor:
    """A BF16 copy [rows, cols] of block FP8: codes times one scale a block of [128,128], rounded."""
    drawn = rng(name)
    codes = (
        drawn.integers(0, 127, (rows, cols), dtype=np.uint8)
        | drawn.integers(0, 2, (rows, cols), np.uint8) << 7
    )
    codes[::128, ::128] = 0x7E  # 448: a block uses its whole range
    scales = drawn.uniform(1e-5, 1e-3, (-(-rows // 128), -(-cols // 128))).astype(np.float32)
    values = E4M3_VALUES[codes] * np.kron(scales, np.ones((128, 128), np.float32))[:rows, :cols]
    return "BF16", (rows, cols), f32_to_bf16(values).tobytes()


def small_tensors() -> dict[str, Tensors]:
    """File -> tensors; the second file converts nothing."""
    converted = {
        "lm_head.weight": bf16("head", 40, 64),
        **{f"model.layers.{layer}.big.weight": bf16(f"big{layer}", 192, 256) for layer in range(2)},
        "model.layers.1.little.weight": bf16("little", 64, 70),
        "model.layers.1.native.weight": native("native", 192, 256),
    }
    return {SHARDS[0]: converted, SHARDS[1]: {"model.layers.0.norm.weight": bf16("norm", 8)}}


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(parent, checkpoint). Nobody writes to them."""
    folder = tmp_path_factory.mktemp("small")
    parent = write_parent(folder / "parent", small_tensors())
    build(parent, folder / "out", RECIPE)
    return parent, folder / "out"


@pytest.fixture(scope="session")
def facts(small: tuple[Path, Path]) -> Facts:
    parent, out = small
    return gather(Folder(out), Folder(parent))


@pytest.fixture(scope="session")
def facts_alone(small: tuple[Path, Path]) -> Facts:
    """Of the same checkpoint, without its parent."""
    return gather(Folder(small[1]), None)


@pytest.fixture(scope="session")
def real() -> Facts:
    return real_facts()


@pytest.fixture(scope="session")
def real_page(real: Facts) -> str:
    """The page of the real layout."""
    pytest.importorskip("matplotlib", reason="the report's figures need the extra `report`")
    pytest.importorskip("jinja2", reason="the report needs the extra `report`")
    from shardmill.verify.report.page import render_page

    return render_page(real)


@pytest.fixture
def changed(facts: Facts) -> Callable[..., Facts]:
    """The facts with some of them replaced."""
    return lambda **fields: replace(facts, **fields)
