"""Parents in miniature, written by the safetensors library from plain dicts, and a recipe that fits them."""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import TensorSpec, serialize

from shardmill.pipeline.recipe import read as recipes
from shardmill.pipeline.run import build as run
from shardmill.pipeline.run.prepare import prepare as prepare_from
from shardmill.pipeline.stages.job import Prepared, Settings, Watch

Tensor = tuple[str, tuple[int, ...], bytes]  # dtype, shape, data
Tensors = Mapping[str, Tensor]

# What the library calls each dtype that it can write. F4 is given in bytes of two elements.
LIBRARY_NAMES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}

RECIPE = """\
format = 1
name = "micro"

[parent]
repository = "nobody/micro"
revision = "0123456789abcdef0123456789abcdef01234567"

[output]
tensor_parallel = [1, 2]

[[family]]
name = "attention"
match = "model.layers.*.attn.{q,k}.weight"
action = "quantize"
block = [4, 4]
expect = 4

[[family]]
name = "mlp"
match = "model.layers.*.mlp.down.weight"
action = "quantize"
block = [8, 8]
expect = 2

[[family]]
name = "experts"
match = "model.layers.*.experts.*.{weight,weight_scale,weight_scale_2,input_scale}"
action = "keep"
reason = "already packed"

[[family]]
name = "norms"
match = ["model.layers.*.norm.weight", "model.embed.weight"]
action = "keep"
reason = "small"

[[fused]]
name = "attention input"
match = "model.layers.*.attn.{q,k}.weight"
runtime_names = ["qk"]

[[parallel]]
axis = "rows"
match = "model.layers.*.attn.{q,k}.weight"

[[alias]]
prefix = "model.layers.1."
alias = "draft.layers.1."
"""

# The standard stages, written out: for tests that change them.
STAGES = """\
[stages]
scan = { needs = [] }
classify = { needs = ["scan"] }
quantize = { needs = ["classify"] }
scales = { needs = ["quantize"] }
rewrite = { needs = ["classify", "quantize", "scales"] }
index = { needs = ["scan", "rewrite"] }

"""
STAGED = RECIPE.replace("[[family]]", STAGES + "[[family]]", 1)

SHARDMILL = (sys.executable, "-c", "from shardmill.pipeline.commands.main import main; main()")
SHARDS = tuple(f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3))
SCALES = "model-input-scales.safetensors"
INDEX = "model.safetensors.index.json"
MANIFEST = "shardmill.manifest.json"
CONFIG = {
    "architectures": ["Micro"],
    "eps": 1e-06,
    "name": "naïve ☃",
    "quantization_config": {
        "config_groups": {"group_0": {"targets": ["Linear"]}},
        "ignore": ["lm_head", "*.attn.q", "*.attn.qk", "*.norm", "*.experts.9", "model.layers.0.mlp*"],
        "kv_cache_scheme": None,
        "producer": {"name": "modelopt", "version": "0.45.0"},
        "quant_algo": "NVFP4",
        "quant_method": "modelopt",
    },
}


def rng(name: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(int(hashlib.sha256(name.encode()).hexdigest()[:12], 16)))


def bf16(name: str, *shape: int) -> Tensor:
    """Plausible weights: normal numbers cut to BF16."""
    values = rng(name).standard_normal(shape).astype(np.float32)
    return ("BF16", shape, (values.view(np.uint32) >> 16).astype("<u2").tobytes())


def f32(*values: float) -> Tensor:
    return ("F32", (len(values),), np.array(values, "<f4").tobytes())


def scalar(value: float) -> Tensor:
    return ("F32", (), np.array(value, "<f4").tobytes())


def packed(name: str, rows: int, cols: int) -> Tensor:
    return ("U8", (rows, cols), rng(name).integers(0, 256, (rows, cols), np.uint8).tobytes())


def e4m3(name: str, rows: int, cols: int) -> Tensor:
    return ("F8_E4M3", (rows, cols), rng(name).integers(1, 0x7E, (rows, cols), np.uint8).tobytes())


def library_bytes(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
    """The file that the safetensors library makes of `tensors`."""
    kept = {
        name: ctypes.create_string_buffer(data, max(len(data), 1)) for name, (_, _, data) in tensors.items()
    }
    specs = {
        name: TensorSpec(
            dtype=LIBRARY_NAMES[dtype],
            shape=[*shape[:-1], shape[-1] // 2] if dtype == "F4" else list(shape),
            data_ptr=ctypes.addressof(kept[name]),
            data_len=len(data),
        )
        for name, (dtype, shape, data) in tensors.items()
    }
    return bytes(serialize(specs, metadata=dict(metadata) if metadata else None))


def micro_tensors() -> dict[str, dict[str, Tensor]]:
    """File -> its tensors: two layers with attention, MLP, packed experts and norms; shard 2 converts nothing."""
    files: dict[str, dict[str, Tensor]] = {name: {} for name in (*SHARDS, SCALES)}
    files[SHARDS[1]]["model.embed.weight"] = bf16("embed", 16, 8)
    for layer, attention, mlp in ((0, SHARDS[0], SHARDS[2]), (1, SHARDS[2], SHARDS[2])):
        at = f"model.layers.{layer}"
        # Eight rows a rank at TP 2; the columns are ragged against the block.
        files[attention] |= {f"{at}.attn.{x}.weight": bf16(f"{at}{x}", 16, 10) for x in "qk"}
        files[mlp][f"{at}.mlp.down.weight"] = bf16(f"{at}down", 12, 20)
        files[attention][f"{at}.norm.weight"] = bf16(f"{at}norm", 8)
        for expert in range(2):
            own = f"{at}.experts.{expert}"
            files[SHARDS[layer]] |= {
                f"{own}.weight": packed(own, 4, 16),
                f"{own}.weight_scale": e4m3(own + "s", 4, 2),
                f"{own}.weight_scale_2": scalar(0.5 + expert),
            }
            files[SCALES][f"{own}.input_scale"] = scalar(0.25 + expert)
    return files


def write_shard(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
    path.write_bytes(library_bytes(tensors, {"format": "pt"} if metadata is None else metadata))


def write_parent(folder: Path, files: Mapping[str, Tensors] | None = None, **side: Any) -> Path:
    """Writes a parent into `folder`; `side` replaces side files (config_json=... as an object)."""
    files = micro_tensors() if files is None else files
    folder.mkdir(parents=True, exist_ok=True)
    for file, tensors in files.items():
        write_shard(folder / file, tensors)
    write_index(folder, {name: file for file, tensors in files.items() for name in tensors})
    (folder / "config.json").write_text(json.dumps(side.get("config", CONFIG), indent=2))
    (folder / "tokenizer.json").write_text('{"tokens": []}\n')
    (folder / "LICENSE").write_text("free\n")
    (folder / "README.md").write_text("# The parent's own words\n")
    (folder / "assets").mkdir(exist_ok=True)
    (folder / "assets" / "logo.txt").write_text("logo\n")
    return folder


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index))


def write_recipe(folder: Path, text: str = RECIPE, name: str = "pipeline.toml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path


def prepare(parent: Path, recipe: str | Path = RECIPE) -> Prepared:
    path = recipe if isinstance(recipe, Path) else write_recipe(parent.parent / "recipes", recipe)
    return prepare_from(recipes.load(path), parent)


def build(parent: Path, out: Path, recipe: str | Path = RECIPE, **settings: Any) -> run.Summary:
    return run.build(prepare(parent, recipe), out, replace(Settings(kernel="numpy"), **settings), Watch())


def why(parent: Path, out: Path, recipe: str | Path = RECIPE) -> dict[str, str]:
    """Shard -> the reason that `explain` gives, for those that are stale."""
    explained = run.explain(prepare(parent, recipe), out, Settings(), lambda line: None)
    return {verdict.file: verdict.reason for verdict in explained.shards if verdict.reason}


def published(out: Path) -> dict[str, bytes]:
    """Every published file of a checkpoint: relative name -> bytes."""
    files = (path for path in out.rglob("*") if path.is_file())
    names = {path.relative_to(out).as_posix(): path for path in files}
    return {
        name: path.read_bytes() for name, path in sorted(names.items()) if not name.startswith(".shardmill/")
    }


def listing(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Everything below `folder`: name -> mtime, inode, digest. Equal listings: nothing was written."""
    if not folder.exists():
        return {}
    return {
        path.relative_to(folder).as_posix(): (
            path.lstat().st_mtime_ns,
            path.lstat().st_ino,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(folder.rglob("*"))
    }


def change_tensor(file: Path, name: str, place: int = 0) -> None:
    """Flips the lowest bit of one byte of a tensor's data, in place."""
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    begin, _ = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    data[8 + length + begin + place] ^= 1
    file.write_bytes(data)
