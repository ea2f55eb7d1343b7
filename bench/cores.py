"""Builds and judgements by number of workers, parent and output both in memory, with the machine's limits beside.

    python -m bench.cores [--work /dev/shm/shardmill-cores] [--hidden 4096] [--experts 40] [--least 1] [--most N]

The parent is `small` with more and wider experts: 19.8 GB in 30 files as it comes. The limits: `cp` and `sha256sum` by
as many processes as there are cores. Memory is what all processes of a build hold together (PSS), sampled.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.build import grown, hashed, kernels, machine, options, tell, timed
from bench.calls import RECIPE, build_command, shardmill
from bench.memory import together_mib
from shardmill.pipeline.run.cores import usable_cores
from shardmill.pipeline.toy.glm53 import cut, parent_bytes
from shardmill.pipeline.toy.sizes import SIZES

FILE_BYTES = 700_000_000


def powers(most: int) -> list[int]:
    """1, 2, 4 ... and `most` itself."""
    return sorted({*(1 << n for n in range(most.bit_length())), most})


def manifest_digest(out: Path) -> str:
    files = json.loads((out / "shardmill.manifest.json").read_text())
    return json.dumps(files, sort_keys=True)


def built(parent: Path, out: Path, *more: str) -> dict[str, float]:
    shutil.rmtree(out, ignore_errors=True)
    return timed(build_command(parent, out, *more))


def by_workers(parent: Path, out: Path, counts: Sequence[int], kernel: str, rounds: int) -> dict[str, Any]:
    """Workers -> median wall seconds and processor seconds; asserts that all write the same manifest."""
    costs: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    manifests = set()
    for round_ in range(rounds):
        for count in counts:
            if round_ and count * 4 <= max(counts):
                continue  # the few-worker builds are long and steady
            costs[count].append(built(parent, out, "--kernel", kernel, "--workers", str(count)))
            manifests.add(manifest_digest(out))
    assert len(manifests) == 1, "the number of workers changed the manifest"
    return {
        str(count): {
            "wall": statistics.median(cost["wall"] for cost in each),
            "cpu": statistics.median(cost["user"] + cost["sys"] for cost in each),
            "walls": [round(cost["wall"], 2) for cost in each],
        }
        for count, each in costs.items()
    }


def parallel(command: str, files: Sequence[Path], cores: int) -> float:
    """Seconds of a shell command over all files, by as many processes as there are cores."""
    started = time.perf_counter()
    names = "\0".join(map(str, files)).encode()
    subprocess.run(
        ["xargs", "-0", "-n", "1", "-P", str(cores), "sh", "-c", command, "sh"],
        input=names,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - started


def limits(parent: Path, out: Path, copied: Path, cores: int) -> dict[str, float]:
    """Best of two, each."""

    def files(folder: Path) -> list[Path]:
        return sorted((p for p in folder.glob("*.safetensors")), key=lambda p: -p.stat().st_size)

    def cp() -> float:
        shutil.rmtree(copied, ignore_errors=True)
        copied.mkdir()
        return parallel(f'cp "$1" {copied}/', files(parent), cores)

    def tuned() -> float:
        shutil.rmtree(copied, ignore_errors=True)
        copied.mkdir()
        return timed([sys.executable, "-m", "bench.copy", str(parent), str(copied)])["wall"]

    found = {
        "cp": min(cp() for _ in range(2)),
        "tuned copy": min(tuned() for _ in range(2)),
        "sha256sum of the output": min(parallel('sha256sum "$1"', files(out), cores) for _ in range(2)),
    }
    shutil.rmtree(copied, ignore_errors=True)
    return found


def main() -> int:
    parser = options(__doc__, "cores.json", rounds=3)
    parser.set_defaults(work=Path("/dev/shm/shardmill-cores"))
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=40)
    parser.add_argument("--least", type=int, default=1)
    parser.add_argument("--most", type=int, default=usable_cores())
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    out, cores = asked.work / "out", asked.most
    dimensions = replace(SIZES["small"].dimensions, hidden=asked.hidden, experts=asked.experts)
    size = replace(
        SIZES["small"], dimensions=dimensions, cut=partial(cut, dimensions, FILE_BYTES, parent_bytes)
    )
    parent = grown(asked.work, "cores", size)
    facts: dict[str, Any] = {"machine": machine(), "workers": cores, "rounds": asked.rounds}
    facts["parent_bytes"] = sum(path.stat().st_size for path in parent.iterdir())
    facts["files"] = len(list(parent.glob("*.safetensors")))
    facts["builds"] = {}
    counts = [count for count in powers(cores) if count >= asked.least]
    for kernel in reversed(kernels()):
        facts["builds"][kernel] = by_workers(parent, out, counts, kernel, asked.rounds)
        tell(facts, asked.json)  # so that a run that is cut short leaves what it has
    facts["output_bytes"] = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    judge = shardmill("verify", "integrity", str(out), "--json")
    facts["integrity"] = statistics.median(timed(judge)["wall"] for _ in range(asked.rounds))
    facts["read + sha256"] = min(hashed(out) for _ in range(2))
    tell(facts, asked.json)
    facts["limits"] = limits(parent, out, asked.work / "copied", cores)
    facts["start"] = {
        "--help": timed(shardmill("--help"))["wall"],
        "plan": timed(shardmill("plan", "-c", str(RECIPE), "--parent", str(parent), "--json"))["wall"],
        "nothing to do": timed(build_command(parent, out))["wall"],
    }
    tell(facts, asked.json)
    facts["together_mib"] = {}
    for kernel in kernels():
        shutil.rmtree(out, ignore_errors=True)
        command = build_command(parent, out, "--kernel", kernel, "--workers", str(cores))
        facts["together_mib"][kernel] = round(together_mib(command))
    facts["load_after"] = os.getloadavg()[0]
    shutil.rmtree(asked.work, ignore_errors=True)
    tell(facts, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
