"""How fast weights are encoded: GB/s of source consumed by one core, and its share of a plain copy's speed.

    python -m bench.kernel                          every kernel and recipe
    python -m bench.kernel --recipe amax/1 --json   one JSON object on stdout

A matrix [8192, 4096] of BF16 is encoded in strips of one MiB, as a build does it, into buffers that are reused, by
a thread held on one core. Fresh weights are bell-shaped; native ones are BF16 copies of block FP8 [128, 128].
Rates are of CPU time, the median of the rounds, so that a busy machine shows less in them; `wall` says how busy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8 import RECIPES, decode, encoder, grid, known_kernels
from shardmill.kernels.formats import f32_to_bf16

ROWS, COLUMNS = 8192, 4096
STRIP_BYTES = 1 << 20


def main() -> None:
    arguments = _arguments()
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    sources = {"fresh": fresh(), "native": native()}
    copy_rate, _ = measure(_copying(sources["fresh"]), sources["fresh"].nbytes, arguments.rounds)
    rates = [
        {"recipe": recipe, "kernel": kernel, "block": list(block), "source": name}
        | dict(
            zip(
                ("gb_per_s", "wall_gb_per_s"),
                _rate(recipe, kernel, block, source, arguments.rounds),
                strict=True,
            )
        )
        for recipe in arguments.recipe
        for kernel in known_kernels()
        for block in ((128, 128), (32, 32))
        for name, source in sources.items()
    ]
    for rate in rates:
        rate["share_of_copy"] = round(rate["gb_per_s"] / copy_rate, 3)
    _show(
        {"core": core, "copy_gb_per_s": copy_rate, "matrix": [ROWS, COLUMNS], "rates": rates}, arguments.json
    )


def fresh() -> NDArray[np.uint16]:
    """BF16 bits of bell-shaped weights, [ROWS, COLUMNS]."""
    raw = np.random.PCG64(1).random_raw(ROWS * COLUMNS)
    halves = np.asarray(raw, dtype="<u8").view("<u2").reshape(-1, 4)
    return f32_to_bf16(
        (halves.sum(axis=1, dtype=np.float32) - np.float32(131_070)) * np.float32(2.0**-22)
    ).reshape(ROWS, COLUMNS)


def native() -> NDArray[np.uint16]:
    """BF16 bits of a copy of block FP8 [128, 128] weights, [ROWS, COLUMNS]."""
    codes = np.empty((ROWS, COLUMNS), np.uint8)
    scales = np.empty(grid(codes.shape, (128, 128)), np.float32)
    encoder("amax/1", (128, 128)).encode(fresh(), codes, scales)
    return f32_to_bf16(decode(codes, scales, (128, 128)))


def measure(work: Callable[[], None], consumed_bytes: int, rounds: int) -> tuple[float, float]:
    """GB/s of CPU time and of wall time: medians over the rounds, after one that is not counted."""
    work()
    cpu, wall = [], []
    for _ in range(rounds):
        cpu_begin, wall_begin = time.thread_time(), time.perf_counter()
        work()
        cpu.append(time.thread_time() - cpu_begin)
        wall.append(time.perf_counter() - wall_begin)
    cpu_rate, wall_rate = (consumed_bytes / statistics.median(seconds) / 1e9 for seconds in (cpu, wall))
    return round(cpu_rate, 2), round(wall_rate, 2)


def _rate(
    recipe: str, kernel: str, block: tuple[int, int], source: NDArray[np.uint16], rounds: int
) -> tuple[float, float]:
    encoding = encoder(recipe, block, kernel)
    strip_rows = max(block[0], STRIP_BYTES // source[0].nbytes // block[0] * block[0])
    codes = np.empty((strip_rows, COLUMNS), np.uint8)
    scales = np.empty(grid(codes.shape, block), np.float32)

    def encode_all() -> None:
        for begin in range(0, ROWS, strip_rows):
            encoding.encode(source[begin : begin + strip_rows], codes, scales)

    return measure(encode_all, source.nbytes, rounds)


def _copying(source: NDArray[np.uint16]) -> Callable[[], None]:
    target = np.zeros_like(source)
    return lambda: np.copyto(target, source)


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report))
        return
    print(f"copy: {report['copy_gb_per_s']} GB/s on core {report['core']}")
    print(f"{'recipe':10} {'kernel':7} {'block':10} {'source':7} {'GB/s':>6} {'wall':>6} {'of copy':>8}")
    for rate in report["rates"]:
        block = "x".join(map(str, rate["block"]))
        print(
            f"{rate['recipe']:10} {rate['kernel']:7} {block:10} {rate['source']:7} {rate['gb_per_s']:6.2f} "
            f"{rate['wall_gb_per_s']:6.2f} {rate['share_of_copy']:8.0%}"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--recipe", action="append", choices=sorted(RECIPES), help="default: all; may be repeated"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    arguments.recipe = arguments.recipe or sorted(RECIPES)
    return arguments


if __name__ == "__main__":
    main()
