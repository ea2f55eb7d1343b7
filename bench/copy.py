"""A tuned copy of a folder: this project's own reading, writing and cache calls, a worker a core, and no conversion.

    python -m bench.copy SOURCE TARGET [--workers N]

What a build adds to it is the work itself. Every file is synced, as a build's are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardmill.pipeline.container.files import CHUNK_BYTES, Buffers, Sink, Source
from shardmill.pipeline.container.header import file_stat
from shardmill.pipeline.run.cores import usable_workers
from shardmill.pipeline.run.processes import Fill, Unit, in_processes
from shardmill.pipeline.stages.job import Watch


def copy(source: Path, target: Path, workers: int) -> None:
    """Copies every file of `source`, the largest first."""
    sizes = {
        str(path.relative_to(source)): path.stat().st_size for path in source.rglob("*") if path.is_file()
    }
    for file in sizes:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
    units = [Unit(file, file) for file in sorted(sizes, key=lambda file: -sizes[file])]

    def make_fill(place: int) -> Fill:
        buffers = Buffers()

        def fill(unit: Unit, results: Mapping[str, Any], watch: Watch) -> Callable[[], None]:
            path, size = source / unit.file, sizes[unit.file]
            with Source(path, file_stat(path)) as reader, Sink(target / unit.file, size) as sink:
                sink.reserve()
                for offset, chunk in reader.chunks(buffers.get("chunk", CHUNK_BYTES), 0, size):
                    sink.write(chunk, offset)
            return lambda: None

        return fill

    in_processes(units, min(workers, len(units)), make_fill, Watch())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--workers", type=int, default=usable_workers())
    asked = parser.parse_args()
    copy(asked.source, asked.target, asked.workers)


if __name__ == "__main__":
    main()
