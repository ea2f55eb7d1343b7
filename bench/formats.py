"""How fast each number format is encoded by one core, and how much memory a build takes: `make bench-formats`.

Speed: GB of BF16 a second, the best of five runs over 64 MiB in strips of 1 MiB, as the stage `convert` reads them, one
thread, by its own processor time, so that other work counts little. Memory: the most that a build by one worker holds:
of one matrix [8192, 16384], and of a stack of four experts [4, 4096, 8192] stored transposed. The row `quantize` is
block FP8 by its own stage.
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.memory import together_mib
from shardmill.kernels.formats import f32_to_bf16
from shardmill.kernels.group_codes import GroupCodes
from shardmill.pipeline.formats import formats
from shardmill.pipeline.formats.base import Params, Setting

COLUMNS, STRIP_ROWS, STRIPS = 4096, 128, 64
BIG, STACK = (8192, 16384), (4, 4096, 8192)
RUNS = 5

RECIPE = """\
format = 1
name = "bench"
[output]
profile = "{profile}"
loaders = {loaders}
[[family]]
name = "all"
match = "{match}"
{action}
expect = 1
"""


def targets() -> Iterator[tuple[str, str]]:
    """(format, the first profile that writes it)."""
    for form in formats().values():
        if form.encode and form.name != "bf16":
            yield form.name, next(each.profile for each in reversed(form.spellings) if each.entry)


def speed(name: str, profile: str, kernel: str) -> float:
    """GB of BF16 a second."""
    form = formats()[name]
    spelling = form.spelling(profile)
    assert spelling is not None
    assert form.encode is not None
    random = np.random.Generator(np.random.PCG64(5))
    values = random.standard_normal((STRIP_ROWS, COLUMNS), np.float32) / np.float32(50)
    strips = [f32_to_bf16(values * np.float32(1 + place % 7)) for place in range(STRIPS)]
    law = spelling.law or next(iter(form.laws))
    setting = Setting(Params(), spelling, GroupCodes(kernel), law, np.float32(1) if form.surveys else None)
    form.encode(strips[0], setting)
    best = np.inf
    for _ in range(RUNS):
        begin = time.thread_time()
        for strip in strips:
            form.encode(strip, setting)
        best = min(best, time.thread_time() - begin)
    return float(sum(strip.nbytes for strip in strips) / best / 1e9)


def parent(folder: Path, name: str, shape: tuple[int, ...]) -> Path:
    """A checkpoint of one tensor, written row by row."""
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Bench"], "torch_dtype": "bfloat16"}')
    size = 2 * int(np.prod(shape))
    header = json.dumps({name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}).encode()
    random = np.random.Generator(np.random.PCG64(6))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for _ in range(size // 2 // shape[-1]):
            file.write(f32_to_bf16(random.standard_normal(shape[-1], np.float32)).tobytes())
    return folder


def peak(home: Path, made: Path, name: str, action: str, profile: str) -> float:
    """MiB."""
    recipe = home / "recipe.toml"
    loaders = '["vllm"]' if profile in ("fp8", "compressed-tensors", "modelopt") else "[]"
    recipe.write_text(RECIPE.format(profile=profile, match=name, action=action, loaders=loaders))
    out = home / "out"
    program = "from shardmill.pipeline.commands.main import main; main()"
    command = [sys.executable, "-c", program, "build", "--workers", "1"]
    found = together_mib([*command, "-c", str(recipe), "--parent", str(made), "--out", str(out)])
    for file in sorted(out.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    return found


def main() -> int:
    print("| format | numba, GB/s | numpy, GB/s | MiB for a matrix | MiB for a transposed stack |")
    print("|---|---:|---:|---:|---:|")
    weight, stack = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.experts.down_proj"
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        big = parent(home / "big", weight, BIG)
        experts = parent(home / "stack", stack, (STACK[0], STACK[2], STACK[1]))
        block = peak(home, big, weight, 'action = "quantize"\nblock = [128, 128]', "fp8")
        print(f"| `quantize` | - | - | {block:.0f} | - |", flush=True)
        for name, profile in targets():
            fast, plain = (speed(name, profile, kernel) for kernel in ("numba", "numpy"))
            action = f'action = "convert"\nto = "{name}"'
            whole = peak(home, big, weight, action, profile)
            turned = peak(home, experts, stack, action + "\ntransposed = true\nunstack = true", profile)
            print(f"| `{name}` | {fast:.2f} | {plain:.2f} | {whole:.0f} | {turned:.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
