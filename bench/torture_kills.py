"""Kills commands at random moments and runs them again: builds that consume their parent, publications, builds into a
hub.

    python -m bench.torture_kills [--kinds consume publish stream] [--kills 200] [--jobs 2] [--seed 1]

Each kill has a folder of its own, below --home, and a small parent. Of a build that consumes its parent, at every
kill each shard of the parent or all that is made from it must be whole, and the same command must end with the
sha256s of an ordinary build. Of a publication, the branch must show its old commit or the whole new one, and the same
command must end with the new one, with no finished file sent twice. The hub is the tests' own, on loopback. Commands
run in forks of a process that has imported everything, so that the kills fall into the work. Prints where they fell;
leaves 1 where anything was wrong. `publish` and `stream` need huggingface_hub and safetensors, `consume` neither.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.pipeline.commands import build as build_command  # noqa: F401  imported once, before any fork
from shardmill.pipeline.commands import pin as pin_command  # noqa: F401
from shardmill.pipeline.commands.main import answer
from shardmill.pipeline.container.header import header_bytes, lay_out
from shardmill.pipeline.types import INDEX_FILE

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RECIPE = f"""
format = 1
name = "small"
[parent]
repository = "nobody/small"
revision = "{COMMIT}"
[[family]]
name = "converted"
match = "layers.*.weight"
action = "quantize"
block = [32, 32]
expect = 8
[[family]]
name = "kept"
match = "kept.*.weight"
action = "keep"
reason = "passed on"
"""
_SHARDS = 12  # every third one is passed on
_TIMED = 3  # whole runs that tell how long one takes
_BEYOND = 1.1  # of that time, in which the kills fall


@dataclass(frozen=True, slots=True)
class Found:
    """What some kills came to: sentences of what was wrong, and how often a kill fell where."""

    faults: tuple[str, ...]
    moments: Counter[str]


def write_parent(folder: Path) -> Path:
    """A parent of small shards of one BF16 matrix each."""
    folder.mkdir(parents=True)
    weight_map = {}
    for number in range(_SHARDS):
        name = f"{'layers' if number % 3 else 'kept'}.{number}.weight"
        file = f"model-{number + 1:05d}-of-{_SHARDS:05d}.safetensors"
        header = lay_out([(name, "BF16", (128, 128))], file, {"format": "pt"})
        weights = bytes(byte for place in range(128 * 128) for byte in (place * (number + 3) % 251, 0x3F))
        (folder / file).write_bytes(header_bytes(header) + weights)
        weight_map[name] = file
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"tokens": []}\n')
    return folder


def write_recipe(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "small.toml"
    path.write_text(RECIPE)
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    """Published file -> bytes."""
    found = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name.as_posix(): path.read_bytes() for name, path in found.items() if name.parts[0] != ".shardmill"
    }


def forked(words: list[str], log: Path, kill_after: float | None = None, sign: Path | None = None) -> int:
    """The exit code of a command in a fork of this process; below 0, the signal that ended it.

    kill_after: seconds from its start, or from the moment at which the file `sign` is there.
    """
    child = os.fork()
    if not child:
        with log.open("wb") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        sys.argv = ["shardmill", *words]
        code = answer()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if kill_after is not None:
        while (
            sign
            and not sign.exists()
            and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ):
            time.sleep(0.001)
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def timed(run: Callable[[], Any]) -> float:
    """Seconds that a whole run takes."""
    began = time.monotonic()
    run()
    return time.monotonic() - began


def draws(run: Callable[[int], Any], draw: random.Random, kills: int) -> Iterator[float]:
    """A moment for each kill, within a little more than the time that `run` takes."""
    seconds = statistics.median(timed(lambda number=number: run(number)) for number in range(_TIMED))
    for _ in range(kills):
        yield draw.random() * _BEYOND * seconds


class Consuming:
    """Builds of one parent that is pinned once; each consumes a copy of it."""

    def __init__(self, home: Path) -> None:
        self.home, self.log = home, home / "log"
        self.pristine, self.recipe = write_parent(home / "pristine"), write_recipe(home / "pinned")
        pinned = forked(["pin", "-c", str(self.recipe), "--parent", str(self.pristine)], self.log)
        assert pinned == 0, self.log.read_text()
        assert self.run("ordinary", consume=False) == 0, self.log.read_text()
        self.ordinary = files_of(home / "ordinary/out")

    def run(
        self, name: str, kill_after: float | None = None, in_work: bool = False, consume: bool = True
    ) -> int:
        """A build in the folder `name`, which is prepared where it is not there. in_work: once it makes shards."""
        folder = self.home / name
        if not folder.exists():
            shutil.copytree(self.pristine, folder / "parent")
            shutil.copytree(self.recipe.parent, folder / "recipe")
        words = ["build", "-c", str(folder / "recipe" / self.recipe.name), "--parent", str(folder / "parent")]
        words += ["--out", str(folder / "out"), "--kernel", "numpy", "--workers", "1"]
        sign = folder / "out/.shardmill/staging" if in_work else None
        return forked([*words, *(["--consume-parent"] if consume else [])], self.log, kill_after, sign)

    def left(self, name: str) -> int:
        """How many of the parent's shards are there."""
        return len(list((self.home / name / "parent").glob("*.safetensors")))

    def lost(self, name: str) -> Iterator[str]:
        """Shards of which neither the parent's bytes nor the child's are there whole."""
        folder = self.home / name
        for path in self.pristine.glob("*.safetensors"):
            parent = folder / "parent" / path.name
            if parent.is_file() and parent.read_bytes() == path.read_bytes():
                continue
            places = (folder / "out/.shardmill/staging" / path.name, folder / "out" / path.name)
            if not any(
                child.is_file() and child.read_bytes() == self.ordinary[path.name] for child in places
            ):
                yield path.name


def consume(home: Path, draw: random.Random, kills: int) -> Found:
    """Kills builds that consume their parent; every second one once it is at its shards."""
    trial, faults, moments = Consuming(home), [], Counter[str]()
    for number, seconds in enumerate(draws(lambda number: trial.run(f"timed-{number}"), draw, kills)):
        name = f"kill-{number}"
        at_shards = number % 2 == 1
        code, left = trial.run(name, seconds / (3 if at_shards else 1), at_shards), trial.left(name)
        moments[f"{left:2} shards of the parent left" if code else "after its end"] += 1
        said = trial.log.read_text() if code > 0 else ""
        if lost := sorted(trial.lost(name)):
            faults.append(f"killed after {seconds:.3f} s: neither parent nor child is whole: {lost}")
        again = trial.run(name)
        if said or again or files_of(home / name / "out") != trial.ordinary or trial.left(name):
            faults.append(
                f"killed after {seconds:.3f} s: exit {code} {said}, then {again}: {trial.log.read_text()}"
            )
        shutil.rmtree(home / name)
    return Found(tuple(faults), moments)


@contextmanager
def environment(home: Path) -> Iterator[None]:
    """Where a hub's library and a build keep their own; restored at the end."""
    before = dict(os.environ)
    os.environ.update(
        XDG_CACHE_HOME=str(home / "cache"),
        HF_HOME=str(home / "hf"),
        HF_TOKEN="hf_none",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        OMP_NUM_THREADS="1",
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def onto_hub(home: Path, words: list[str], draw: random.Random, kills: int) -> Found:
    """Kills commands that show on the branch main of me/child what `home`/near holds."""
    from tests.pipeline.publish.hub import Hub, serving
    from tests.pipeline.publish.publisher import Publisher

    after = files_of(home / "near")
    first = min(name for name in after if name.endswith(".safetensors"))
    before = {"config.json": b"{}", "old.safetensors": b"o", first: after[first][:-1] + b"?"}
    faults, moments = [], Counter[str]()
    with environment(home), serving(Hub()) as hub:
        repository = hub.add("nobody/small", files_of(home / "pristine"))
        repository.commits[COMMIT] = repository.commits[repository.branches["main"]]
        publisher = Publisher(hub, home / "said")

        def fresh() -> None:
            hub.add("me/child", before)
            hub.calls.clear()
            hub.sent.clear()
            shutil.rmtree(home / "cache" / "shardmill" / "out", ignore_errors=True)

        def whole(_: int) -> None:
            fresh()
            ended = publisher.run(hub, words)
            assert ended == "ended 0", f"{words}: {ended}"

        for seconds in draws(whole, draw, kills):
            fresh()
            ended, shown = publisher.run(hub, words, seconds=seconds), hub.repositories["me/child"].head()
            moments[f"{len(hub.sent)} sent, {'new' if shown == after else 'old'} commit, {ended}"] += 1
            again = publisher.run(hub, words)
            repository = hub.repositories["me/child"]
            wrong = {
                "neither the old commit nor the new one": shown not in (before, after),
                f"then {again}: {(home / 'said').read_text()[-300:]}": again != "ended 0",
                "another commit in the end": repository.head() != after,
                "a finished file was sent twice": max(hub.sent.values(), default=0) > 1,
                "more than one commit": len(repository.messages) != 2,
            }
            faults += [f"killed after {seconds:.3f} s: {what}" for what, is_so in wrong.items() if is_so]
        publisher.close()
    return Found(tuple(faults), moments)


def _built(home: Path) -> list[str]:
    """Builds `home`/near, the checkpoint that is published; what `build` is called with but for its places."""
    recipe = write_recipe(home / "recipe")
    write_parent(home / "pristine")
    words = ["build", "-c", str(recipe), "--kernel", "numpy", "--workers", "1"]
    near = ["--parent", str(home / "pristine"), "--out", str(home / "near")]
    assert forked([*words, *near], home / "log") == 0, (home / "log").read_text()
    return words


def publish(home: Path, draw: random.Random, kills: int) -> Found:
    """Kills publications of a checkpoint, a third of which the parent's repository holds."""
    _built(home)
    return onto_hub(home, ["publish", str(home / "near"), "hf://me/child"], draw, kills)


def stream(home: Path, draw: random.Random, kills: int) -> Found:
    """Kills builds from a hub into a hub."""
    places = ["--parent", f"hf://nobody/small@{COMMIT}", "--out", "hf://me/child"]
    words = [*_built(home), *places, "--workers", "2"]
    return onto_hub(home, words, draw, kills)


KINDS: dict[str, Callable[[Path, random.Random, int], Found]] = {
    "consume": consume,
    "publish": publish,
    "stream": stream,
}


def some_kills(kind: str, seed: int, kills: int, place: Path | None) -> Found:
    """Kills of one kind, in a temporary folder in `place`."""
    with tempfile.TemporaryDirectory(prefix="torture-kills-", dir=place) as home:
        return KINDS[kind](Path(home).resolve(), random.Random(seed), kills)


def all_kills(kind: str, seed: int, kills: int, jobs: int, place: Path | None = None) -> Found:
    """Kills of one kind, shared by `jobs` processes."""
    shares = [kills // jobs + (number < kills % jobs) for number in range(jobs)]
    count = sum(share > 0 for share in shares)
    with ProcessPoolExecutor(jobs) as pool:
        seeds = range(seed, seed + count)
        found = list(pool.map(some_kills, [kind] * count, seeds, shares[:count], [place] * count))
    moments = sum((each.moments for each in found), Counter[str]())
    return Found(tuple(fault for each in found for fault in each.faults), moments)


def main() -> int:
    memory = Path("/dev/shm")
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    options.add_argument("--kills", type=int, default=200, help="of each kind")
    options.add_argument("--jobs", type=int, default=2, help="processes that share the kills")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--home", type=Path, default=memory if memory.is_dir() else None)
    asked = options.parse_args()
    wrong = False
    for kind in asked.kinds:
        began = time.monotonic()
        found = all_kills(kind, asked.seed, asked.kills, asked.jobs, asked.home)
        wrong |= bool(found.faults)
        print(f"{kind}: {asked.kills} kills, {len(found.faults)} faults, {time.monotonic() - began:.0f} s")
        for moment, count in sorted(found.moments.items()):
            print(f"  {count:4} fell: {moment}")
        for fault in found.faults:
            print(f"  WRONG {fault}", flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
