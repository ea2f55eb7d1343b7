"""The most that a build from hub to hub holds on the disk, and what it sends: over a hub on loopback, in this memory.

    python -m bench.hub_to_hub [--size tiny] [--workers 2]

`--size small` is the one of 4 GB; the hub keeps parent and child in memory, so it wants 10 GB of that.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from bench.calls import RECIPE, shardmill
from shardmill.pipeline.recipe import read as recipes
from tests.pipeline.parents import published
from tests.pipeline.publish.hub import Hub, serving

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


def run(words: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--size", default="tiny")
    options.add_argument("--workers", type=int, default=2)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardmill-hub-") as folder, serving(Hub()) as hub:
        home = Path(folder)
        settings = {
            "HF_ENDPOINT": hub.address,
            "HF_HUB_DISABLE_XET": "1",
            "XDG_CACHE_HOME": str(home / "cache"),
        }
        environment = os.environ | settings
        run(shardmill("toy-parent", str(home / "parent"), "--size", asked.size), environment)
        named = recipes.load(RECIPE).parent
        name = named.repository or "toy/parent"
        repository = hub.add(name, published(home / "parent"))
        if named.revision:
            repository.commits[named.revision] = repository.commits[repository.branches["main"]]
            repository.branches["main"] = named.revision
        workers = ["--workers", str(asked.workers)]
        parent = ["build", "-c", str(RECIPE), "--parent", f"hf://{name}"]
        run(shardmill(*parent, *workers, "--out", str(home / "near")), environment)
        near = published(home / "near")
        watcher = Watcher(home / "cache")
        watcher.start()
        run(shardmill(*parent, *workers, "--out", "hf://toy/child", "--create"), environment)
        watcher.ended.set()
        watcher.join()
        shown = hub.repositories["toy/child"].head()
        same = {name: data for name, data in shown.items() if not name.startswith(".")} == near
    largest = max(len(data) for name, data in near.items() if name.endswith(".safetensors"))
    total = sum(map(len, near.values()))
    print(f"the same files as a local build: {same}")
    print(f"checkpoint {total:,} bytes, largest shard {largest:,}, sent {hub.sent_bytes:,}")
    print(f"most on the disk: {watcher.most:,} bytes, {watcher.most / largest:.2f} of the largest shard")
    sys.exit(not same)


if __name__ == "__main__":
    main()
