"""Every system call of a build fails once, with each errno that it may have: `make torture-calls`.

strace injects the failure into the nth call of a kind, in each thread or process that makes it. A build from nothing,
an increment, a build of hard links and the commit of each are tried. Right is exit code 0 with the right bytes, or exit
code 1 with one sentence and the earlier checkpoint either untouched or without its entry file; and the next clean build
gives the same bytes. Counts are printed; the exit code is 1 where anything was wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.calls import shardmill
from shardmill.pipeline.container.header import read_header
from shardmill.pipeline.types import INDEX_FILE
from tests.pipeline.parents import change_tensor, published, write_parent, write_recipe

# call -> what it may answer where a disk, a mount or a quota has a bad day
ERRNOS = {
    "flock": ("ENOLCK", "EBADF", "EOPNOTSUPP", "ENOSYS", "EINVAL", "EIO"),
    "fsync": ("EINVAL", "EBADF", "EOPNOTSUPP", "EIO", "ENOSPC", "EDQUOT"),
    "fallocate": ("EOPNOTSUPP", "EINVAL", "EBADF", "ENOSYS", "ENOSPC", "EIO"),
    "rename": ("EXDEV", "ENOSYS", "EIO", "EACCES", "ENOSPC", "EINVAL"),
    "link": ("EXDEV", "EMLINK", "EPERM", "EOPNOTSUPP"),
    "unlink": ("EIO", "EACCES", "EBUSY"),
    "rmdir": ("EIO", "EBUSY"),
    "mkdir": ("EIO", "ENOSPC", "EACCES"),
    "pwrite64": ("EIO", "ENOSPC", "EDQUOT"),
    "write": ("EIO", "ENOSPC"),
    "preadv": ("EIO", "ESTALE"),
    "getdents64": ("EIO", "EACCES", "ESTALE"),
    "ftruncate": ("EIO", "EINVAL"),
    "sync_file_range": ("EIO", "ENOSYS"),
    "ioctl": ("ENOTTY", "EOPNOTSUPP", "EXDEV"),
    "fstatfs": ("EIO",),
    "statfs": ("EIO",),
}
_STRACE = ("strace", "-f", "-qq")


@dataclass(frozen=True, slots=True)
class Kind:
    """One way of building: what its folder holds before, and how it is called."""

    name: str
    before: Path | None
    parent: Path
    options: tuple[str, ...]
    right: dict[str, str]


def main() -> int:
    """Tries each failure; returns the exit code."""
    args = _arguments()
    if not shutil.which("strace"):
        print("strace is not installed: nothing was tried")
        return 2
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="torture-calls-") as folder:
        home = Path(folder)
        for kind in kinds(home):
            for call, error, nth in failures(kind, home, args.calls):
                if args.most and counts["tried"] >= args.most:
                    break
                counts["tried"] += 1
                counts[attempt(kind, home, call, error, nth)] += 1
            print(f"{kind.name}: {dict(counts)}", flush=True)
    return bool(counts["wrong"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=0, help="stop after so many failures")
    parser.add_argument("--calls", nargs="*", default=list(ERRNOS), help="only these calls")
    return parser.parse_args()


def kinds(home: Path) -> Iterator[Kind]:
    """A build from nothing, an increment of one tensor, and one of hard links."""
    parent = write_parent(home / "parent")
    changed = Path(shutil.copytree(parent, home / "changed"))
    shard = sorted(changed.glob("*.safetensors"))[0]
    change_tensor(shard, read_header(shard, shard.name).tensors[0].name)
    write_recipe(home)
    before = home / "before"
    command(home, parent, before)
    yield Kind("a build", None, parent, (), built(home, parent))
    yield Kind("an increment", before, changed, (), built(home, changed))
    yield Kind("hard links", None, parent, ("--passthrough", "hardlink"), built(home, parent))


def command(
    home: Path, parent: Path, out: Path, *options: str, pre: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """A build in a process of its own."""
    words = ["build", "-c", str(home / "pipeline.toml"), "--parent", str(parent), "--out", str(out)]
    called = shardmill(*words, "--kernel", "numpy", "--workers", "1", *options)
    return subprocess.run([*pre, *called], capture_output=True, text=True, errors="replace", check=False)


def built(home: Path, parent: Path) -> dict[str, str]:
    out = home / "right"
    shutil.rmtree(out, ignore_errors=True)
    command(home, parent, out)
    return digests(out)


def digests(out: Path) -> dict[str, str]:
    return (
        {name: hashlib.sha256(data).hexdigest() for name, data in published(out).items()}
        if out.is_dir()
        else {}
    )


def fresh(kind: Kind, home: Path) -> Path:
    out = home / "out"
    shutil.rmtree(out, ignore_errors=True)
    if kind.before:
        subprocess.run(["cp", "-a", str(kind.before), str(out)], check=True)
    return out


def failures(kind: Kind, home: Path, calls: list[str]) -> Iterator[tuple[str, str, int]]:
    """(call, errno, nth) for each call of a whole build that touches the output folder."""
    for call in calls:
        out, log = fresh(kind, home), home / "log"
        command(
            home,
            kind.parent,
            out,
            *kind.options,
            pre=(*_STRACE, "-y", "-o", str(log), "-e", f"trace=/^{call}(at2?)?$"),
        )
        for nth in sorted(_places(log, home)):
            for error in ERRNOS[call]:
                yield call, error, nth


def _places(log: Path, home: Path) -> set[int]:
    """Which calls of a thread touch the folders of the trial, counted from 1 in each thread as strace counts."""
    seen: Counter[str] = Counter()
    places = set()
    for line in log.read_text(errors="replace").splitlines():
        thread = line.split(maxsplit=1)[0]
        seen[thread] += "resumed>" not in line
        if str(home) in line:
            places.add(seen[thread])
    return places


def attempt(kind: Kind, home: Path, call: str, error: str, nth: int) -> str:
    """One build with one failure, and a clean one after it: "passed over", "refused" or "wrong"."""
    out = fresh(kind, home)
    earlier = digests(out)
    inject = f"inject=/^{call}(at2?)?$:error={error}:when={nth}"
    done = command(home, kind.parent, out, *kind.options, pre=(*_STRACE, "-o", "/dev/null", "-e", inject))
    faults = list(_faults(kind, out, earlier, done))
    again = command(home, kind.parent, out, *kind.options)
    if again.returncode or digests(out) != kind.right:
        faults.append(f"the next build: exit code {again.returncode}, {again.stderr[-200:]}")
    for fault in faults:
        print(f"WRONG {kind.name}: {call} {nth} {error}: {fault}", flush=True)
    return "wrong" if faults else "refused" if done.returncode else "passed over"


def _faults(
    kind: Kind, out: Path, earlier: dict[str, str], done: subprocess.CompletedProcess[str]
) -> Iterator[str]:
    now = digests(out)
    if "Traceback" in done.stderr:
        yield f"traceback: {done.stderr[-300:]}"
    if done.returncode == 0 and now != kind.right:
        yield "exit code 0, and other bytes"
    if done.returncode not in (0, 1):
        yield f"exit code {done.returncode}: {done.stderr[-200:]}"
    if done.returncode == 1 and now not in (earlier, kind.right) and INDEX_FILE in now:
        yield "a part of it can be loaded"
    if done.returncode == 1 and not re.search(r"Error: .*(/|\w+\.\w+)", done.stderr):
        yield f"no path in {done.stderr[-200:]!r}"


if __name__ == "__main__":
    sys.exit(main())
