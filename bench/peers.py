"""The same work done by peers, in turns with ours, each with its start-up, memory and disk: on the CPU.

    python -m bench.peers --python .venv-peers/bin/python [--rounds 3] [--times 1] [--jobs N] [--work DIR] [--json FILE]

The peers run in a virtual environment of their own: llm-compressor's model_free_ptq as its documentation says; a plain
torch loop; one that holds a whole shard a job; and one that is tuned. llm-compressor is told to ignore what our recipe
keeps; it writes blocks of 128 everywhere, since it has no [32,32], and BF16 scales. `--times` makes the parent so many
times as wide: 1 is 4 GB, 4 is 14 GB.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.build import clean, cold, copy_seconds, grown, in_turns, kernels, machine, options, tell, warm
from bench.calls import build_command
from bench.memory import of_session, pss_kib
from bench.peer_scripts import LLM_COMPRESSOR, TORCH_LOOP, TORCH_MAPPED, WHOLE_SHARD, imports_of
from shardmill.pipeline.recipe.read import load
from shardmill.pipeline.run.cores import usable_cores
from shardmill.pipeline.run.prepare import prepare
from shardmill.pipeline.toy.glm53 import cut, parent_bytes
from shardmill.pipeline.toy.sizes import SIZES

RECIPE = Path(__file__).resolve().parents[1] / "pipeline.toml"
PEERS = {
    "torch loop": TORCH_LOOP,
    "torch, a whole shard a job": WHOLE_SHARD,
    "torch, tuned": TORCH_MAPPED,
    "llm-compressor": LLM_COMPRESSOR,
}
_SAMPLE_SECONDS = 0.05
_SHARD_BYTES = 490_000_000


@dataclass(frozen=True)
class Contender:
    """A command that makes a checkpoint of the parent, and one that only starts as it does."""

    command: Sequence[str]
    start: Sequence[str]
    pinned: bool = False  # its threads are told their cores, as ours are

    def run(self, out: Path) -> float:
        """Seconds, the start included and a sync behind it, as our own builds are timed."""
        clean(out)
        started = time.perf_counter()
        subprocess.run(self.command, check=True, capture_output=True, env=self.environment)
        os.sync()
        return time.perf_counter() - started

    def start_seconds(self) -> float:
        started = time.perf_counter()
        subprocess.run(self.start, check=True, capture_output=True, env=self.environment)
        return time.perf_counter() - started

    @property
    def environment(self) -> dict[str, str]:
        cores = " ".join(map(str, sorted(os.sched_getaffinity(0))))
        return {**os.environ, **({"GOMP_CPU_AFFINITY": cores} if self.pinned else {})}

    def takes(self, out: Path) -> dict[str, float]:
        """The most memory of all its processes together (PSS, MiB) and the most disk below `out` (GB), sampled."""
        clean(out)
        process = subprocess.Popen(
            self.command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self.environment,
            start_new_session=True,
        )
        most = {"mib": 0.0, "disk_gb": 0.0}

        def sample() -> None:
            while process.poll() is None:
                most["mib"] = max(most["mib"], sum(map(pss_kib, of_session(process.pid))) / 1024)
                most["disk_gb"] = max(most["disk_gb"], disk_bytes(out) / 1e9)
                time.sleep(_SAMPLE_SECONDS)

        thread = threading.Thread(target=sample)
        thread.start()
        thread.join()
        if process.returncode:
            raise SystemExit(f"{self.command[:2]}: exit {process.returncode}")
        return most


def disk_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # it was renamed meanwhile
            total += 512 * path.lstat().st_blocks
    return total


def contenders(parent: Path, out: Path, facts: Path, python: Path, jobs: int) -> dict[str, Contender]:
    found = {}
    for kernel in kernels():
        for name, more in ((kernel, ()), (f"{kernel}, no sha256", ("--no-sha256",))):
            command = build_command(parent, out, "--kernel", kernel, "--workers", str(jobs), *more)
            start = [sys.executable, "-c", "import shardmill.pipeline.commands.build"]
            found[name] = Contender(command, start)
    for name, script in PEERS.items():
        command = [str(python), "-c", script, str(parent), str(out), str(facts), str(jobs)]
        found[name] = Contender(
            command, [str(python), "-c", imports_of(script)], pinned=name == "llm-compressor"
        )
    return found


def what_converts(parent: Path, path: Path) -> None:
    """Tells the peers what our recipe converts, and which modules it keeps."""
    plan = prepare(load(RECIPE), parent).plan
    converted = {
        name: [action.block.rows, action.block.cols] for name, (_, action) in plan.conversions.items()
    }
    kept = [name for name in plan.weight_map if name.endswith(".weight") and name not in converted]
    modules = [name.removesuffix(".weight") for name in kept]
    path.write_text(json.dumps({"blocks": converted, "ignore": modules}))


def wide(work: Path, times: int) -> Path:
    """The parent `small`, so many times as wide."""
    small = SIZES["small"]
    dimensions = replace(small.dimensions, hidden=times * small.dimensions.hidden)
    size = replace(
        small, dimensions=dimensions, cut=partial(cut, dimensions, times * _SHARD_BYTES, parent_bytes)
    )
    return grown(work, f"wide-{times}", size)


def main() -> int:
    parser = options(__doc__, "peers.json", rounds=3)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=usable_cores())
    parser.add_argument("--leave-out", nargs="*", default=[], choices=list(PEERS))
    asked = parser.parse_args()
    python, work = asked.python.absolute(), asked.work
    parent, out, converts = wide(work, asked.times), work / "peer-out", work / "converts.json"
    what_converts(parent, converts)
    each = contenders(parent, out, converts, python, asked.jobs)
    for name in asked.leave_out:
        del each[name]
    result = {
        "machine": machine(),
        "jobs": asked.jobs,
        "parent_bytes": sum(path.stat().st_size for path in parent.iterdir()),
        "load_before": os.getloadavg()[0],
        "peers": versions(python),
    }
    copy: dict[str, Callable[[], float]] = {"copy": partial(copy_seconds, parent, out)}
    warm(parent)
    result["seconds"] = in_turns(asked.rounds, {**copy, **{n: partial(c.run, out) for n, c in each.items()}})
    tell(result, asked.json)  # so that a run that is cut short leaves what it has
    result["start"] = {n: statistics.median(c.start_seconds() for _ in range(3)) for n, c in each.items()}
    result["takes"] = {name: contender.takes(out) for name, contender in each.items()}
    if cold():
        result["cold"] = {name: from_cold(partial(c.run, out), out) for name, c in each.items()}
    clean(out)
    shutil.rmtree(parent, ignore_errors=True)
    tell(result, asked.json)
    return 0


def from_cold(run: Callable[[], float], out: Path) -> float:
    clean(out)
    cold()
    return run()


def versions(python: Path) -> dict[str, str]:
    code = """
import json
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in ("torch", "safetensors", "llmcompressor"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""
    told = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(told.stdout)
    return found


if __name__ == "__main__":
    sys.exit(main())
