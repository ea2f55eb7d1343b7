"""Shards made by processes that share no interpreter: forked once, when the plan and the kernels are in memory.

A fork costs milliseconds and hands over plan and compiled kernels without a copy; a pool of fresh interpreters would
import, unpickle and compile in each. Only names go to a worker and only receipts come back. Nothing else of the
program runs in a worker: it leaves without the exit handlers of its parent, holds none of its parent's files, and
ends when its parent does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

from shardmill.pipeline.errors import BuildError, ShardmillError
from shardmill.pipeline.stages.job import StoppedError, Watch

_LOOK_SECONDS = 0.05  # how often the bytes done are added up, and the caller's wish to stop is looked at
_PR_SET_PDEATHSIG = 1  # Linux prctl: the signal that a process gets when its parent dies
_HELD_MAX = 3  # filled shards that wait for the disk while their worker fills the next


@dataclass(frozen=True, slots=True)
class Unit:
    """Something that one worker does on its own; it may begin when all of `after` is done."""

    name: str
    file: str  # that it is about, for the message when its worker dies
    after: frozenset[str] = frozenset()


class Board:
    """Memory that parent and workers share: a wish to stop, and each worker's count of bytes done."""

    def __init__(self, workers: int) -> None:
        self._cells = memoryview(mmap.mmap(-1, 8 * (workers + 1))).cast("q")

    def stop(self) -> None:
        self._cells[0] = 1

    @property
    def stopped(self) -> bool:
        return self._cells[0] != 0

    def add(self, place: int, count: int) -> None:
        """Only the worker at `place` writes to its cell, so no count is lost."""
        self._cells[1 + place] += count

    def total(self) -> int:
        return sum(self._cells[1:])


@dataclass
class BoardWatch(Watch):
    """A worker's Watch: counts on the board, and stops where the board or the parent's end says so."""

    board: Board = field(default_factory=lambda: Board(1))
    place: int = 0
    parent: int = field(default_factory=os.getpid)

    def done(self, count: int) -> None:
        if self.board.stopped or os.getppid() != self.parent:
            raise StoppedError
        self.board.add(self.place, count)


# What a worker does with a unit: fills, and returns what remains to be done while it fills the next one.
Finish = Callable[[], Any]
Fill = Callable[[Unit, Mapping[str, Any], Watch], Finish]


@dataclass(slots=True)
class _Worker:
    pid: int
    pipe: Connection
    held: list[Unit] = field(default_factory=list)  # given to it and not done
    free: bool = True


def in_processes(
    units: Sequence[Unit], workers: int, make_fill: Callable[[int], Fill], watch: Watch
) -> dict[str, Any]:
    """Unit's name -> what its finish returned. Units are begun in their order, as far as `after` lets them.

    `make_fill(place)` is called once in each worker. The first failure stops all; raises BuildError where a worker was
    killed.
    """
    board = Board(workers)
    crew: list[_Worker] = []
    try:
        for place in range(workers):
            crew.append(_fork(place, board, make_fill))
        return _dispatch(list(units), crew, board, watch)
    except BaseException:
        # A signal must not wait for a worker that is in an fsync; what it leaves is swept by the next build.
        for worker in crew:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        raise
    finally:
        for worker in crew:
            worker.pipe.close()


def _dispatch(waiting: list[Unit], crew: list[_Worker], board: Board, watch: Watch) -> dict[str, Any]:
    results: dict[str, Any] = {}
    failures: list[BaseException] = []
    counted = 0
    alive = list(crew)
    while alive:
        if watch.stop.is_set():
            board.stop()
        _hand_out(waiting, alive, results, board)
        if all(worker.free and not worker.held for worker in alive):
            break
        for pipe in wait([worker.pipe for worker in alive], _LOOK_SECONDS):
            worker = next(each for each in alive if each.pipe is pipe)
            try:
                _hear(worker, worker.pipe.recv(), results, failures)
            except (EOFError, ConnectionError):
                alive.remove(worker)
                failures.append(_killed(worker))
            if failures:
                board.stop()
        if (total := board.total()) > counted:
            watch.advance(total - counted)
            counted = total
    for worker in alive:
        worker.pipe.send(None)
        os.waitpid(worker.pid, 0)
    if failures:
        raise min(failures, key=lambda failure: isinstance(failure, StoppedError))
    if waiting:
        raise StoppedError
    return results


def _hand_out(waiting: list[Unit], crew: list[_Worker], results: Mapping[str, Any], board: Board) -> None:
    for worker in crew:
        if worker.free and not board.stopped:
            unit = next((each for each in waiting if each.after <= results.keys()), None)
            if unit is None:
                return
            waiting.remove(unit)
            worker.held.append(unit)
            worker.free = False
            with suppress(BrokenPipeError):  # it is dead: its pipe tells so next
                worker.pipe.send((unit, {name: results[name] for name in unit.after}))


def _hear(
    worker: _Worker, message: tuple[str, str, Any], results: dict[str, Any], failures: list[BaseException]
) -> None:
    """Messages: ("filled", unit's name, None), ("done", unit's name, result), ("failed", unit's name, exception)."""
    kind, name, what = message
    if kind == "filled":
        worker.free = True
        return
    worker.held = [unit for unit in worker.held if unit.name != name]
    if kind == "done":
        results[name] = what
    else:
        failures.append(what or StoppedError())


def _killed(worker: _Worker) -> BuildError:
    _, status = os.waitpid(worker.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    why = (
        "; the system does so where memory runs out: build again with fewer --workers, it goes on where it stopped"
        if code == -signal.SIGKILL
        else "; build again: it goes on where it stopped"
    )
    return BuildError(
        f"{worker.held[0].file if worker.held else 'a worker'}: the worker that made it {how}{why}"
    )


def _fork(place: int, board: Board, make_fill: Callable[[int], Fill]) -> _Worker:
    here, there = Pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        # numpy's BLAS has threads, which it takes care of itself; this program has none here (see schedule).
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        there.close()
        return _Worker(pid, here)
    return _be_a_worker(place, parent, board, make_fill, there)


def _be_a_worker(
    place: int, parent: int, board: Board, make_fill: Callable[[int], Fill], pipe: Connection
) -> NoReturn:
    """The whole life of a worker. It never returns to what its parent was doing."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the parent decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _die_with(parent)
        _let_go_of_files(keep=pipe.fileno())
        _work(pipe, make_fill(place), BoardWatch(board=board, place=place, parent=parent))
        code = 0
    except (EOFError, ConnectionError):
        pass  # the parent is gone, so nobody wants the rest
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _work(pipe: Connection, fill: Fill, watch: Watch) -> None:
    sending, room = threading.Lock(), threading.Semaphore(_HELD_MAX)

    def tell(kind: str, unit: Unit, what: Any = None) -> None:
        with sending:
            pipe.send((kind, unit.name, what))

    def finished(unit: Unit, finish: Finish) -> None:
        try:
            with _failures_told(unit, tell):
                tell("done", unit, finish())
        finally:
            room.release()

    with ThreadPoolExecutor(_HELD_MAX) as disk:
        while asked := pipe.recv():
            unit, results = asked
            with _failures_told(unit, tell):
                finish = fill(unit, results, watch)
                room.acquire()
                disk.submit(finished, unit, finish)
            tell("filled", unit)


@contextmanager
def _failures_told(unit: Unit, tell: Callable[..., None]) -> Iterator[None]:
    try:
        yield
    except StoppedError:
        tell("failed", unit)
    except Exception as error:
        tell("failed", unit, _sendable(error))


def _sendable(error: Exception) -> Exception:
    """The error, or where it cannot travel a sentence of it."""
    if not isinstance(error, ShardmillError | OSError):
        error.add_note(traceback.format_exc())
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return BuildError(f"{type(error).__name__}: {error}")
    return error


def _die_with(parent: int) -> None:
    """Where the system can, a worker is killed with its parent; elsewhere BoardWatch notices."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _let_go_of_files(keep: int) -> None:
    """Points every file that came with the fork to nothing: above all the lock, which ends with the parent alone.

    Their numbers stay taken, so that objects which still hold them can close no file of ours.
    """
    folder = next((path for path in (Path("/proc/self/fd"), Path("/dev/fd")) if path.is_dir()), None)
    numbers = [int(each.name) for each in folder.iterdir()] if folder else range(3, 256)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in numbers:
        if number > 2 and number not in (keep, nothing):
            with suppress(OSError):
                os.fstat(number)
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)
