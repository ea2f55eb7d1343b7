"""Random walks: edits of parent, output, state folder and recipe, each followed by a build: `make torture-walk`.

After every step the build is held against one from nothing: equal bytes, or a refusal with a sentence; and `explain`
must have named the shards that it made. A step may kill the build at any of its effects on the file system. What a step
does is drawn from a seed, which is printed, so that a walk can be walked again. A walk runs in one process, in memory;
several seeds share the steps, and --jobs spreads them over processes.

    python -m bench.torture_walk [--steps 2000] [--seeds 1 2 3 4] [--jobs 2]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardmill.pipeline.container.header import read_header
from shardmill.pipeline.errors import ShardmillError
from shardmill.pipeline.manifest.records import MANIFEST_FILE, STATE_FOLDER
from shardmill.pipeline.run import build as run
from shardmill.pipeline.stages.job import Settings, Watch
from tests.pipeline.parents import RECIPE, prepare, published, write_parent

NUMERICS = ("amax/1", "ue8m0/1", "mse/1", "recover/1")
_EFFECTS = ("replace", "rename", "unlink", "mkdir", "rmdir")  # of Path, each a place to die
_OS_EFFECTS = ("fsync", "pwrite", "link", "posix_fallocate")  # of os


class Killed(BaseException):
    """Stands for a kill: the build ends here, with nothing tidied up."""


class Walk:
    """A parent, an output and a recipe that are edited at random."""

    def __init__(self, home: Path, seed: int) -> None:
        self.home, self.draw = home, random.Random(seed)
        self.parent, self.out = write_parent(home / "parent"), home / "out"
        self.pristine = Path(shutil.copytree(self.parent, home / "pristine"))
        self.recipe = RECIPE
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()

    def step(self) -> str | None:
        """One to three edits and a build. The fault, in words; None where all is right."""
        edits = [self.draw.choice(EDITS) for _ in range(self.draw.randint(1, 3))]
        for edit in edits:
            edit(self)
        self.counts.update(edit.__name__ for edit in edits)
        what = ", ".join(edit.__name__ for edit in edits)
        if self.draw.random() < 0.3 and self._killed_build():
            what += ", killed"
        settings = self._settings()
        promised = self._explained(settings)
        try:
            summary = self._build(self.out, settings)
        except (ShardmillError, OSError) as error:
            return self._after_refusal(what, error)
        except Exception as error:
            return f"after {what}: {error!r}"
        made = {verdict.file for verdict in summary.made}
        if promised is not None and promised != made:
            return f"after {what}: explain named {sorted(promised)}, the build made {sorted(made)}"
        return self._compared(what, settings)

    def _settings(self) -> Settings:
        passthrough = self.draw.choice(["copy", "copy", "hardlink", "reflink"])
        paranoid, digests = self.draw.random() < 0.1, self.draw.random() < 0.9
        return Settings(kernel="numpy", passthrough=passthrough, paranoid=paranoid, file_digests=digests)

    def _build(self, out: Path, settings: Settings) -> run.Summary:
        return run.build(prepare(self.parent, self.recipe), out, settings, Watch())

    def _explained(self, settings: Settings) -> set[str] | None:
        """The shards that a build would make; None where it is not asked, or a commit is to be ended first."""
        if self.draw.random() < 0.5 or (self.out / STATE_FOLDER / "commit.json").exists():
            return None
        try:
            found = run.explain(prepare(self.parent, self.recipe), self.out, settings, lambda line: None)
        except (ShardmillError, OSError):
            return None
        return {verdict.file for verdict in found.shards if verdict.reason}

    def _compared(self, what: str, settings: Settings) -> str | None:
        fresh = self.home / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            self._build(fresh, replace(settings, passthrough="copy"))
        except ShardmillError as error:
            return f"after {what}: built, though a build from nothing says {error}"
        one, other = published(self.out), published(fresh)
        if one == other:
            self.counts["equal"] += 1
            return None
        differ = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
        return f"after {what}: differ in {differ}"

    def _after_refusal(self, what: str, error: Exception) -> str | None:
        """A refusal is right where a build from nothing refuses too, or where the output is what is in the way."""
        self.counts["refused"] += 1
        fresh = self.home / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            self._build(fresh, Settings(kernel="numpy"))
        except (ShardmillError, OSError):
            self._restore()
            return None
        shutil.rmtree(self.out, ignore_errors=True)  # as every such sentence advises
        self.counts["refused for the output alone"] += 1
        words = str(error).replace(str(self.home), "")
        self.refusals[words[:160]] += 1
        return None if words and "/" in str(error) else f"after {what}: refused without a path: {words!r}"

    def _killed_build(self) -> bool:
        """A build that dies at one of its effects, drawn from all; whether it did."""
        try:
            with killed_after(self.draw.choice([3, 10, 30, 60, 100]) * self.draw.random()):
                self._build(self.out, self._settings())
        except Killed:
            self.counts["killed"] += 1
            return True
        except (ShardmillError, OSError):
            pass
        return False

    def _restore(self) -> None:
        shutil.rmtree(self.parent)
        shutil.copytree(self.pristine, self.parent)
        self.recipe = RECIPE

    def some(self, folder: Path) -> Path | None:
        """A file below `folder`, drawn from all."""
        files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
        return self.draw.choice(files) if files else None

    def some_published(self) -> Path | None:
        path = self.some(self.out)
        return path if path and STATE_FOLDER not in path.parts else None


@contextmanager
def killed_after(effects: float) -> Iterator[None]:
    """After so many effects on the file system every further one raises Killed, in every thread."""
    left = effects
    kept = [(Path, name, getattr(Path, name)) for name in _EFFECTS]
    kept += [(os, name, getattr(os, name)) for name in _OS_EFFECTS]

    def dying(original: Callable[..., Any]) -> Callable[..., Any]:
        def effect(*args: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return original(*args, **named)

        return effect

    try:
        for owner, name, original in kept:
            setattr(owner, name, dying(original))
        yield
    finally:
        for owner, name, original in kept:
            setattr(owner, name, original)


def flipped(path: Path, place: int) -> None:
    """Another byte at `place`, as a new inode: a hard link's other name keeps its bytes."""
    data = bytearray(path.read_bytes())
    data[place] ^= 0x55
    path.unlink()
    path.write_bytes(data)


def weight_changes(walk: Walk) -> None:
    shards = sorted(walk.parent.glob("*.safetensors"))
    if not shards:
        return
    shard = walk.draw.choice(shards)
    try:
        header = read_header(shard, shard.name)
    except ShardmillError:
        return
    if refs := [ref for ref in header.tensors if ref.bytes]:
        flipped(shard, header.data_begin + walk.draw.choice(refs).begin)


def parent_touched(walk: Walk) -> None:
    if path := walk.some(walk.parent):
        os.utime(path)


def parent_swapped_with_old_times(walk: Walk) -> None:
    """Other bytes under the times of before, as `tar -x` and `rsync -t` leave them."""
    if path := walk.some(walk.parent):
        facts = path.stat()
        weight_changes(walk)
        if path.exists():
            os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def parent_written_in_place_under_old_times(walk: Walk) -> None:
    """The inode, the size and the mtime stay: only the ctime tells. Where the output holds a hard link, both change."""
    shards = sorted(walk.parent.glob("*.safetensors"))
    if shards and (path := walk.draw.choice(shards)).stat().st_size:
        facts = path.stat()
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(bytes([walk.draw.randrange(64)]))
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def parent_restored_with_old_times(walk: Walk) -> None:
    """One file as it was at first, with its first times."""
    if path := walk.some(walk.pristine):
        target = walk.parent / path.relative_to(walk.pristine)
        if target.parent.is_dir() and not target.is_dir():
            target.unlink(missing_ok=True)
            shutil.copy2(path, target)


def parents_shards_exchanged(walk: Walk) -> None:
    """Two shards exchange their names: the index tells of none of their tensors any more."""
    shards = sorted(walk.parent.glob("model-0*.safetensors"))
    if len(shards) > 1 and walk.draw.random() < 0.3:
        one, other = walk.draw.sample(shards, 2)
        aside = one.with_name("aside")
        one.replace(aside)
        other.replace(one)
        aside.replace(other)


def parent_truncated(walk: Walk) -> None:
    if walk.draw.random() < 0.3 and (path := walk.some(walk.parent)):
        os.truncate(path, path.stat().st_size // 2)


def parent_restored(walk: Walk) -> None:
    walk._restore()


def side_file_comes_or_goes(walk: Walk) -> None:
    path = walk.parent / walk.draw.choice(["added.json", "assets", "assets/vocab.json", "tokenizer.json"])
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()
    elif path.parent.is_dir():
        path.write_text(f"[{walk.draw.randrange(3)}]")


def output_flipped(walk: Walk) -> None:
    path = walk.some_published()
    if path and path.stat().st_size:
        flipped(path, walk.draw.randrange(path.stat().st_size))


def output_flipped_under_old_times(walk: Walk) -> None:
    path = walk.some_published()
    if path and path.stat().st_size:
        facts = path.stat()
        flipped(path, walk.draw.randrange(path.stat().st_size))
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def output_truncated(walk: Walk) -> None:
    if path := walk.some_published():
        whole = path.read_bytes()
        path.unlink()
        path.write_bytes(whole[: len(whole) // 2])


def output_removed(walk: Walk) -> None:
    if path := walk.some_published():
        path.unlink()


def output_exchanged(walk: Walk) -> None:
    """Two published files exchange their names."""
    one, other = walk.some_published(), walk.some_published()
    if one and other and one != other:
        aside = one.with_name("aside")
        one.replace(aside)
        other.replace(one)
        aside.replace(other)


def output_becomes_a_folder(walk: Walk) -> None:
    if walk.draw.random() < 0.2 and (path := walk.some_published()):
        path.unlink()
        path.mkdir()


def manifest_of_another_build(walk: Walk) -> None:
    """The manifest of the build from nothing before this one, beside the files of now."""
    other = walk.home / "fresh" / MANIFEST_FILE
    if other.is_file() and walk.out.is_dir() and not (walk.out / MANIFEST_FILE).is_dir():
        (walk.out / MANIFEST_FILE).unlink(missing_ok=True)
        shutil.copyfile(other, walk.out / MANIFEST_FILE)


def state_garbled(walk: Walk) -> None:
    if path := walk.some(walk.out / STATE_FOLDER):
        garbage = [b"", b"[]", b"{}", b"null", b'{"staged": 1}', walk.draw.randbytes(40), b"[" * 5000]
        path.unlink()
        path.write_bytes(walk.draw.choice(garbage))


def state_number_changed(walk: Walk) -> None:
    """A digit of a state file becomes another: JSON that is right and lies."""
    path = walk.some(walk.out / STATE_FOLDER)
    if path and path.suffix == ".json":
        text = bytearray(path.read_bytes())
        digits = [place for place, sign in enumerate(text) if chr(sign).isdigit()]
        if digits:
            text[walk.draw.choice(digits)] = ord(str(walk.draw.randrange(1, 10)))
            path.write_bytes(text)


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


def state_of_another_build(walk: Walk) -> None:
    """The state folder of another build, as a copy of one whole folder over another leaves it."""
    other = walk.home / "fresh" / STATE_FOLDER
    if other.is_dir() and walk.out.is_dir() and walk.draw.random() < 0.4:
        shutil.rmtree(walk.out / STATE_FOLDER, ignore_errors=True)
        shutil.copytree(other, walk.out / STATE_FOLDER)


def staged_exchanged(walk: Walk) -> None:
    """Two files of the state folder exchange their names."""
    one, other = walk.some(walk.out / STATE_FOLDER), walk.some(walk.out / STATE_FOLDER)
    if one and other and one != other:
        data = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(data)


def recipe_changes(walk: Walk) -> None:
    numerics = walk.draw.choice(NUMERICS)
    block = walk.draw.choice(["[32, 32]", "[16, 16]", "[64, 64]", "[4, 4]"])
    profile = walk.draw.choice(["", 'profile = "modelopt-mixed"\n'])
    text = "\n".join(
        f'block = {block}\nnumerics = "{numerics}"' if line.startswith("block =") else line
        for line in RECIPE.splitlines()
        if not line.startswith("numerics")
    )
    walk.recipe = text.replace("[output]\n", f"[output]\n{profile}")


def recipe_reason_changes(walk: Walk) -> None:
    """Words that only README.md and the manifest hold."""
    walk.recipe = walk.recipe.replace('reason = "small"', f'reason = "small {walk.draw.randrange(3)}"')


def recipe_drops_or_renames(walk: Walk) -> None:
    action = walk.draw.choice(['action = "keep"\nreason = "small"', 'action = "drop"\nreason = "not wanted"'])
    both = 'match = ["model.layers.*.norm.weight", "model.embed.weight"]\naction = "keep"\nreason = "small"'
    embed = 'match = "model.embed.weight"\naction = "keep"\nreason = "small"'
    norms = f'[[family]]\nname = "n"\nmatch = "model.layers.*.norm.weight"\n{action}'
    walk.recipe = RECIPE.replace(both, f"{embed}\n\n{norms}")


EDITS: tuple[Callable[[Walk], None], ...] = (
    weight_changes,
    weight_changes,
    parent_touched,
    parent_swapped_with_old_times,
    parent_written_in_place_under_old_times,
    parent_restored_with_old_times,
    parents_shards_exchanged,
    parent_truncated,
    parent_restored,
    side_file_comes_or_goes,
    output_flipped,
    output_flipped_under_old_times,
    output_truncated,
    output_removed,
    output_exchanged,
    output_becomes_a_folder,
    manifest_of_another_build,
    state_garbled,
    state_number_changed,
    state_leads_outside,
    state_removed,
    state_of_another_build,
    staged_exchanged,
    recipe_changes,
    recipe_reason_changes,
    recipe_drops_or_renames,
)


def walk(seed: int, steps: int, home: Path) -> tuple[list[str], Counter[str], Counter[str]]:
    """The faults of a walk, the counts of what was done, and of the refusals for the output's sake."""
    walked, faults = Walk(home, seed), []
    for number in range(steps):
        if fault := walked.step():
            faults.append(f"seed {seed}, step {number}: {fault}")
            shutil.rmtree(walked.out, ignore_errors=True)
        if not (walked.pristine / "config.json").exists() or (home / "evil").exists():
            faults.append(f"seed {seed}, step {number}: a file outside the output was touched")
            break
    return faults, walked.counts, walked.refusals


def walk_somewhere(seed: int, steps: int, place: Path | None) -> tuple[list[str], Counter[str], Counter[str]]:
    """`walk` in a temporary folder in `place`."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-walk-", dir=place) as home:
        found = walk(seed, steps, Path(home))
    print(f"seed {seed}: {steps} steps, {len(found[0])} faults, {time.monotonic() - began:.0f} s", flush=True)
    return found


def main() -> int:
    memory = Path("/dev/shm")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000, help="of all seeds together")
    parser.add_argument("--seeds", type=int, nargs="*", help="default: drawn, and printed")
    parser.add_argument("--jobs", type=int, default=1, help="processes; each walks some of the seeds")
    parser.add_argument(
        "--home", type=Path, default=memory if memory.is_dir() else None, help="where to walk"
    )
    args = parser.parse_args()
    seeds = args.seeds or [
        random.SystemRandom().randrange(1 << 31) for _ in range(max(args.jobs, args.steps // 100))
    ]
    steps = -(-args.steps // len(seeds))
    with ProcessPoolExecutor(args.jobs) as pool:
        walks = list(pool.map(walk_somewhere, seeds, [steps] * len(seeds), [args.home] * len(seeds)))
    faults = [fault for found, _, _ in walks for fault in found]
    counts = sum((counts for _, counts, _ in walks), Counter[str]())
    print(f"seeds {seeds}: {steps * len(seeds)} steps, {len(faults)} faults; {dict(sorted(counts.items()))}")
    for words, times in sum((refusals for _, _, refusals in walks), Counter[str]()).most_common():
        print(f"refused for the output alone, {times} times: {words}")
    for fault in faults:
        print(f"WRONG {fault}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
