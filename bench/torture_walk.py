"""Random walks: edits of parent, output, state folder and recipe, each followed by a build: `make torture-walk`.

After every step the build is held against one from nothing: equal bytes, or exit code 1 or 2 with a sentence. What a
step does is drawn from a seed, which is printed, so that a walk can be walked again.

    python -m bench.torture_walk [--steps 2000] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from shardmill.pipeline.container.header import read_header
from shardmill.pipeline.errors import ShardmillError
from shardmill.pipeline.manifest.records import STATE_FOLDER
from shardmill.pipeline.run import schedule
from tests.pipeline.parents import RECIPE, build, change_tensor, published, write_parent

NUMERICS = ("amax/1", "ue8m0/1", "mse/1", "recover/1")


class KilledError(Exception):
    """Stands for a kill: the build ends here, with nothing tidied up."""


class Walk:
    """A parent, an output and a recipe that are edited at random."""

    def __init__(self, home: Path, seed: int) -> None:
        self.home, self.draw = home, random.Random(seed)
        self.parent, self.out = write_parent(home / "parent"), home / "out"
        self.pristine = Path(shutil.copytree(self.parent, home / "pristine"))
        self.recipe = RECIPE
        self.counts: Counter[str] = Counter()

    def step(self) -> str | None:
        """One to three edits and a build. The fault, in words; None where all is right."""
        edits = [self.draw.choice(EDITS) for _ in range(self.draw.randint(1, 3))]
        for edit in edits:
            edit(self)
        told = ", ".join(edit.__name__ for edit in edits)
        self.counts.update(edit.__name__ for edit in edits)
        if self.draw.random() < 0.2:
            self._killed_build()
        try:
            build(self.parent, self.out, self.recipe)
        except (ShardmillError, OSError) as error:
            return self._after_refusal(told, str(error))
        return self._compared(told)

    def _compared(self, told: str) -> str | None:
        fresh = self.home / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            build(self.parent, fresh, self.recipe)
        except ShardmillError as error:
            return f"after {told}: built, though a build from nothing says {error}"
        one, other = published(self.out), published(fresh)
        if one == other:
            self.counts["equal"] += 1
            return None
        return f"after {told}: differ in {sorted(name for name in {*one, *other} if one.get(name) != other.get(name))}"

    def _after_refusal(self, told: str, words: str) -> str | None:
        """A refusal is right where a build from nothing refuses too, or where the output is what is in the way."""
        self.counts["refused"] += 1
        fresh = self.home / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            build(self.parent, fresh, self.recipe)
        except (ShardmillError, OSError):
            self._restore()
            return None
        shutil.rmtree(self.out, ignore_errors=True)  # as every such sentence advises
        return None if words else f"after {told}: refused without a word"

    def _killed_build(self) -> None:
        """A build that dies after some of its shards, or in the middle of its commit."""
        left = self.draw.randint(0, 6)
        whole, real = schedule.finish_shard, os.replace

        def dying(*args: object, **options: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise KilledError
            return real(*args, **options)  # type: ignore[arg-type]

        os.replace = dying  # type: ignore[assignment]
        try:
            build(self.parent, self.out, self.recipe)
        except (KilledError, ShardmillError, OSError):
            self.counts["killed"] += 1
        finally:
            os.replace, schedule.finish_shard = real, whole

    def _restore(self) -> None:
        shutil.rmtree(self.parent)
        shutil.copytree(self.pristine, self.parent)
        self.recipe = RECIPE

    def some(self, folder: Path) -> Path | None:
        """A file below `folder`, drawn from all."""
        files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
        return self.draw.choice(files) if files else None


def weight_changes(walk: Walk) -> None:
    shard = walk.draw.choice(sorted(walk.parent.glob("*.safetensors")) or [None])
    if shard is not None:
        try:
            names = [ref.name for ref in read_header(shard, shard.name).tensors if ref.bytes]
        except ShardmillError:
            return
        change_tensor(shard, walk.draw.choice(names))


def parent_touched(walk: Walk) -> None:
    if path := walk.some(walk.parent):
        os.utime(path)


def parent_swapped_with_old_times(walk: Walk) -> None:
    """Other bytes under the times of before, as `tar -x` and `rsync -t` leave them."""
    if path := walk.some(walk.parent):
        facts = path.stat()
        weight_changes(walk)
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def parent_truncated(walk: Walk) -> None:
    if walk.draw.random() < 0.3 and (path := walk.some(walk.parent)):
        os.truncate(path, path.stat().st_size // 2)


def parent_restored(walk: Walk) -> None:
    walk._restore()


def side_file_comes_or_goes(walk: Walk) -> None:
    path = walk.parent / walk.draw.choice(["added.json", "assets", "assets/vocab.json"])
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()
    elif path.parent.is_dir():
        path.write_text("{}")


def output_flipped(walk: Walk) -> None:
    path = walk.some(walk.out)
    if path and path.stat().st_size and STATE_FOLDER not in path.parts:
        with path.open("r+b") as file:
            file.seek(walk.draw.randrange(path.stat().st_size))
            file.write(b"\x55")


def output_truncated(walk: Walk) -> None:
    if (path := walk.some(walk.out)) and STATE_FOLDER not in path.parts:
        os.truncate(path, path.stat().st_size // 2)


def output_removed(walk: Walk) -> None:
    if (path := walk.some(walk.out)) and STATE_FOLDER not in path.parts:
        path.unlink()


def state_garbled(walk: Walk) -> None:
    state = walk.out / STATE_FOLDER
    if path := walk.some(state):
        path.write_bytes(
            walk.draw.choice([b"", b"[]", b"{}", b"null", b'{"staged": 1}', os.urandom(40), b"[" * 5000])
        )


def state_leads_outside(walk: Walk) -> None:
    state = walk.out / STATE_FOLDER
    if state.is_dir() and walk.draw.random() < 0.2:
        journal = {
            "staged": {"../evil": None},
            "removed": ["../../pristine/config.json"],
            "entry": "model.safetensors",
        }
        (state / "commit.json").write_text(json.dumps(journal))


def state_removed(walk: Walk) -> None:
    if walk.draw.random() < 0.3:
        shutil.rmtree(walk.out / STATE_FOLDER, ignore_errors=True)


def recipe_changes(walk: Walk) -> None:
    numerics = walk.draw.choice(NUMERICS)
    block = walk.draw.choice(["[32, 32]", "[16, 16]", "[64, 64]"])
    walk.recipe = "\n".join(
        f'block = {block}\nnumerics = "{numerics}"' if line.startswith("block =") else line
        for line in RECIPE.splitlines()
        if not line.startswith("numerics")
    )


EDITS: tuple[Callable[[Walk], None], ...] = (
    weight_changes,
    parent_touched,
    parent_swapped_with_old_times,
    parent_truncated,
    parent_restored,
    side_file_comes_or_goes,
    output_flipped,
    output_truncated,
    output_removed,
    state_garbled,
    state_leads_outside,
    state_removed,
    recipe_changes,
)


def walk(seed: int, steps: int, home: Path) -> tuple[list[str], Counter[str]]:
    """The faults of a walk, and the counts of what was done."""
    walked, faults = Walk(home, seed), []
    for number in range(steps):
        if fault := walked.step():
            faults.append(f"seed {seed}, step {number}: {fault}")
        if number % 50 == 49:
            print(f"seed {seed}: {number + 1} steps, {len(faults)} faults", flush=True)
        if not (walked.pristine / "config.json").exists() or (home / "evil").exists():
            faults.append(f"seed {seed}, step {number}: a file outside the output was touched")
            break
    return faults, walked.counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torture-walk-") as home:
        faults, counts = walk(args.seed, args.steps, Path(home))
    print(f"seed {args.seed}: {args.steps} steps, {len(faults)} faults; {dict(sorted(counts.items()))}")
    for fault in faults:
        print(f"WRONG {fault}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
