"""Writes a golden checkpoint of the manifest's format at hand: parent, recipe, lock and child, some tens of KB.

    python -m tests.golden.make tests/golden/format-2

A golden is written once, by the code whose format it holds, and never again: later code must read it as it is.
format-1 was written by the last revision before format 2, whose command is given by `--module pipeline.commands.main`
and whose recipes spell the stage and action `dequantise` (`--old-words`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np

RECIPE = """\
format = 1
name = "golden"

[parent]
repository = "nobody/golden"
revision = "0123456789abcdef0123456789abcdef01234567"

[output]
tensor_parallel = [1, 2]

[stages]
scan = { needs = [] }
classify = { needs = ["scan"] }
quantize = { needs = ["classify"] }
scales = { needs = ["quantize"] }
dequantize = { needs = ["classify"] }
rewrite = { needs = ["classify", "quantize", "scales", "dequantize"] }
index = { needs = ["scan", "rewrite"] }

[[family]]
name = "attention"
match = "model.layers.*.attn.{q,k}.weight"
action = "quantize"
block = [32, 32]
expect = 4

[[family]]
name = "mlp, copies of FP8"
match = "model.layers.*.mlp.down.weight"
action = "quantize"
numerics = "recover/1"
block = [32, 32]
expect = 2

[[family]]
name = "native, to BF16"
match = "model.head.weight*"
action = "dequantize"
source_block = [32, 32]
expect = 1

[[family]]
name = "native, to smaller blocks"
match = "model.gate.weight*"
action = "reblock"
source_block = [64, 64]
block = [32, 32]
expect = 1

[[family]]
name = "renamed"
match = "model.old_norm.weight"
action = "rename"
to = "model.norm.weight"
expect = 1

[[family]]
name = "rotary tables"
match = "model.layers.*.rotary.inv_freq"
action = "drop"
reason = "runtimes compute them: 1 / base | (i / d)"

[[family]]
name = "norms"
match = ["model.layers.*.norm.weight", "model.embed.weight"]
action = "keep"
reason = "vectors: no Linear"

[[fused]]
name = "attention input"
match = "model.layers.*.attn.{q,k}.weight"
runtime_names = ["qk"]

[[parallel]]
axis = "rows"
match = "model.layers.*.attn.{q,k}.weight"
"""

CONFIG = {
    "architectures": ["Golden"],
    "quantization_config": {
        "config_groups": {"group_0": {"targets": ["Linear"]}},
        "ignore": ["model.embed"],
        "producer": {"name": "modelopt", "version": "0.45.0"},
        "quant_algo": "NVFP4",
        "quant_method": "modelopt",
    },
}

GOLDEN = Path(__file__).parent
Tensors = dict[str, tuple[str, np.ndarray]]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--module", default="shardmill.pipeline.commands.main")
    arguments.add_argument("--old-words", action="store_true")
    given = arguments.parse_args()
    recipe = RECIPE.replace("dequantize", "dequantise") if given.old_words else RECIPE
    write_parent(given.folder / "parent")
    (given.folder / "pipeline.toml").write_text(recipe)
    places = ["-c", given.folder / "pipeline.toml", "--parent", given.folder / "parent"]
    command = [sys.executable, "-c", f"from {given.module} import main; main()"]
    subprocess.run([*command, "pin", *places, "--read-all"], check=True)
    subprocess.run(
        [*command, "build", *places, "--out", given.folder / "out", "--kernel", "numpy"], check=True
    )
    shutil.rmtree(given.folder / "out" / ".shardmill")


def write_parent(folder: Path) -> None:
    """Three shards: one that is rewritten, one of native block FP8 and renamings, one that is passed on."""
    files: dict[str, Tensors] = {f"model-{number:05d}-of-00003.safetensors": {} for number in (1, 2, 3)}
    first, second, third = files.values()
    random = np.random.Generator(np.random.PCG64(1))
    for layer in (0, 1):
        at = f"model.layers.{layer}"
        for name in ("q", "k"):
            first[f"{at}.attn.{name}.weight"] = bf16(random.standard_normal((64, 48)))
        first[f"{at}.mlp.down.weight"] = bf16(decoded(random, 48, 64))
        first[f"{at}.rotary.inv_freq"] = ("F32", np.linspace(0, 1, 8, dtype=np.float32))
        third[f"{at}.norm.weight"] = bf16(random.standard_normal(64))
    for name, block in (("head", 32), ("gate", 64)):
        second[f"model.{name}.weight"] = ("F8_E4M3", random.integers(1, 0x7E, (64, 64), np.uint8))
        grid = (64 // block, 64 // block)
        second[f"model.{name}.weight_scale_inv"] = ("F32", random.random(grid, np.float32) / 64 + 2**-8)
    second["model.old_norm.weight"] = bf16(random.standard_normal(64))
    third["model.embed.weight"] = bf16(random.standard_normal((64, 32)))
    folder.mkdir(parents=True)
    for file, tensors in files.items():
        (folder / file).write_bytes(shard_bytes(tensors))
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {"total_size": 0}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    (folder / "tokenizer.json").write_text('{"tokens": []}\n')
    (folder / "README.md").write_text("# The parent's own words\n")


def bf16(values: np.ndarray) -> tuple[str, np.ndarray]:
    """Values truncated to BF16, as their bits."""
    return "BF16", (values.astype("<f4").view("<u4") >> 16).astype("<u2")


def decoded(random: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    """f32 [rows, cols] that E4M3 codes and a scale of each 32 x 32 block stand for, save for one block of noise."""
    codes = np.sign(random.standard_normal((rows, cols))) * 2.0 ** random.integers(-6, 8, (rows, cols))
    codes[::32, ::32] = 448
    values = codes * 2.0**-12
    values[:32, :32] += random.standard_normal((32, 32)) / 1024
    return values


def shard_bytes(tensors: Tensors) -> bytes:
    """A safetensors file of `tensors` in the order given."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, values) in tensors.items():
        part = values.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(part)],
        }
        data += part
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


if __name__ == "__main__":
    main()
