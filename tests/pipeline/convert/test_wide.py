"""Rows too wide to be held are taken in pieces: the same bytes, digests and counts, and no read that is larger."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.kernels.formats import bf16_to_f32
from shardmill.pipeline.container.files import Sink, Source
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.formats import formats
from tests.kernels.conftest import bell, words
from tests.pipeline.convert.test_convert import MODULE, parent_of, recipe, setting
from tests.pipeline.parents import build

convert, weight, dequantize, parts, quantize = (  # modules whose functions have the same names
    import_module(f"shardmill.pipeline.stages.{name}")
    for name in ("convert", "converting.weight", "dequantize", "converting.parts", "quantize")
)
ROWS, COLUMNS = 32, 768
TARGETS = [
    "bf16",
    "fp8-block",
    "fp8-channel",
    "fp8-tensor",
    "int4-group",
    "int8-channel",
    "mxfp4",
    "mxfp8",
    "nvfp4",
]
PIECE = 256  # elements


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits so small that every row is too wide, and each piece a part of a row."""
    for module, limits in (
        (weight, {"HELD_ELEMENTS": 1}),
        (parts, {"PIECE_ELEMENTS": PIECE, "PIECE_COLUMNS": PIECE, "_TILE": 40}),
        (
            quantize,
            {"ROW_BYTES_MAX": 1, "ROW_BLOCKS_MAX": 5, "PIECE_COLUMNS": PIECE, "STRIP_BYTES": 4 * PIECE},
        ),
        (
            dequantize,
            {"ROW_BYTES_MAX": 1, "PIECE_COLUMNS": PIECE, "STRIP_BYTES": PIECE, "SCALES_BYTES_MAX": 1},
        ),
    ):
        for name, value in limits.items():
            monkeypatch.setattr(module, name, value)


def quantized(name: str, profile: str, values: Any, **params: Any) -> dict[str, Any]:
    """A weight of a parent in that format: tensor -> (dtype, array)."""
    form, own = (
        formats()[name],
        setting(name, profile, np.float32(np.abs(bf16_to_f32(values)).max()), **params),
    )
    assert form.encode is not None
    arrays = form.encode(values, own)
    made = form.stored(values.shape, own.params, own.spelling)
    return {
        MODULE + own.spelling.ends[part.role]: (part.dtype, arrays[part.role].reshape(part.shape))
        for part in made
        if part.role in arrays
    }


def gptq() -> dict[str, Any]:
    groups = COLUMNS // 128
    return {
        f"{MODULE}.qweight": ("I32", words(5, COLUMNS // 8, ROWS).view(np.int32)),
        f"{MODULE}.scales": ("F16", (words(6, groups, ROWS) % 100 + 1).astype(np.float16) / np.float16(512)),
        f"{MODULE}.qzeros": ("I32", words(7, groups, ROWS // 8).view(np.int32)),
        f"{MODULE}.g_idx": ("I32", (words(8, COLUMNS) % groups).astype(np.int32)),
    }


def awq() -> dict[str, Any]:
    groups = COLUMNS // 128
    return {
        f"{MODULE}.qweight": ("I32", words(5, COLUMNS, ROWS // 8).view(np.int32)),
        f"{MODULE}.scales": ("F16", (words(6, groups, ROWS) % 100 + 1).astype(np.float16) / np.float16(512)),
        f"{MODULE}.qzeros": ("I32", words(7, groups, ROWS // 8).view(np.int32)),
    }


WEIGHTS = bell(17, ROWS, COLUMNS)
STACKS = {  # name -> (tensors, keys)
    "stack": (bell(19, 2, ROWS, COLUMNS), ""),
    "transposed": (bell(19, 2, COLUMNS, ROWS), "transposed = true\n"),
    "unstack": (bell(19, 2, COLUMNS, ROWS), "transposed = true\nunstack = true\n"),
}
SOURCES: dict[str, dict[str, Any]] = {
    "bf16": {f"{MODULE}.weight": ("BF16", WEIGHTS)},
    "f32": {f"{MODULE}.weight": ("F32", bf16_to_f32(WEIGHTS))},
    "fp8-block": quantized("fp8-block", "modelopt-mixed", WEIGHTS, block=(16, 64)),
    "fp8-channel": quantized("fp8-channel", "compressed-tensors", WEIGHTS),
    "fp8-tensor": quantized("fp8-tensor", "compressed-tensors", WEIGHTS),
    "int8-channel": quantized("int8-channel", "compressed-tensors", WEIGHTS),
    "mxfp4": quantized("mxfp4", "compressed-tensors", WEIGHTS),
    "mxfp8": quantized("mxfp8", "compressed-tensors", WEIGHTS),
    "nvfp4": quantized("nvfp4", "compressed-tensors", WEIGHTS),
    "gptq": gptq(),
    "awq": awq(),
}


def made(parent: Path, path: Path, out: Path) -> tuple[bytes, Any]:
    """The child's shard, and what its manifest says of it."""
    build(parent, out, path)
    manifest = json.loads((out / "shardmill.manifest.json").read_text())
    return (out / "model.safetensors").read_bytes(), (manifest["shards"], manifest["conversions"])


def target_recipe(folder: Path, source: str, to: str, keys: str = "") -> Path:
    profile = "modelopt-mixed" if to == "fp8-block" else "compressed-tensors"
    if source in SOURCES and source not in ("bf16", "f32"):
        keys += f'source = "{source}"\nsource_block = [16, 64]\n'
    if to == "fp8-block":
        keys += "block = [32, 32]\n"
    globs = [f"{MODULE}.*"] if source in SOURCES else "**.experts.*_proj"
    return recipe(folder, to, profile, globs, 1, keys)


def both(tmp_path: Path, parent: Path, path: Path, request: pytest.FixtureRequest) -> None:
    whole = made(parent, path, tmp_path / "whole")
    request.getfixturevalue("in_pieces")
    assert made(parent, path, tmp_path / "pieces") == whole


@pytest.mark.parametrize(
    ("source", "to"),
    [("bf16", to) for to in TARGETS if to != "bf16"]
    + [(source, to) for source in SOURCES for to in ("fp8-block", "int8-channel", "nvfp4")],
)
def test_a_conversion_in_pieces_is_the_same(
    tmp_path: Path, source: str, to: str, request: pytest.FixtureRequest
) -> None:
    """From every format to every format: the same file, the same digests of sources, the same exact blocks."""
    if source == to:
        pytest.skip("converts nothing")
    parent = parent_of(tmp_path / "parent", SOURCES[source])
    both(tmp_path, parent, target_recipe(tmp_path, source, to), request)


@pytest.mark.parametrize("to", ["fp8-block", "int8-channel", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", STACKS)
def test_a_stack_in_pieces_is_the_same(
    tmp_path: Path, kind: str, to: str, request: pytest.FixtureRequest
) -> None:
    """Stacks, transposed ones and those that come apart: a matrix that is turned on the disk keeps its numbers."""
    if to == "nvfp4" and kind != "unstack":
        pytest.skip("a stack has no number of its own")
    stack, keys = STACKS[kind]
    name = "gate_up_proj" if kind == "unstack" else "down_proj"
    parent = parent_of(tmp_path / "parent", {f"model.layers.0.mlp.experts.{name}": ("BF16", stack)})
    both(tmp_path, parent, target_recipe(tmp_path, kind, to, keys), request)


QUANTIZE = """\
format = 1
name = "r"
[output]
profile = "modelopt-mixed"
[[family]]
name = "q"
match = "{module}.*"
action = "{action}"
{keys}
expect = 1
[[family]]
name = "rest"
match = "**.norm.weight"
action = "keep"
reason = "a vector"
"""


@pytest.mark.parametrize("numerics", ["amax/1", "mse/1", "recover/1", "ue8m0/1"])
@pytest.mark.parametrize("block", [[16, 16], [300, 300], [2000, 2000]])
def test_quantizing_in_pieces_is_the_same(
    tmp_path: Path, numerics: str, block: list[int], request: pytest.FixtureRequest
) -> None:
    """Every formula of scales, for blocks of every form."""
    source = WEIGHTS.copy()
    source[:16, :128] = 0
    source[16:32, 64:200] &= 0xFFE0  # few mantissas
    parent = parent_of(tmp_path / "parent", {f"{MODULE}.weight": ("BF16", source)})
    path = tmp_path / "r.toml"
    path.write_text(
        QUANTIZE.format(module=MODULE, action="quantize", keys=f'block = {block}\nnumerics = "{numerics}"')
    )
    both(tmp_path, parent, path, request)


@pytest.mark.parametrize("keys", ["", "block = [8, 8]"])
@pytest.mark.parametrize("block", [(16, 16), (1, 1), (1024, 1024)])
def test_what_was_block_fp8_in_pieces_is_the_same(
    tmp_path: Path, block: tuple[int, int], keys: str, request: pytest.FixtureRequest
) -> None:
    """Dequantize and reblock, with scales that are read row by row."""
    if keys and block == (1, 1):
        pytest.skip("no smaller block divides it")
    parent = parent_of(tmp_path / "parent", quantized("fp8-block", "modelopt-mixed", WEIGHTS, block=block))
    path, action = tmp_path / "r.toml", "reblock" if keys else "dequantize"
    keys += f"\nsource_block = {list(block)}"
    path.write_text(QUANTIZE.format(module=MODULE, action=action, keys=keys).replace("modelopt-mixed", "fp8"))
    both(tmp_path, parent, path, request)


@pytest.mark.parametrize("source", ["bf16", "fp8-block", "gptq"])
def test_nothing_large_is_asked_for(
    tmp_path: Path, source: str, in_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No read of the parent and no write of the child is larger than a piece, but for the passes that only hash."""
    sizes: list[int] = []
    read, write = Source.read, Sink.write
    monkeypatch.setattr(
        Source, "read", lambda self, into, at: (sizes.append(len(into)), read(self, into, at))[1]
    )
    monkeypatch.setattr(
        Sink, "write", lambda self, data, at: (sizes.append(len(data)), write(self, data, at))[1]
    )
    monkeypatch.setattr(convert, "STRIP_BYTES", 4 * PIECE)
    parent = parent_of(tmp_path / "parent", SOURCES[source])
    build(parent, tmp_path / "out", target_recipe(tmp_path, source, "mxfp8"))
    assert max(sizes) <= 4 * PIECE < ROWS * COLUMNS // 8


def test_a_number_that_is_not_finite_is_placed(tmp_path: Path, in_pieces: None) -> None:
    """In pieces too the message has the row and the column of the weight."""
    source = WEIGHTS.copy()
    source[21, 700] = 0x7F80
    parent = parent_of(tmp_path / "parent", {f"{MODULE}.weight": ("BF16", source)})
    for to in ("mxfp8", "int8-channel", "fp8-block"):
        with pytest.raises(BuildError, match="row 21, column 700 is inf"):
            build(parent, tmp_path / "out", target_recipe(tmp_path, "bf16", to))
