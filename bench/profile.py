"""Where the processor's time of a build goes, by `perf`, and its system calls, by `strace -c`.

    python -m bench.profile [--work DIR] [--json FILE]

Each kernel builds the `small` parent once under either tool, neither of which is part of the Python world: a machine
that lacks one says so. Under strace a build takes several times as long; only its counts are of use.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from bench.build import clean, kernels, machine, options, tell, toy, warm
from bench.calls import build_command

# A mapped file's name, as perf reports it -> what its time is spent on.
PLACES = (
    (r"libcrypto", "sha256"),
    (r"_xxhash", "xxh3"),
    (r"\[kernel", "the kernel: reading, writing, waking threads"),
    (r"JIT|numba", "encoding, by numba"),
    (r"_multiarray_umath", "encoding, by numpy"),
    (r"python|_json|libc\.|pydantic", "the interpreter: starting, planning, publishing"),
)
CALLS = ("pwrite64", "preadv2", "preadv", "fsync", "fallocate", "sync_file_range", "futex")


def shares(parent: Path, out: Path, kernel: str, record: Path) -> dict[str, float]:
    """Share of the samples by what they were spent on."""
    clean(out)
    command = build_command(parent, out, "--kernel", kernel)
    perf = ["perf", "record", "--output", str(record), "--freq", "999", "--event", "cpu-clock"]
    subprocess.run([*perf, *command], check=True, capture_output=True)
    report = ["perf", "report", "--input", str(record), "--stdio", "--sort", "dso"]
    told = subprocess.run(report, check=True, capture_output=True, text=True).stdout
    sums = dict.fromkeys([what for _, what in PLACES], 0.0)
    for share, place in re.findall(r"^ +([\d.]+)% +(\S.*?) *$", told, re.MULTILINE):
        what = next((what for pattern, what in PLACES if re.search(pattern, place)), "other")
        sums[what] = sums.get(what, 0.0) + float(share)
    return {what: round(share, 1) for what, share in sums.items() if share >= 0.1}


def calls(parent: Path, out: Path, kernel: str, counts: Path) -> dict[str, int]:
    """How often a build called each of CALLS."""
    clean(out)
    strace = ["strace", "--follow-forks", "--summary-only", "--output", str(counts)]
    subprocess.run(
        [*strace, *build_command(parent, out, "--kernel", kernel)], check=True, capture_output=True
    )
    found = {line.split()[-1]: int(line.split()[3]) for line in counts.read_text().splitlines()[2:-2]}
    return {call: found[call] for call in CALLS if call in found}


def main() -> int:
    asked = options(__doc__, "profile.json").parse_args()
    work = asked.work
    if absent := [tool for tool in ("perf", "strace") if shutil.which(tool) is None]:
        print(f"{' and '.join(absent)} is not installed here; nothing was measured")
        return 0
    parent, out = toy(work, "small"), work / "out"
    warm(parent)
    facts = {
        "machine": machine(),
        "shares": {kernel: shares(parent, out, kernel, work / "perf.data") for kernel in kernels()},
        "calls": {kernel: calls(parent, out, kernel, work / "strace.txt") for kernel in kernels()},
    }
    clean(out)
    tell(facts, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
