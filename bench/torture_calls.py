"""Every system call of a build fails once, with each errno that it may have: `make torture-calls`.

A preloaded shim (bench/failing_calls.c, compiled here) fails the nth call of a kind that touches the parent's or the
output's folder, or kills the process there. A build from nothing, an increment, builds of hard links and reflinks, a
single file, and the end of an interrupted commit are tried. Right is exit code 0 with the right bytes, or exit code 1
with one sentence that names a path and the earlier checkpoint either untouched or without its entry file; and the next
clean build gives the same bytes. Counts are printed; the exit code is 1 where anything was wrong.

    python -m bench.torture_calls [--jobs 2] [--calls rename fsync] [--kinds increment] [--every 10]
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmill.pipeline.commands import build as build_command  # noqa: F401  imported once, before any fork
from shardmill.pipeline.commands.main import answer
from shardmill.pipeline.container.header import read_header
from shardmill.pipeline.types import INDEX_FILE, SINGLE_FILE
from tests.pipeline.parents import bf16, change_tensor, published, write_parent, write_recipe, write_shard

# call -> what it may answer where a disk, a mount or a quota has a bad day
ERRNOS = {
    "flock": ("ENOLCK", "EBADF", "EOPNOTSUPP", "ENOSYS", "EINVAL", "EIO"),
    "fsync": ("EINVAL", "EBADF", "EOPNOTSUPP", "EIO", "ENOSPC", "EDQUOT"),
    "fallocate": ("EOPNOTSUPP", "EINVAL", "EBADF", "ENOSYS", "ENOSPC", "EIO"),
    "rename": ("EXDEV", "ENOSYS", "EIO", "EACCES", "ENOSPC", "EINVAL"),
    "link": ("EXDEV", "EMLINK", "EPERM", "EOPNOTSUPP", "EIO"),
    "unlink": ("EIO", "EACCES", "EBUSY"),
    "rmdir": ("EIO", "EBUSY"),
    "mkdir": ("EIO", "ENOSPC", "EACCES"),
    "open": ("EIO", "EACCES", "ESTALE", "EMFILE", "ENOSPC"),
    "close": ("EIO", "EDQUOT"),
    "stat": ("EIO", "EACCES", "ESTALE"),
    "fstat": ("EIO", "ESTALE"),
    "pwrite": ("EIO", "ENOSPC", "EDQUOT"),
    "write": ("EIO", "ENOSPC"),
    "pread": ("EIO", "ESTALE"),
    "read": ("EIO", "ESTALE"),
    "opendir": ("EIO", "EACCES", "EMFILE"),
    "readdir": ("EIO", "ESTALE"),
    "readlink": ("EIO", "EACCES"),
    "ftruncate": ("EIO", "EINVAL"),
    "utimens": ("EPERM", "EROFS"),
    "chmod": ("EPERM", "EOPNOTSUPP"),
    "copy_file_range": ("EXDEV", "EIO", "ENOSPC", "EOPNOTSUPP"),
    "sendfile": ("EIO", "EINVAL"),
    "sync_file_range": ("EIO", "ENOSYS"),
    "fadvise": ("EINVAL", "EIO"),
    "ioctl": ("ENOTTY", "EOPNOTSUPP", "EXDEV", "EIO"),
    "statvfs": ("EIO", "EOVERFLOW"),
}
_KILL = "SIGKILL"
_KILLED_AT = (
    "rename",
    "unlink",
    "rmdir",
    "mkdir",
    "fsync",
    "link",
    "pwrite",
)  # calls that leave something behind
_SHIM = "SHARDMILL_FAILING_CALLS"  # the compiled shim, in a process that has it preloaded
_ENTRY_FILES = (INDEX_FILE, SINGLE_FILE)


@dataclass(frozen=True, slots=True)
class Kind:
    """One way of building: what its folder holds before, and how it is called."""

    name: str
    before: Path | None
    parent: Path
    recipe: Path
    options: tuple[str, ...]
    right: dict[str, str]


@dataclass(frozen=True, slots=True)
class Failure:
    """The nth call of a kind answers `error`, an errno's name, or is the last that the process makes."""

    call: str
    nth: int
    error: str

    def __str__(self) -> str:
        return f"{self.call} {self.nth} {self.error}"

    @property
    def number(self) -> int:
        return -1 if self.error == _KILL else int(getattr(errno, self.error))


@dataclass(frozen=True, slots=True)
class Done:
    """How a build ended: its exit code, below 0 a signal's number, and what it said."""

    code: int
    said: str


class Trial:
    """A folder to try in, and the shim."""

    def __init__(self, home: Path) -> None:
        self.home, self.out = home, home / "out"
        self.shim = ctypes.CDLL(os.environ[_SHIM])

    def build(self, kind: Kind, failure: Failure | None = None) -> Done:
        """A build in a fork of this process, with the failure if there is one."""
        return Done(*self._forked(kind, failure, None))

    def calls(self, kind: Kind) -> dict[str, int]:
        """How often each call is made by a build in which none fails."""
        self.fresh(kind)
        counts = self.home / "counts"
        self._forked(kind, None, counts)
        return {
            name: int(count) for name, count in (line.split() for line in counts.read_text().splitlines())
        }

    def fresh(self, kind: Kind) -> dict[str, str]:
        """Puts what the kind's folder holds before into the output folder; its digests."""
        shutil.rmtree(self.out, ignore_errors=True)
        if kind.before:
            subprocess.run(["cp", "-a", str(kind.before), str(self.out)], check=True)
        return digests(self.out)

    def _forked(self, kind: Kind, failure: Failure | None, counts: Path | None) -> tuple[int, str]:
        said = self.home / "said"
        child = os.fork()
        if not child:
            _stream_to(said)
            self.shim.watch(os.fsencode(kind.parent), os.fsencode(self.out))
            if failure:
                self.shim.arm(failure.call.encode(), ctypes.c_long(failure.nth), failure.number)
            code = _answered(["build", "-c", str(kind.recipe), "--parent", str(kind.parent), "--out", str(self.out),
                              "--kernel", "numpy", "--workers", "1", *kind.options])  # fmt: skip
            if counts:
                self.shim.counted.restype = ctypes.c_long
                counts.write_text("".join(f"{name} {self.shim.counted(name.encode())}\n" for name in ERRNOS))
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, said.read_text(errors="replace")


def _stream_to(path: Path) -> None:
    with path.open("wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)


def _answered(words: Sequence[str]) -> int:
    sys.argv = ["shardmill", *words]
    try:
        code = answer()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
        return 70
    return code


def main() -> int:
    """Tries each failure; returns the exit code."""
    args = _arguments()
    if _SHIM not in os.environ:
        return _with_shim()
    if args.jobs > 1:
        return _in_parts(args.jobs)
    part, parts = (int(number) for number in args.part.split("/"))
    counts: Counter[str] = Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-calls-", dir=args.home) as folder:
        home = Path(folder).resolve()
        trial = Trial(home)
        for kind in kinds(trial):
            if args.kinds and kind.name not in args.kinds:
                continue
            mine = some(list(failures(trial.calls(kind), args.calls)), args.every)[part - 1 :: parts]
            for failure in mine:
                counts["tried"] += 1
                counts[attempt(trial, kind, failure)] += 1
            print(f"{kind.name}: {len(mine)} failures; so far {dict(counts)}", flush=True)
    print(f"part {args.part}: {dict(counts)}, {time.monotonic() - began:.0f} s")
    return bool(counts["wrong"])


def _arguments() -> argparse.Namespace:
    memory = Path("/dev/shm")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the failures")
    parser.add_argument("--part", default="1/1", help="only the failures of this part, as 2/4")
    parser.add_argument("--calls", nargs="*", default=list(ERRNOS), help="only these calls")
    parser.add_argument("--kinds", nargs="*", help="only these kinds of build")
    parser.add_argument("--every", type=int, default=1, help="every nth failure alone")
    parser.add_argument("--home", default=memory if memory.is_dir() else None, help="where to try")
    return parser.parse_args()


def _with_shim() -> int:
    """This command again, in a process that has the shim preloaded."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        print("no C compiler is installed: nothing was tried")
        return 2
    with tempfile.TemporaryDirectory(prefix="failing-calls-") as folder:
        shim = Path(folder, "shim.so")
        source = Path(__file__).with_name("failing_calls.c")
        subprocess.run(
            [compiler, "-O1", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl"], check=True
        )
        preloaded = {**os.environ, "LD_PRELOAD": str(shim), _SHIM: str(shim), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "bench.torture_calls", *sys.argv[1:]]
        return subprocess.run(words, env=preloaded, check=False).returncode


def _in_parts(jobs: int) -> int:
    words = [sys.executable, "-m", "bench.torture_calls", *sys.argv[1:], "--jobs", "1", "--part"]
    parts = [subprocess.Popen([*words, f"{number}/{jobs}"]) for number in range(1, jobs + 1)]
    return max(part.wait() for part in parts)


def kinds(trial: Trial) -> Iterator[Kind]:
    """A build from nothing, an increment of one tensor, hard links, reflinks, one file, and a commit to be finished."""
    home = trial.home
    parent, recipe = write_parent(home / "parent"), write_recipe(home)
    changed = Path(shutil.copytree(parent, home / "changed"))
    shard = sorted(changed.glob("*.safetensors"))[0]
    change_tensor(shard, read_header(shard, shard.name).tensors[0].name)
    (changed / "tokenizer.json").write_text('{"tokens": [1]}\n')
    (changed / "assets" / "logo.txt").unlink()
    whole = _kind(trial, Kind("a build", None, parent, recipe, (), {}))
    yield whole
    before = Path(shutil.copytree(trial.out, home / "before", copy_function=shutil.copy2))
    trial.fresh(whole)
    trial.build(whole)
    subprocess.run(["cp", "-a", str(trial.out), str(home / "aged")], check=True)
    yield _kind(trial, Kind("an increment", home / "aged", changed, recipe, (), {}))
    shutil.rmtree(before)
    yield _kind(trial, Kind("hard links", None, parent, recipe, ("--passthrough", "hardlink"), {}))
    yield _kind(trial, Kind("reflinks", None, parent, recipe, ("--passthrough", "reflink"), {}))
    yield _kind(trial, _single(home))
    yield from _interrupted(trial, Kind("an interrupted commit", home / "aged", changed, recipe, (), {}))


def _single(home: Path) -> Kind:
    folder = home / "single"
    folder.mkdir()
    write_shard(folder / SINGLE_FILE, {"a.weight": bf16("a", 8, 8), "a.norm": bf16("n", 8)})
    (folder / "config.json").write_text("{}")
    text = """format = 1
name = "single"
[[family]]
name = "a"
match = "a.weight"
action = "quantize"
block = [4, 4]
expect = 1
[[family]]
name = "n"
match = "a.norm"
action = "keep"
reason = "small"
"""
    return Kind("a single file", None, folder, write_recipe(home, text, "single.toml"), (), {})


def _kind(trial: Trial, kind: Kind) -> Kind:
    """`kind` with the digests of what it gives where nothing fails."""
    trial.fresh(kind)
    done = trial.build(kind)
    if done.code:
        raise SystemExit(f"{kind.name}: a build without a failure ends with {done.code}: {done.said}")
    return Kind(kind.name, kind.before, kind.parent, kind.recipe, kind.options, digests(trial.out))


def _interrupted(trial: Trial, kind: Kind) -> Iterator[Kind]:
    """A folder whose commit was killed in its midst: the first thing that the next build does is to end it."""
    whole = _kind(trial, kind)
    trial.fresh(kind)
    nth = 0
    while not (trial.out / ".shardmill" / "commit.json").exists():
        nth += 1
        trial.fresh(kind)
        if trial.build(kind, Failure("unlink", nth, _KILL)).code == 0:
            raise SystemExit("no kill leaves a commit to be finished")
    before = Path(shutil.copytree(trial.out, trial.home / "interrupted", copy_function=shutil.copy2))
    yield Kind(whole.name, before, kind.parent, kind.recipe, (), whole.right)


def failures(counts: dict[str, int], calls: list[str]) -> Iterator[Failure]:
    """Each failure of a build that makes so many calls."""
    for call in calls:
        for nth in range(1, counts[call] + 1):
            for error in (*ERRNOS[call], *((_KILL,) if call in _KILLED_AT else ())):
                yield Failure(call, nth, error)


def some(failures: list[Failure], every: int) -> list[Failure]:
    """One in `every` of them, drawn from all alike; always the same."""
    random.Random(0).shuffle(failures)
    return failures[::every]


def attempt(trial: Trial, kind: Kind, failure: Failure) -> str:
    """One build with one failure, and a clean one after it: "passed over", "refused", "killed" or "wrong"."""
    earlier = trial.fresh(kind)
    done = trial.build(kind, failure)
    faults = list(_faults(kind, digests(trial.out), earlier, failure, done))
    again = trial.build(kind)
    if again.code or digests(trial.out) != kind.right:
        faults.append(f"the next build: exit code {again.code}, {again.said[-300:]}")
    for fault in faults:
        print(f"WRONG {kind.name}: {failure}: {fault}", flush=True)
    if faults:
        return "wrong"
    return "passed over" if done.code == 0 else "killed" if done.code < 0 else "refused"


def _faults(
    kind: Kind, now: dict[str, str], earlier: dict[str, str], failure: Failure, done: Done
) -> Iterator[str]:
    if "Traceback" in done.said:
        yield f"traceback: {done.said[-1500:]}"
    if done.code == 0 and now != kind.right:
        differ = sorted(name for name in {*now, *kind.right} if now.get(name) != kind.right.get(name))
        yield f"exit code 0, and other bytes: {differ}"
    if done.code not in (0, 1) and (failure.error, done.code) != (_KILL, -signal.SIGKILL):
        yield f"exit code {done.code}: {done.said[-300:]}"
    if done.code and now not in (earlier, kind.right) and any(name in now for name in _ENTRY_FILES):
        yield f"a part of it can be loaded: {sorted(now)}"
    if done.code == 1 and not re.search(r"^Error: .*(/|\w+\.\w+)", done.said, re.MULTILINE):
        yield f"no path in {done.said[-300:]!r}"


def digests(out: Path) -> dict[str, str]:
    """Published file -> sha256."""
    found = published(out) if out.is_dir() else {}
    return {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}


if __name__ == "__main__":
    sys.exit(main())
