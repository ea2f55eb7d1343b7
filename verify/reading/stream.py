"""Every byte of a checkpoint in one pass: sha256 of files, xxh3-128 of tensors, values, comparison with the parent.

Workers take whole files, the largest first (`verify.reading.file_pass` reads one). A file that would keep one worker
busy while others have nothing left is shared: one takes its sha256, the others its tensors. Results come back by file,
so that neither their order nor their content depends on the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shardmill.verify.reading.file_pass import Buffers, FileJob, Found, Pass, Task, buffers
from shardmill.verify.reading.processes import WORKERS_MAX, usable_cores
from shardmill.verify.reading.progress import Progress
from shardmill.verify.reading.source import Source
from shardmill.verify.reading.threads import THREADS_MAX, begun
from shardmill.verify.rules.findings import Finding

SMALL_BYTES = 4 << 20  # done sooner than a thread is started and pinned
_DIGEST_CHARS = 32  # of an xxh3-128 in hexadecimal digits


@dataclass(slots=True)
class FileResult:
    file: str
    sha256: str = ""
    digests: dict[str, str] = field(default_factory=dict)
    unequal: dict[str, int] = field(
        default_factory=dict
    )  # tensor -> the first byte that differs from its twin's
    findings: list[Finding] = field(default_factory=list)
    outcomes: dict[str, Any] = field(default_factory=dict)  # tensor -> its watcher's outcome


def stream(
    source: Source,
    jobs: Sequence[FileJob],
    other: Source | None = None,
    done: Progress | None = None,
) -> dict[str, FileResult]:
    """Does all jobs; `other` holds the twins; `done` hears of bytes as they are read."""
    with streaming(source, jobs, other, done) as results:
        return results()


@contextmanager
def streaming(
    source: Source,
    jobs: Sequence[FileJob],
    other: Source | None = None,
    done: Progress | None = None,
) -> Iterator[Callable[[], dict[str, FileResult]]]:
    """As `stream`, whose results come when they are asked for; other processes may be at work meanwhile."""
    progress = done.add if done is not None else lambda count: None

    def do(job: FileJob, own: Buffers) -> Found:
        return Pass(source, other, job, own).run(progress)

    remote = source.remote or (other is not None and other.remote)
    small = sum(job.bytes for job in jobs) < SMALL_BYTES
    workers = 1 if small else WORKERS_MAX if not remote else THREADS_MAX
    parts = jobs if small or remote else shared(jobs, usable_cores())
    largest_first = sorted(range(len(parts)), key=lambda place: -parts[place].bytes)
    with begun(do, [parts[place] for place in largest_first], buffers, workers, done, remote) as results:
        yield lambda: _by_file(jobs, parts, dict(zip(largest_first, results(), strict=True)), do)


def _named(job: FileJob, found: Found) -> FileResult:
    names = (task.tensor.name for task in job.tasks if task.digest)
    ends = range(_DIGEST_CHARS, len(found.digests) + 1, _DIGEST_CHARS)
    digests = {name: found.digests[end - _DIGEST_CHARS : end] for end, name in zip(ends, names, strict=False)}
    outcomes = {job.tasks[place].tensor.name: outcome for place, outcome in found.outcomes}
    return FileResult(found.file, found.sha256, digests, found.unequal, found.findings, outcomes)


def _by_file(
    jobs: Sequence[FileJob],
    parts: Sequence[FileJob],
    results: Mapping[int, Found],
    do: Callable[[FileJob, Buffers], Found],
) -> dict[str, FileResult]:
    """`results`: of the parts, by their places."""
    found: dict[str, list[FileResult]] = {job.file: [] for job in jobs}
    for place, part in enumerate(parts):
        found[part.file].append(_named(part, results[place]))
    broken = {result.file for result in results.values() if result.broken}
    return {
        job.file: _together(job, found[job.file])
        if job.file not in broken or len(found[job.file]) == 1
        else _named(job, do(job, buffers()))  # read again in one go, so that one fault is said once
        for job in jobs
    }


def shared(jobs: Sequence[FileJob], workers: int) -> list[FileJob]:
    """The jobs, those larger than a worker's fair share taken apart: a sha256 and runs of tensors."""
    fair = max(sum(job.bytes for job in jobs) // workers, SMALL_BYTES)
    parts: list[FileJob] = []
    for job in jobs:
        if workers < 2 or job.bytes <= fair * 5 // 4 or not job.tasks:
            parts.append(job)
            continue
        if job.sha256:
            parts.append(job._replace(tasks=()))
        parts += (job._replace(sha256=False, tasks=tasks) for tasks in _runs_of_tasks(job.tasks, fair))
    return parts


def _runs_of_tasks(tasks: Sequence[Task], bytes_min: int) -> Iterator[tuple[Task, ...]]:
    """The tasks in their order, in runs of this many bytes or a little more, but for the last."""
    run: list[Task] = []
    left = bytes_min
    for task in tasks:
        run.append(task)
        left -= task.tensor.bytes
        if left <= 0:
            yield tuple(run)
            run, left = [], bytes_min
    if run:
        yield tuple(run)


def _together(job: FileJob, results: Sequence[FileResult]) -> FileResult:
    """One result of a file's parts."""
    if len(results) == 1:
        return results[0]
    whole = FileResult(job.file, "".join(result.sha256 for result in results))
    for result in results:
        whole.digests |= result.digests
        whole.unequal |= result.unequal
        whole.findings += result.findings
        whole.outcomes |= result.outcomes
    return whole
