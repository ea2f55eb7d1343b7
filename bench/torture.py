"""Tries to break a build: kill -9, a full disk, signals, a second build, a restless parent, flipped bits, many shards.

    python -m bench.torture [--kills 200] [--flips 1000] [--shards 10000] [--seed 1] [--jobs 2] [--only NAME]

Prints a line a trial kind with its counts and leaves 1 where one failed. It runs on the toy parent `tiny`, through
the command that a user calls, in processes of their own; builds that consume their parent on that of
bench.torture_kills, which also kills publications.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner

from bench.calls import BIG_RECIPE, RECIPE, recalibrate, shardmill
from bench.torture_kills import all_kills
from shardmill.pipeline.container.header import header_bytes, lay_out
from shardmill.verify.commands.group import verify

INDEX = "model.safetensors.index.json"
Tree = dict[str, str]


def build_command(parent: Path, out: Path) -> list[str]:
    return shardmill("build", "-c", str(RECIPE), "--parent", str(parent), "--out", str(out))


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


def start(command: list[str]) -> subprocess.Popen[str]:
    """A process that goes on while the trial does something to it."""
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def built(parent: Path, out: Path) -> Tree:
    """Builds and returns the tree; the build must succeed."""
    done = run(build_command(parent, out))
    assert done.returncode == 0, done.stderr
    return tree(out)


def tree(out: Path) -> Tree:
    """Published file -> sha256; the private state is left out."""
    return {
        path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file() and ".shardmill" not in path.relative_to(out).parts
    }


def whole_or_gated(out: Path, *checkpoints: Tree) -> bool:
    """The law of every moment: one of the checkpoints whole, or no index."""
    return not (out / INDEX).exists() or tree(out) in checkpoints


def orphans(out: Path) -> list[str]:
    state = out / ".shardmill"
    return [path.name for folder in ("staging", "receipts") for path in (state / folder).iterdir()]


class Bench:
    """The parents and reference trees that all trials share."""

    def __init__(self, work: Path, seed: int, jobs: int) -> None:
        self.work, self.random, self.jobs = work, random.Random(seed), jobs
        self.parent = work / "parent"
        made = run(shardmill("toy-parent", str(self.parent), "--size", "tiny"))
        assert made.returncode == 0, made.stderr
        started = time.monotonic()
        self.reference = built(self.parent, work / "reference")
        self.seconds = time.monotonic() - started
        self.recalibrated = work / "recalibrated"
        shutil.copytree(self.parent, self.recalibrated)
        recalibrate(self.recalibrated)
        self.updated = built(self.recalibrated, work / "updated")


def kills(bench: Bench, count: int, incremental: bool) -> int:
    """Kills a build at random moments; counts those after which a resume gave the reference bytes."""
    good = 0
    expected = bench.updated if incremental else bench.reference
    for trial in range(count):
        out = bench.work / "killed"
        shutil.rmtree(out, ignore_errors=True)
        if incremental:
            shutil.copytree(bench.work / "reference", out)
        process = start(build_command(bench.recalibrated if incremental else bench.parent, out))
        time.sleep(bench.random.random() * bench.seconds * 1.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        lawful = whole_or_gated(out, bench.reference, bench.updated) if out.exists() else True
        resumed = built(bench.recalibrated if incremental else bench.parent, out)
        if lawful and resumed == expected and not orphans(out):
            good += 1
        else:
            print(
                f"  trial {trial}: lawful {lawful}, same bytes {resumed == expected}, orphans {orphans(out)}"
            )
    return good


def _start_consuming(bench: Bench, home: Path) -> tuple[list[str], Path]:
    """A parent of its own, pinned, below the empty folder `home`; the command that consumes it, and its output."""
    shutil.copytree(bench.parent, home / "parent")
    recipe = home / "recipe" / RECIPE.name
    recipe.parent.mkdir()
    shutil.copy(RECIPE, recipe)
    lock = bench.work / "torture.lock"
    if not lock.exists():
        assert run(shardmill("pin", "-c", str(recipe), "--parent", str(home / "parent"))).returncode == 0
        shutil.copy(recipe.with_suffix(".lock"), lock)
    shutil.copy(lock, recipe.with_suffix(".lock"))
    words = ["build", "-c", str(recipe), "--parent", str(home / "parent"), "--out", str(home / "out")]
    return shardmill(*words), home / "out"


def consuming_kills(bench: Bench, count: int) -> int:
    """Kills builds that consume their parent at random moments; counts those that lost nothing."""
    found = all_kills("consume", bench.random.randrange(1 << 31), count, bench.jobs, bench.work)
    for fault in found.faults:
        print(f"  {fault}")
    return count - len(found.faults)


def consuming_disk(bench: Bench, count: int) -> int:
    """A file system of the parent and 1.1 of its largest shard (and pages for small files) is enough."""
    good = 0
    for _ in range(count):
        mount = bench.work / "one-disk"
        mount.mkdir(exist_ok=True)
        sizes = [path.stat().st_size for path in bench.parent.rglob("*") if path.is_file()]
        small = (4 << 20) + 4096 * len(
            sizes
        )  # manifest, records and receipts: as large for any size of shards
        room = sum(sizes) + int(1.1 * max(sizes)) + small
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(mount)], check=True)
        try:
            command, out = _start_consuming(bench, mount)
            done = run([*command, "--consume-parent"])
            files = {path.name: digest for path, digest in ((Path(n), d) for n, d in tree(out).items())}
            same = all(
                files[name] == digest for name, digest in bench.reference.items() if "safetensors" in name
            )
            good += done.returncode == 0 and same
            if done.returncode:
                print(f"  exit {done.returncode}: {done.stderr[-300:]}")
        finally:
            subprocess.run(["umount", str(mount)], check=False)
    return good


def full_disk(bench: Bench, count: int) -> int:
    """Builds onto small file systems, one after another larger; an earlier checkpoint there stays whole."""
    good = 0
    size = sum(path.stat().st_size for path in (bench.work / "reference").rglob("*") if path.is_file())
    for trial in range(count):
        mount = bench.work / "small-disk"
        mount.mkdir(exist_ok=True)
        room = size + int(size * (trial + 1) / (count + 1))
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(mount)], check=True)
        try:
            out = mount / "out"
            shutil.copytree(bench.work / "reference", out)
            parent = bench.work / "other"
            if not parent.exists():
                shutil.copytree(bench.parent, parent)
                _change_shards(parent)
            filler = mount / "filler"
            process = start(build_command(parent, out))
            time.sleep(bench.random.random() * bench.seconds)
            _fill(filler, mount)
            error = process.communicate()[1]
            lawful = whole_or_gated(out, bench.reference) or process.returncode == 0
            clear = process.returncode == 0 or (
                process.returncode == 1 and "Traceback" not in error and "Error:" in error
            )
            filler.unlink(missing_ok=True)
            subprocess.run(["mount", "-o", f"remount,size={3 * size}", str(mount)], check=True)
            if not (bench.work / "changed").exists():
                built(parent, bench.work / "changed")
            same = built(parent, out) == tree(bench.work / "changed")
            good += lawful and clear and same
            if not (lawful and clear and same):
                print(f"  trial {trial}: lawful {lawful}, clear {clear}, same {same}: {error[-300:]}")
        finally:
            subprocess.run(["umount", str(mount)], check=False)
    return good


def _change_shards(parent: Path) -> None:
    """Flips two bits of the last byte of every numbered shard, so that each must be made again."""
    for path in parent.glob("model-0*.safetensors"):
        _flip(path, path.stat().st_size - 1, 0x11)


def _fill(path: Path, mount: Path) -> None:
    free = shutil.disk_usage(mount).free
    with path.open("wb") as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, max(free - 4096, 1))


def signals(bench: Bench, count: int) -> int:
    """SIGINT and SIGTERM at random moments: gone within a second of the shell's own delay, 130 or 143, resumable."""
    good = 0
    for trial in range(count):
        which, code = ((signal.SIGINT, 130), (signal.SIGTERM, 143))[trial % 2]
        out = bench.work / "signalled"
        shutil.rmtree(out, ignore_errors=True)
        process = start(build_command(bench.parent, out))
        while not (out / ".shardmill" / "staging").exists() and process.poll() is None:
            time.sleep(0.005)
        time.sleep(bench.random.random() * 0.2)
        if process.poll() is None:
            process.send_signal(which)
        started = time.monotonic()
        error = process.communicate()[1]
        late = time.monotonic() - started
        told = process.returncode in (code, 0) and "Traceback" not in error
        same = built(bench.parent, out) == bench.reference
        good += told and same and late < 1.0
        if not (told and same and late < 1.0):
            print(f"  trial {trial}: exit {process.returncode}, {late:.2f} s, same {same}: {error[-300:]}")
    return good


def two_builds(bench: Bench, count: int) -> int:
    """Two builds at once in one folder: one does it, the other refuses in a sentence or finds it done."""
    good = 0
    for _ in range(count):
        out = bench.work / "shared"
        shutil.rmtree(out, ignore_errors=True)
        pair = [start(build_command(bench.parent, out)) for _ in range(2)]
        errors = [process.communicate()[1] for process in pair]
        codes = sorted(process.returncode for process in pair)
        refused = all(
            "another build is at work" in e for e, p in zip(errors, pair, strict=True) if p.returncode
        )
        good += codes in ([0, 0], [0, 1]) and refused and tree(out) == bench.reference
    return good


def restless_parent(bench: Bench, count: int) -> int:
    """A parent file that is touched or replaced during the build is refused by name, or was read before."""
    good = 0
    for _ in range(count):
        out, parent = bench.work / "restless-out", bench.work / "restless"
        for path in (out, parent):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(bench.parent, parent)
        victim = parent / "model-00004-of-00004.safetensors"
        process = start(build_command(parent, out))
        while not (out / ".shardmill" / "started.json").exists() and process.poll() is None:
            time.sleep(0.002)
        os.utime(victim)
        error = process.communicate()[1]
        refused = (
            process.returncode == 1
            and victim.name in error
            and "changed" in error
            and not (out / INDEX).exists()
        )
        good += refused or (process.returncode == 0 and tree(out) == bench.reference)
    return good


def bit_flips(bench: Bench, count: int) -> int:
    """One random bit of one random published file, flipped: integrity finds it and names the file."""
    good = 0
    out = bench.work / "flipped"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(bench.work / "reference", out, ignore=shutil.ignore_patterns(".shardmill"))
    files = sorted(path for path in out.rglob("*") if path.is_file())
    for trial in range(count):
        path = bench.random.choice(files)
        place, bit = bench.random.randrange(path.stat().st_size), 1 << bench.random.randrange(8)
        _flip(path, place, bit)
        done = CliRunner().invoke(verify, ["integrity", str(out), "--json"])  # here: a thousand starts less
        _flip(path, place, bit)
        findings = json.loads(done.stdout)["findings"] if done.stdout else []
        found = done.exit_code == 1 and any(path.name in json.dumps(finding) for finding in findings)
        good += found
        if not found:
            print(
                f"  trial {trial}: {path.name} byte {place} bit {bit}: exit {done.exit_code}, {findings[:2]}"
            )
    return good


def many_shards(bench: Bench, count: int) -> int:
    """A parent of `count` shards is built and judged by processes that may open 128 files; counts the shards made."""
    parent, out, recipe = bench.work / "many", bench.work / "many-out", bench.work / "many.toml"
    parent.mkdir()
    weight_map = {}
    for number in range(count):
        file, name = f"model-{number + 1:05d}-of-{count:05d}.safetensors", f"layers.{number}.weight"
        header = lay_out([(name, "BF16", (128, 128))], file, {"format": "pt"})
        weights = (0x3F80 + number % 128).to_bytes(2, "little") * (128 * 128)
        (parent / file).write_bytes(header_bytes(header) + weights)
        weight_map[name] = file
    (parent / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (parent / "config.json").write_text("{}")
    recipe.write_text(
        BIG_RECIPE.replace("lm_head.weight", "layers.*.weight").replace("expect = 1", f"expect = {count}")
    )
    few = ["sh", "-c", 'ulimit -n 128; "$@"', "sh"]
    command = shardmill("build", "-c", str(recipe), "--parent", str(parent), "--out", str(out))
    for asked in (command, shardmill("verify", "integrity", str(out))):
        done = run([*few, *asked])
        if done.returncode:
            print(f"  {asked[3]}: exit {done.returncode}: {(done.stderr or done.stdout)[-300:]}")
            return 0
    return len(list(out.glob("model-*.safetensors")))


def _flip(path: Path, place: int, bits: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ bits]))


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--kills", type=int, default=200)
    options.add_argument("--flips", type=int, default=1000)
    options.add_argument("--shards", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument(
        "--jobs", type=int, default=2, help="processes that kill builds which consume their parent"
    )
    options.add_argument("--only", default="", help="the trials whose name holds this")
    asked = options.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job would pass on that it is ignored
    few = max(4, asked.kills // 10)
    trials: list[tuple[str, int, Callable[[Bench, int], int]]] = [
        ("kill -9 in a build, resumed", asked.kills, lambda bench, n: kills(bench, n, incremental=False)),
        (
            "kill -9 in an incremental build, resumed",
            asked.kills,
            lambda bench, n: kills(bench, n, incremental=True),
        ),
        ("kill -9 in a build that consumes its parent", asked.kills, consuming_kills),
        ("SIGINT and SIGTERM", few, signals),
        ("two builds in one folder", few, two_builds),
        ("a parent that changes meanwhile", few, restless_parent),
        ("bit flips found by integrity", asked.flips, bit_flips),
        ("shards of one parent", asked.shards, many_shards),
    ]
    if os.geteuid() == 0:
        trials.insert(4, ("a full disk (tmpfs)", few, full_disk))
        trials.insert(4, ("a disk of the parent and 1.1 of its largest shard (tmpfs)", 1, consuming_disk))
    failed = False
    with tempfile.TemporaryDirectory(prefix="shardmill-torture-") as folder:
        bench = Bench(Path(folder), asked.seed, asked.jobs)
        for name, count, trial in [each for each in trials if asked.only in each[0]]:
            good = trial(bench, count)
            failed |= good != count
            print(f"{name}: {good} of {count}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
