"""No bit of a build depends on whether the processor keeps numbers below 2^-126."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardmill.pipeline.formats import formats
from shardmill.pipeline.run import schedule
from tests.kernels.conftest import subnormals_flushed
from tests.pipeline.parents import build, published, write_parent

WRITTEN = sorted(name for name, form in formats().items() if form.encode and form.name != "bf16")
PROFILES = {"fp8-tensor": "fp8"}
RECIPE = """
format = 1
name = "tiny numbers"
[output]
profile = "{profile}"
loaders = ["vllm"]
[[family]]
name = "weights"
match = "w.weight"
action = "convert"
to = "{to}"
expect = 1
[[family]]
name = "rest"
match = "norm.weight"
action = "keep"
reason = "small"
"""


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """A matrix whose groups span 2^-140 to 2^-110."""
    bell = np.random.Generator(np.random.PCG64(5)).standard_normal((64, 256))
    values = np.ldexp(bell, np.linspace(-140, -110, 64).astype(int)[:, None]).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype("<u2")
    tensors = {"w.weight": ("BF16", (64, 256), bits.tobytes()), "norm.weight": ("BF16", (4,), bytes(8))}
    return write_parent(tmp_path / "parent", {"model-00001-of-00001.safetensors": tensors}, config={})


@pytest.mark.parametrize("to", WRITTEN)
def test_a_build_that_flushes_small_numbers_gives_the_same_bytes(
    to: str, parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a library has set in the thread that makes a shard: every format of every law."""
    recipe = RECIPE.format(to=to, profile=PROFILES.get(to, "compressed-tensors"))
    build(parent, tmp_path / "kept", recipe)
    made: Callable[..., object] = schedule.fill
    flushed = []

    def flushing(*args: object) -> object:
        with subnormals_flushed():
            flushed.append(args)
            return made(*args)

    monkeypatch.setattr(schedule, "fill", flushing)
    build(parent, tmp_path / "flushed", recipe)
    assert flushed
    assert published(tmp_path / "kept") == published(tmp_path / "flushed")
