"""A build whose parent and output together are larger than the memory, against a plain copy, from a cold cache.

    python -m bench.large [--rounds 3] [--work DIR] [--json FILE]

Only here is the disk the limit. Needs free disk of about 1.2 times the memory, and the right to empty the page cache.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from bench.build import (
    build_seconds,
    clean,
    cold,
    copy_seconds,
    grown,
    in_turns,
    kernels,
    machine,
    options,
    tell,
)
from shardmill.pipeline.run.schedule import memory_bytes
from shardmill.pipeline.toy.glm53 import cut, parent_bytes
from shardmill.pipeline.toy.sizes import SIZES

SHARD_BYTES = 1_500_000_000
EXPERT_BYTES = 76_000_000  # that one more expert in every layer adds to the parent `small`


def main() -> int:
    asked = options(__doc__, "large.json", rounds=3).parse_args()
    work = asked.work
    wanted = int(memory_bytes() * 0.56)
    if shutil.disk_usage(work).free < 2.2 * wanted or not cold():
        print(
            f"needs {2.2 * wanted / 1e9:.0f} GB of disk, and root to empty the page cache; nothing was measured"
        )
        return 0
    small = SIZES["small"]
    dimensions = replace(small.dimensions, experts=(wanted - 2_070_000_000) // EXPERT_BYTES)
    size = replace(small, dimensions=dimensions, cut=partial(cut, dimensions, SHARD_BYTES, parent_bytes))
    parent, out = grown(work, "large", size), work / "out"

    def from_cold(make: Callable[[], float]) -> float:
        clean(out)
        cold()
        return make()

    contenders = {
        "copy": partial(copy_seconds, parent, out),
        "build": partial(build_seconds, parent, out),
        "no sha256": partial(build_seconds, parent, out, "--no-sha256"),
    }
    seconds = in_turns(asked.rounds, {name: partial(from_cold, each) for name, each in contenders.items()})
    total = sum(path.stat().st_size for path in parent.iterdir())
    clean(out, parent)
    facts = {"machine": machine(), "parent_bytes": total, "seconds": seconds, "kernel": kernels()[-1]}
    tell(facts, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
