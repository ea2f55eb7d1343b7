"""Full forwards on this machine's GPU: makes the toys, runs the cases side by side, judges them, writes the table.

    make gpu-forward                                       a python3 with vLLM 0.33.0 and the serving wheel
    make gpu-forward PARTS=folder                          a python3 with torch alone: vLLM comes from packed parts

Cases run `--jobs` at a time, in the order of the table; no case is begun that would not end before `--minutes`. What
was not run is named in the table. A first run compiles for four minutes; its caches and answers are kept in the work
folder, and another run goes on from them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests.runtime_patch.gpu import judge, toy
from tests.runtime_patch.gpu.cases import CASES

REPOSITORY = Path(__file__).parents[3]
ENDS_SECONDS = 75  # a case of a warm machine takes about so long
# vLLM's processes, workers and servers among them, find the harness's changes (inside.py) by an entry point.
HARNESS = {
    "METADATA": "Metadata-Version: 2.1\nName: gpu-forward\nVersion: 0.1\n",
    "entry_points.txt": "[vllm.general_plugins]\nharness = tests.runtime_patch.gpu.inside:prepare\n",
}
STUBS = ("_vllm_fa2_C", "_vllm_fa3_C")  # FlashAttention's extensions are not on this path and are not packed


def unpack(parts: Path, work: Path) -> list[str]:
    """Unpacks vLLM's parts and the serving wheel; the folders that must lead PYTHONPATH."""
    tree, site, plugin = work / "tree", work / "site", work / "plugin"
    if not (work / "unpacked").exists():
        for name, folder in (("vllm-py", tree), ("vllm-so", tree), ("site", site)):
            with tarfile.open(parts / f"{name}.tar.xz") as archive:
                archive.extractall(folder, filter="fully_trusted")
        for stub in STUBS:
            (tree / "vllm" / "vllm_flash_attn" / f"{stub}.py").write_text("")
        (wheel,) = parts.glob("shardmill_serving*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(plugin)
        (work / "unpacked").touch()
    return [str(folder) for folder in (plugin, site, tree)]


def environment(work: Path, leading: list[str]) -> dict[str, str]:
    """A case's environment. The checkout itself stays off its path: its folder `kernels` has transformers' name."""
    cache, own_tests = work / "cache", work / "own" / "tests"
    own_tests.parent.mkdir(exist_ok=True)
    if not own_tests.exists():
        own_tests.symlink_to(REPOSITORY / "tests")
    harness = own_tests.parent / "gpu_forward-0.1.dist-info"
    harness.mkdir(exist_ok=True)
    for name, text in HARNESS.items():
        (harness / name).write_text(text)
    own = {
        "PYTHONPATH": os.pathsep.join([*leading, str(own_tests.parent), str(REPOSITORY / "src")]),
        "PYTHONUNBUFFERED": "1",
        "VLLM_CACHE_ROOT": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "DG_JIT_CACHE_DIR": str(cache / "dg"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
        "VLLM_USE_DEEP_GEMM_E8M0": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "OMP_NUM_THREADS": "2",
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    if "CUDA_HOME" not in inherited and (nvcc := _nvcc()):
        own["CUDA_HOME"] = str(nvcc.parents[1])
    return inherited | own


def _nvcc() -> Path | None:
    places = [Path("/usr/local/cuda/bin/nvcc"), *sorted(Path("/usr/local").glob("cuda-*/bin/nvcc"))]
    return next((place.resolve() for place in places if place.exists()), None)


def make_toys(folder: Path, packages: str) -> None:
    """parent, child, both with one bit of noise, and the parent with the child's weights decoded."""
    if (folder / "made").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    _shardmill(packages, "toy-parent", folder / "parent", "--size", "vllm")
    toy.inform(folder / "parent")
    recipe = REPOSITORY / "pipeline.toml"
    _shardmill(
        packages,
        "build",
        "-c",
        recipe,
        "--parent",
        folder / "parent",
        "--out",
        folder / "child",
        "--kernel",
        "numpy",
    )
    toy.add_processor(folder / "parent")
    toy.add_processor(folder / "child")
    toy.one_bit(folder / "parent", folder / "bit")
    toy.one_bit(folder / "child", folder / "child bit")
    toy.decoded(folder / "parent", folder / "child", folder / "decoded")
    (folder / "made").touch()


def _shardmill(packages: str, *words: object) -> None:
    program = "from shardmill.pipeline.commands.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), packages])},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"shardmill {words[0]}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")


def file_name(case: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in case)


def answered(work: Path, case: str) -> bool:
    """Whether an earlier run of this folder has the case's answer, or its refusal."""
    path = work / "answers" / f"{file_name(case)}.json"
    return path.exists() and (
        "error" not in (found := json.loads(path.read_text())) or bool(CASES[case].refused and found)
    )


@dataclass
class Running:
    """A case that runs: its process, when it began, its log, and the cards that it holds."""

    process: subprocess.Popen[bytes]
    begun: float
    log: Path
    cards: tuple[int, ...]


def start(name: str, work: Path, environ: dict[str, str], cards: tuple[int, ...]) -> Running:
    out = work / "answers"
    answer, log = out / f"{file_name(name)}.json", out / f"{file_name(name)}.log"
    words = [sys.executable, "-m", "tests.runtime_patch.gpu.drive", name, work / "toys", answer]
    process = subprocess.Popen(
        list(map(str, words)),
        cwd=work,
        env=environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, cards))},
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return Running(process, time.monotonic(), log, cards)


def free_cards(ranks: int, load: list[int], jobs: int, held: bool) -> tuple[int, ...] | None:
    """The `ranks` cards with the fewest cases; None where they are not free. Card 0 is not while it is held.

    Cases of several ranks may crowd a card a little: else they would wait until two cards have a place at once.
    """
    most = jobs + 3 * (ranks > 1)
    free = [card for card, cases in enumerate(load) if cases < most and not (held and card == 0)]
    chosen = sorted(free, key=lambda card: (load[card], -card))[:ranks]
    return tuple(sorted(chosen)) if len(chosen) == ranks else None


def run(
    names: list[str],
    work: Path,
    environ: dict[str, str],
    jobs: int,
    ends: float,
    cards: int = 1,
    hold: Path | None = None,
) -> None:
    """Keeps `jobs` cases running on each card. A case that still runs at the end is killed with what it started.

    Card 0 is left alone while the file `hold` exists: something else is timed there.
    """
    (work / "answers").mkdir(exist_ok=True)
    waiting, load = list(names), [0] * cards
    running: dict[str, Running] = {}
    while waiting or running:
        for name in list(waiting):
            held = hold is not None and hold.exists()
            chosen = free_cards(CASES[name].ranks, load, jobs, held)
            if chosen is None or time.monotonic() >= ends - ENDS_SECONDS:
                continue
            waiting.remove(name)
            running[name] = start(name, work, environ, chosen)
            for card in chosen:
                load[card] += 1
        for name, one in list(running.items()):
            if one.process.poll() is None and time.monotonic() < ends:
                continue
            if one.process.poll() is None:
                os.killpg(one.process.pid, signal.SIGKILL)
                one.process.wait()
            del running[name]
            for card in one.cards:
                load[card] -= 1
            said = one.log.read_text(errors="replace").splitlines()
            last = [line for line in said if "RESULT" in line or "Error" in line][-1:]
            print(
                f"{time.monotonic() - one.begun:5.0f} s  {name}: rc {one.process.returncode} {last}",
                flush=True,
            )
        if not running and time.monotonic() >= ends - ENDS_SECONDS:
            return
        time.sleep(0.5)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=Path, help="vLLM's packed parts (pack.py), where it is not installed")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "build" / "gpu-forward")
    parser.add_argument("--jobs", type=int, default=8, help="cases at a time on each card")
    parser.add_argument(
        "--cards", type=int, default=1, help="GPUs of this machine; cases of two ranks need two"
    )
    parser.add_argument("--hold", type=Path, help="card 0 is left alone while this file exists")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--case", action="append", help="only these cases; may be given again")
    given = parser.parse_args()
    ends = time.monotonic() + given.minutes * 60
    if unknown := set(given.case or ()) - set(CASES):
        parser.error(f"unknown cases {sorted(unknown)}; known are {', '.join(CASES)}")
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    leading = unpack(given.parts.resolve(), work) if given.parts else []
    make_toys(work / "toys", leading[1] if leading else "")
    print(f"{given.minutes * 60 - ends + time.monotonic():5.0f} s  unpacked, toys made", flush=True)
    names = [name for name in given.case or CASES if not answered(work, name)]
    names = [name for name in names if CASES[name].ranks <= given.cards]
    run(names, work, environment(work, leading), given.jobs, ends, given.cards, given.hold)
    verdict = judge.judge(work / "answers")
    (work / "forward.json").write_text(json.dumps(verdict, indent=1))
    (work / "forward.md").write_text(judge.markdown(verdict))
    print(judge.markdown(verdict))
    broken = [row for row in verdict["pairs"] if row["holds"] is False]
    return (
        1 if broken or verdict["errors"] or not all(r["holds"] for r in verdict["refusals"].values()) else 0
    )


if __name__ == "__main__":
    raise SystemExit(main())
