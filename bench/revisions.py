"""What each change gave: the same build by several revisions of this project, in turns.

    python -m bench.revisions REVISION... [--rounds 5] [--work DIR] [--json FILE]

Each revision is checked out into a folder of its own and run from there, by this interpreter and with what is installed
for it: an old revision may want more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.build import clean, in_turns, kernels, machine, options, tell, toy, warm
from bench.calls import build_command

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = [[f"--kernel={kernel}", *more] for kernel in kernels() for more in ([], ["--no-sha256"])]


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def check_out(revision: str, folder: Path) -> None:
    if not folder.exists():
        git("worktree", "prune")
        git("worktree", "add", "--detach", str(folder), revision)


def seconds(tree: Path, parent: Path, out: Path, settings: list[str]) -> float:
    """Of a build by the revision in `tree`, its start and a sync included."""
    clean(out)
    command, before = build_command(parent, out, *settings), time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True)
    os.sync()
    return time.perf_counter() - before


def main() -> int:
    parser = options(__doc__, "revisions.json")
    parser.add_argument("revisions", nargs="+")
    asked = parser.parse_args()
    work = asked.work
    parent, out = toy(work, "small"), work / "out"
    trees = {revision: work / f"tree-{revision}" for revision in asked.revisions}
    contenders: dict[str, Callable[[], float]] = {}
    for revision, tree in trees.items():
        check_out(revision, tree)
        for settings in SETTINGS:
            contenders[json.dumps([revision, *settings])] = partial(seconds, tree, parent, out, settings)
            seconds(tree, parent, out, settings)  # compiles, where a kernel is compiled
    warm(parent)
    measured = in_turns(asked.rounds, contenders)
    clean(out)
    rows = [
        {
            "revision": git("rev-parse", "--short", revision),
            "subject": git("log", "-1", "--format=%s", revision),
            "seconds": [measured[json.dumps([revision, *settings])] for settings in SETTINGS],
        }
        for revision in asked.revisions
    ]
    for tree in trees.values():
        git("worktree", "remove", "--force", str(tree))
    facts = {"machine": machine(), "settings": [" ".join(each) for each in SETTINGS], "rows": rows}
    tell(facts, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
