"""Measures builds against a plain copy, in one run and in turns, and writes BENCHMARKS.md's figures as JSON.

    python -m bench.build [--rounds 5] [--work DIR] [--json FILE]

Each round copies, then builds with each setting, so that a machine that is slow for a minute is slow for all.
The parent is warmed into the page cache first; every round ends with a sync that is part of its time.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.calls import BIG_RECIPE, RECIPE, build_command, recalibrate, shardmill
from bench.memory import together_mib
from shardmill.pipeline.container.header import header_bytes, lay_out
from shardmill.pipeline.toy.glm53 import cut, parent_bytes
from shardmill.pipeline.toy.sizes import SIZES, Size
from shardmill.pipeline.toy.write import INDEX_FILE, toy_headers, write_parent

MIB = 1 << 20


def timed(command: list[str]) -> dict[str, float]:
    """Wall, user and system seconds, and peak RSS in MiB, of a command that must succeed."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    error = process.communicate()[1]
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise SystemExit(f"{command}: {error.decode()}")
    return {"wall": wall, "user": after.ru_utime - before.ru_utime, "sys": after.ru_stime - before.ru_stime}


def in_turns(rounds: int, contenders: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Median seconds of each contender over rounds in which each has its turn."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            seconds[name].append(contender())
    return {name: statistics.median(values) for name, values in seconds.items()}


def clean(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.sync()


def copy_seconds(parent: Path, out: Path) -> float:
    clean(out)
    started = time.perf_counter()
    subprocess.run(["cp", "-r", str(parent), str(out)], check=True)
    os.sync()
    return time.perf_counter() - started


def tuned_copy_seconds(parent: Path, out: Path) -> float:
    """The same by our own reading, writing and cache calls, a worker a core."""
    clean(out)
    started = time.perf_counter()
    timed([sys.executable, "-m", "bench.copy", str(parent), str(out)])
    os.sync()
    return time.perf_counter() - started


def build_seconds(parent: Path, out: Path, *more: str) -> float:
    clean(out)
    started = time.perf_counter()
    timed(build_command(parent, out, *more))
    os.sync()
    return time.perf_counter() - started


def warm(folder: Path) -> None:
    """Fills the page cache, where possible anew: what was read lies in larger pieces than what was written, and copies
    faster."""
    cold()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(16 * MIB):
                    pass


def cold() -> bool:
    """Empties the page cache, where this user may."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def against_a_copy(parent: Path, work: Path, rounds: int) -> dict[str, float]:
    warm(parent)
    out = work / "out"
    contenders: dict[str, Callable[[], float]] = {
        "copy": lambda: copy_seconds(parent, out),
        "tuned copy": lambda: tuned_copy_seconds(parent, out),
    }
    for kernel in kernels():
        contenders[kernel] = partial(build_seconds, parent, out, "--kernel", kernel)
        contenders[f"{kernel}, no sha256"] = partial(
            build_seconds, parent, out, "--kernel", kernel, "--no-sha256"
        )
    seconds = in_turns(rounds, contenders)
    clean(out)
    return seconds


def kernels() -> list[str]:
    return ["numpy", "numba"] if importlib.util.find_spec("numba") else ["numpy"]


def sha256_when_cold(parent: Path, work: Path, rounds: int) -> dict[str, float] | None:
    if not cold():
        return None
    out = work / "out"

    def one(*more: str) -> float:
        clean(out)
        cold()
        return build_seconds(parent, out, *more)

    seconds = in_turns(rounds, {"sha256": one, "no sha256": lambda: one("--no-sha256")})
    clean(out)
    return seconds


LARGE = {"tall": (154_880, 4096), "wide": (128, 4_000_000)}  # shapes of a BF16 matrix of a gigabyte and more


def large_tensor(work: Path, shape: tuple[int, int]) -> tuple[Path, Path]:
    """A parent that holds one BF16 matrix, all holes on the disk, and its recipe."""
    parent, recipe = work / "big", work / "big.toml"
    parent.mkdir(exist_ok=True)
    header = lay_out([("lm_head.weight", "BF16", shape)], "model.safetensors", {"format": "pt"})
    with (parent / "model.safetensors").open("wb") as file:
        file.write(header_bytes(header))
        file.truncate(header.file_bytes)
    (parent / "config.json").write_text("{}")
    recipe.write_text(BIG_RECIPE)
    return parent, recipe


def memory_together(small: Path, work: Path, workers: int = 2) -> dict[str, dict[str, float]]:
    """Kernel -> what a build takes, MiB of all its processes: of the parent `small`, and of one large tensor."""
    found: dict[str, dict[str, float]] = {}
    out, more = work / "big-out", ["--workers", str(workers)]
    for kernel in kernels():
        clean(out)
        found[kernel] = {"small": together_mib(build_command(small, out, "--kernel", kernel, *more))}
        for name, shape in LARGE.items():
            clean(out)
            parent, recipe = large_tensor(work, shape)
            command = shardmill(
                "build", "-c", str(recipe), "--parent", str(parent), "--out", str(out), "--json"
            )
            found[kernel][name] = together_mib([*command, "--kernel", kernel, *more])
    clean(out, work / "big")
    return found


def judged(out: Path, rounds: int) -> dict[str, float]:
    """verify integrity against reading and hashing the same files on every core."""
    warm(out)
    command = shardmill("verify", "integrity", str(out), "--json")
    return in_turns(
        rounds, {"integrity": lambda: timed(command)["wall"], "read + sha256": lambda: hashed(out)}
    )


def hashed(out: Path) -> float:
    files = sorted(
        (p for p in out.rglob("*") if p.is_file() and ".shardmill" not in p.parts),
        key=lambda p: -p.stat().st_size,
    )
    cores, lock, started = sorted(os.sched_getaffinity(0)), threading.Lock(), time.perf_counter()

    def work(core: int) -> None:
        os.sched_setaffinity(0, {core})
        buffer = memoryview(bytearray(MIB))
        while True:
            with lock:
                if not files:
                    return
                path = files.pop(0)
            digest = hashlib.sha256()
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    digest.update(buffer[:count])

    threads = [threading.Thread(target=work, args=(core,)) for core in cores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def incremental(parent: Path, out: Path) -> dict[str, float]:
    """Seconds of a build after the parent's input scales changed, and the bytes that it read."""
    recalibrate(parent)
    command = build_command(parent, out)
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - started
    recalibrate(parent)
    facts = json.loads(done.stdout)
    assert list(facts["made"]) == ["model-input-scales.safetensors"], facts
    return {"seconds": seconds, "bytes_read": facts["bytes_read"]}


def plan_growth(work: Path) -> dict[str, float]:
    """User and system seconds of `plan` by number of tensors; the names are the real ones, of ever more experts."""
    seconds = {}
    for experts in (1, 18, 96, 288):
        size = replace(SIZES["headers"], dimensions=replace(SIZES["many"].dimensions, experts=experts))
        parent = grown(work, f"{experts}-experts", replace(size, cut=partial(cut, size.dimensions, 1 << 20)))
        tensors = len(json.loads((parent / INDEX_FILE).read_text())["weight_map"])
        command = shardmill("plan", "-c", str(RECIPE), "--parent", str(parent), "--json")
        costs = [timed(command) for _ in range(3)]
        seconds[str(tensors)] = round(statistics.median(cost["user"] + cost["sys"] for cost in costs), 2)
        clean(parent)
    return seconds


def growth(work: Path, out: Path, rounds: int) -> dict[str, dict[str, float]]:
    """By bytes of the parent, whose 14,002 tensors only grow wider: seconds of a build, of verify integrity on its
    output, and of reading and hashing that output; `child` is the output's bytes."""
    grows = {}
    for hidden in (256, 512, 1024):
        small = SIZES["small"]
        dimensions = replace(small.dimensions, hidden=hidden)
        size = replace(
            small, dimensions=dimensions, cut=partial(cut, dimensions, hidden * 480_000, parent_bytes)
        )
        parent = grown(work, f"hidden-{hidden}", size)
        warm(parent)
        built = statistics.median(build_seconds(parent, out) for _ in range(rounds))
        child = sum(path.stat().st_size for path in out.iterdir() if path.is_file())
        total = sum(path.stat().st_size for path in parent.iterdir())
        grows[str(total)] = {"build": built, "child": child, **judged(out, rounds)}
        clean(out, parent)
    return grows


def grown(work: Path, name: str, size: Size) -> Path:
    """A toy parent of a size that has no name."""
    parent = work / f"toy-{name}"
    write_parent(parent, size, toy_headers(size), lambda count: None)
    return parent


def toy(work: Path, size: str) -> Path:
    parent = work / f"toy-{size}"
    subprocess.run(shardmill("toy-parent", str(parent), "--size", size), check=True, capture_output=True)
    return parent


def machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    python = platform.python_version()
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "memory_gib": memory, "python": python}


def options(description: str | None, result: str, rounds: int = 5) -> argparse.ArgumentParser:
    """What every bench is asked: how often, where it may write, and where its figures go."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--work", type=workplace, default="build/bench")
    parser.add_argument("--json", type=Path, default=Path("build/bench") / result)
    return parser


def workplace(path: str) -> Path:
    """An absolute folder, made where it is not there."""
    Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path).absolute()


def tell(facts: Mapping[str, object], path: Path) -> None:
    """Prints the figures, and keeps them for bench.write."""
    text = json.dumps(facts, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    print(text)


def main() -> int:
    asked = options(__doc__, "build.json").parse_args()
    work = asked.work
    small, many, out = toy(work, "small"), toy(work, "many"), work / "kept"
    facts: dict[str, object] = {
        "machine": machine(),
        "load_before": os.getloadavg()[0],
        "rounds": asked.rounds,
    }
    facts["small_bytes"] = sum(path.stat().st_size for path in small.iterdir())
    facts["against_a_copy"] = against_a_copy(small, work, asked.rounds)
    facts["cold"] = sha256_when_cold(small, work, asked.rounds)
    clean(out)
    facts["together_mib"] = memory_together(small, work)
    timed(build_command(small, out))
    facts["integrity"] = judged(out, asked.rounds)
    facts["incremental"] = incremental(small, out)
    clean(out)
    timed(build_command(many, out))
    facts["nothing_to_do_seconds"] = statistics.median(
        timed(build_command(many, out))["wall"] for _ in range(asked.rounds)
    )
    clean(out)
    facts["plan_cpu_seconds_by_tensors"] = plan_growth(work)
    facts["growth"] = growth(work, out, max(3, asked.rounds // 2))
    facts["load_after"] = os.getloadavg()[0]
    tell(facts, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
