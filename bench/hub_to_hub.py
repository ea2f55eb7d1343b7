"""The most that a build from hub to hub holds on the disk, and what it sends: over a hub on loopback, in this memory.

    python -m bench.hub_to_hub [--size tiny] [--workers 2]

`--size small` is the one of 4 GB. Parent and local child are written below --home; the hub maps the parent's files
and keeps what it is sent in memory, 2 GB of that.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.calls import RECIPE, shardmill
from shardmill.pipeline.recipe import read as recipes
from tests.pipeline.publish.hub import Hub, Repository, serving

_SECONDS_BETWEEN_LOOKS = 0.02


class Watcher(threading.Thread):
    """Looks again and again at what the weight files below a folder take on the disk; keeps the most."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.most, self.ended = folder, 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(_SECONDS_BETWEEN_LOOKS):
            self.most = max(
                self.most, sum(self._bytes_of(path) for path in self.folder.rglob("*safetensors*"))
            )

    def _bytes_of(self, path: Path) -> int:
        try:
            return path.stat().st_blocks * 512
        except OSError:
            return 0


def run(words: list[str], environment: dict[str, str]) -> float:
    """Runs a command; the processor seconds that it took, of its own processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(done.stderr)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def mapped(folder: Path) -> dict[str, Any]:
    """Published file -> its bytes, of which the page cache holds as many as there is memory for."""
    found: dict[str, Any] = {}
    for name in files_of(folder):
        with (folder / name).open("rb") as file:
            is_empty = not os.fstat(file.fileno()).st_size
            found[name] = b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return found


def files_of(folder: Path) -> list[str]:
    found = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return [name.as_posix() for name in found if name.parts[0] != ".shardmill"]


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def built(home: Path, hub: Hub, size: str, workers: list[str], environment: dict[str, str]) -> Repository:
    """A toy parent on `hub`, and its child in `home`/near; the parent's repository."""
    run(shardmill("toy-parent", str(home / "parent"), "--size", size), environment)
    near = ["--parent", str(home / "parent"), "--out", str(home / "near")]
    print(f"local build: {run(_build(near, workers), environment):.1f} processor seconds", flush=True)
    named = recipes.load(RECIPE).parent
    repository = hub.add(named.repository or "toy/parent", mapped(home / "parent"))
    if named.revision:
        repository.commits[named.revision] = repository.commits[repository.branches["main"]]
        repository.branches["main"] = named.revision
    return repository


def _build(places: list[str], workers: list[str]) -> list[str]:
    return shardmill("build", "-c", str(RECIPE), *places, *workers)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--size", default="tiny")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--home", type=Path, help="where parent and child are written")
    asked = options.parse_args()
    workers = ["--workers", str(asked.workers)]
    with (
        tempfile.TemporaryDirectory(prefix="shardmill-hub-", dir=asked.home) as folder,
        serving(Hub()) as hub,
    ):
        home = Path(folder)
        settings = {
            "HF_ENDPOINT": hub.address,
            "HF_HUB_DISABLE_XET": "1",
            "XDG_CACHE_HOME": str(home / "cache"),
        }
        environment = os.environ | settings
        built(home, hub, asked.size, workers, environment)
        sizes = {name: (home / "near" / name).stat().st_size for name in files_of(home / "near")}
        near = {name: sha256_of(home / "near" / name) for name in sizes}
        shutil.rmtree(home / "near")
        watcher = Watcher(home / "cache")
        watcher.start()
        place = f"hf://{next(iter(hub.repositories))}"
        began = time.monotonic()
        seconds = run(
            _build(["--parent", place, "--out", "hf://toy/child", "--create"], workers), environment
        )
        print(
            f"from hub to hub: {seconds:.1f} processor seconds, {time.monotonic() - began:.1f} s", flush=True
        )
        watcher.ended.set()
        watcher.join()
        shown = hub.repositories["toy/child"].at("main") or {}
        same = {name: entry.sha256 for name, entry in shown.items() if not name.startswith(".")} == near
    largest = max(size for name, size in sizes.items() if name.endswith(".safetensors"))
    print(f"the same sha256s as a local build: {same}")
    print(f"checkpoint {sum(sizes.values()):,} bytes, largest shard {largest:,}, sent {hub.sent_bytes:,}")
    print(f"most on the disk: {watcher.most:,} bytes, {watcher.most / largest:.2f} of the largest shard")
    sys.exit(not same)


if __name__ == "__main__":
    main()
