"""Builds the toy children of another checkout and of this one, and compares every published file but two.

    python -m tests.same_bytes /path/to/checkout [--sizes tiny small]

The manifest and README.md are left out: they say how, and may change. Exit 1 where any other byte differs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = {"shardmill.manifest.json", "README.md"}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("checkout", type=Path)
    arguments.add_argument("--sizes", nargs="+", default=["tiny", "small"])
    given = arguments.parse_args()
    different = 0
    for size in given.sizes:
        with tempfile.TemporaryDirectory() as folder:
            parent = Path(folder) / "parent"
            shardmill(ROOT, "toy-parent", parent, "--size", size)
            digests = []
            for name, tree in (("theirs", given.checkout.resolve()), ("ours", ROOT)):
                out = Path(folder) / name
                shardmill(tree, "build", "-c", tree / "pipeline.toml", "--parent", parent, "--out", out)
                digests.append(digests_of(out))
            theirs, ours = digests
            differing = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
            different += len(differing)
            print(f"{size}: {len(ours)} files compared, {len(differing)} differ", *differing, sep="\n    ")
    return 1 if different else 0


def shardmill(tree: Path, *words: object) -> None:
    """Runs the command of the checkout at `tree`, whose package may still be four top-level ones."""
    source = tree / "src"
    package = "shardmill." if (source / "shardmill").exists() else ""
    code = f"from {package}pipeline.commands.main import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(source if package else tree)}
    command = [sys.executable, "-c", code, *map(str, words)]
    subprocess.run(
        command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def digests_of(out: Path) -> dict[str, str]:
    """Published file -> sha256."""
    names = (path.relative_to(out) for path in out.rglob("*") if path.is_file())
    return {
        name.as_posix(): hashlib.sha256((out / name).read_bytes()).hexdigest()
        for name in names
        if name.parts[0] != ".shardmill" and name.as_posix() not in LEFT_OUT
    }


if __name__ == "__main__":
    sys.exit(main())
