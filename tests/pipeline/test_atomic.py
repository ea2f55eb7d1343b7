"""A checkpoint appears whole or not at all, and whatever is cut is resumed to the same bytes."""

from __future__ import annotations

import errno
import importlib
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardmill.pipeline.container.files import Source
from shardmill.pipeline.container.header import file_stat, read_header
from shardmill.pipeline.errors import BuildError, CheckpointError
from shardmill.pipeline.manifest.store import STATE_FOLDER, Store
from shardmill.pipeline.run import build as run
from shardmill.pipeline.run import schedule
from shardmill.pipeline.run.shard import ShardTask, make_shard
from shardmill.pipeline.stages.job import Settings, StoppedError, Watch, Worker
from shardmill.pipeline.types import Header
from tests.pipeline.conftest import ROOT
from tests.pipeline.parents import (
    INDEX,
    RECIPE,
    SCALES,
    SHARDS,
    bf16,
    build,
    change_tensor,
    micro_tensors,
    prepare,
    published,
    write_parent,
    write_recipe,
    write_shard,
)

GATES = (INDEX, "model.safetensors")


class Cut(BaseException):
    """The process ends here: no handler of `Exception` sees it, and nothing after it is done."""


@contextmanager
def cut_at(step: int, monkeypatch: pytest.MonkeyPatch, of_commit: bool = True) -> Iterator[list[str]]:
    """From the `step`-th effect on the file system on (of the commit, or of the whole build) every effect raises Cut.

    Yields the list of the effects that were done.
    """
    done: list[str] = []
    counting = threading.Event()

    def counted(original: Callable[..., Any], what: str) -> Callable[..., Any]:
        def effect(*args: Any, **named: Any) -> Any:
            if counting.is_set():
                if len(done) >= step:
                    raise Cut(what)
                done.append(what)
            return original(*args, **named)

        return effect

    original_commit = Store.commit

    def commit(store: Store, *args: Any) -> None:
        counting.set()
        original_commit(store, *args)

    with monkeypatch.context() as patch:
        for name in ("replace", "rename", "unlink", "mkdir"):
            patch.setattr(Path, name, counted(getattr(Path, name), name))
        patch.setattr(os, "fsync", counted(os.fsync, "fsync"))
        if of_commit:
            patch.setattr(Store, "commit", commit)
        else:
            counting.set()
        yield done


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """Another parent of the same names in which every file differs, and what it becomes."""
    files = micro_tensors()
    for tensors in files.values():
        for name, (dtype, shape, data) in tensors.items():
            tensors[name] = (
                bf16(f"second {name}", *shape) if dtype == "BF16" else (dtype, shape, data[:-1] + b"\x01")
            )
    folder = tmp_path_factory.mktemp("second")
    parent = write_parent(folder / "parent", files)
    (parent / "tokenizer.json").unlink()
    (parent / "NOTICE").write_text("second")
    build(parent, folder / "out", SECOND)
    return parent, published(folder / "out")


SECOND = RECIPE.replace("[8, 8]", "[4, 4]")


def assert_whole_or_gated(out: Path, *whole: dict[str, bytes], gates: tuple[str, ...] = GATES) -> None:
    """The folder publishes one of `whole` to the byte, or has none of the `gates`."""
    found = published(out)
    if any(gate in found for gate in gates):
        assert found in whole


def steps_of(action: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, of_commit: bool = True) -> list[str]:
    with cut_at(1 << 30, monkeypatch, of_commit) as done:
        action()
    return done


def test_all_is_on_the_disk_before_the_index_comes_back(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is synced before it is moved in, every folder after that, and only then is the index moved."""
    events: list[tuple[str, str]] = []
    replace = Path.replace

    def moving(source: Path, target: Path) -> Path:
        events.append(("moved", str(target)))
        return replace(source, target)

    monkeypatch.setattr(
        os, "fsync", lambda fd: events.append(("synced", str(Path(f"/proc/self/fd/{fd}").readlink())))
    )
    monkeypatch.setattr(Path, "replace", moving)
    out = tmp_path / "out"
    build(parent, out)
    gate = events.index(("moved", str(out / INDEX)))
    for name in published(out):
        moved = events.index(("moved", str(out / name)))
        staged = str(out / STATE_FOLDER / "staging" / name)
        # A staged file is synced under the name of its staged: its own and a suffix.
        assert any(done == "synced" and path.startswith(staged) for done, path in events[:moved]), name
        if name != INDEX:
            assert ("synced", str((out / name).parent)) in events[moved:gate], name
    assert ("synced", str(out)) in events[gate:]


def test_a_first_build_cut_at_any_step_of_its_commit_is_finished_by_the_next(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes]
) -> None:
    """At each step: no index before the last file is in place; then the reference bytes, and nothing left behind."""
    steps = steps_of(lambda: build(parent, tmp_path / "count", workers=1), monkeypatch)
    assert {"fsync", "replace"} <= set(steps)
    for step in range(0, len(steps), 2):
        out = tmp_path / f"out{step}"
        with cut_at(step, monkeypatch), pytest.raises(Cut):
            build(parent, out, workers=1)
        assert_whole_or_gated(out, reference)
        build(parent, out)
        assert published(out) == reference, step
        assert list((out / STATE_FOLDER / "staging").iterdir()) == []
        shutil.rmtree(out)


def test_a_rebuild_cut_at_any_step_of_its_commit_is_finished_by_the_next(
    parent: Path,
    built: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reference: dict[str, bytes],
    second: tuple[Path, dict[str, bytes]],
) -> None:
    """At each step the earlier checkpoint is whole, or the new one is, or there is no index."""
    other, wanted = second
    shutil.copytree(built, tmp_path / "count")
    steps = steps_of(lambda: build(other, tmp_path / "count", SECOND, workers=1), monkeypatch)
    states = set()
    for step in range(len(steps)):
        out = Path(shutil.copytree(built, tmp_path / f"out{step}"))
        with cut_at(step, monkeypatch), pytest.raises(Cut):
            build(other, out, SECOND, workers=1)
        assert_whole_or_gated(out, reference, wanted)
        found = published(out)
        states.add("old" if found == reference else "new" if found == wanted else "none")
        # Half of them go on to the new checkpoint, the others back to the earlier one.
        if step % 2:
            build(other, out, SECOND)
            assert published(out) == wanted, step
        else:
            build(parent, out)
            assert published(out) == reference, step
        shutil.rmtree(out)
    assert states == {"old", "none", "new"}


def test_what_is_believed_of_another_manifest_is_not_believed(
    parent: Path, built: Path, reference: dict[str, bytes], second: tuple[Path, dict[str, bytes]]
) -> None:
    """A build that was cut after its commit, before it noted what it saw: the notes are the earlier build's."""
    notes = (built / STATE_FOLDER / "seen.json").read_bytes()
    build(second[0], built)
    (built / STATE_FOLDER / "seen.json").write_bytes(notes)
    build(parent, built)
    assert published(built) == reference


def test_a_commit_that_is_cut_again_and_again_ends(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes]
) -> None:
    """Each run gets one step further than the one before; the last one finds a checkpoint to leave as it is."""
    out = tmp_path / "out"
    for step in range(200):
        try:
            with cut_at(step, monkeypatch):
                build(parent, out, workers=1)
        except Cut:
            assert_whole_or_gated(out, reference)
        if published(out) == reference and not Store(out).commit_is_pending():
            break
    assert build(parent, out).files_written == ()
    assert published(out) == reference


def test_a_build_cut_at_any_step_before_its_commit_leaves_the_earlier_checkpoint(
    parent: Path,
    built: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reference: dict[str, bytes],
    second: tuple[Path, dict[str, bytes]],
) -> None:
    other, wanted = second
    shutil.copytree(built, tmp_path / "count")
    whole = steps_of(
        lambda: build(other, tmp_path / "count", SECOND, workers=1), monkeypatch, of_commit=False
    )
    shutil.rmtree(tmp_path / "count")
    shutil.copytree(built, tmp_path / "count")
    commit = steps_of(lambda: build(other, tmp_path / "count", SECOND, workers=1), monkeypatch)
    for step in range(0, len(whole) - len(commit), 5):
        out = Path(shutil.copytree(built, tmp_path / f"out{step}"))
        with cut_at(step, monkeypatch, of_commit=False), pytest.raises(BaseException):  # noqa: B017
            build(other, out, SECOND, workers=1)
        assert published(out) == reference, step
        build(other, out, SECOND)
        assert published(out) == wanted, step
        shutil.rmtree(out)


def test_changing_between_one_file_and_many_is_gated_too(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes]
) -> None:
    """Neither kind of checkpoint is ever seen beside parts of the other."""
    single = write_parent(tmp_path / "single")
    for file in (*SHARDS, SCALES, INDEX):
        (single / file).unlink()
    whole = {name: tensor for tensors in micro_tensors().values() for name, tensor in tensors.items()}
    write_shard(single / "model.safetensors", whole)
    build(single, tmp_path / "one")
    one = published(tmp_path / "one")
    build(parent, tmp_path / "many")
    for origin, target, wanted in (("one", parent, reference), ("many", single, one)):
        shutil.copytree(tmp_path / origin, tmp_path / "count")
        steps = steps_of(lambda: build(target, tmp_path / "count", workers=1), monkeypatch)  # noqa: B023
        shutil.rmtree(tmp_path / "count")
        for step in range(0, len(steps), 2):
            out = Path(shutil.copytree(tmp_path / origin, tmp_path / "out"))
            with cut_at(step, monkeypatch), pytest.raises(Cut):
                build(target, out, workers=1)
            assert_whole_or_gated(out, reference, one)
            build(target, out)
            assert published(out) == wanted
            shutil.rmtree(out)


def test_a_disk_that_fills_under_a_small_file_is_told_with_the_files_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.open()
    (store.staging / "config.json.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device.*staging/config\.json'"):
        store.stage("config.json", b"{}")
    assert not (store.staging / "config.json").exists()


def test_a_shard_that_a_loader_would_take_for_the_whole_is_gated_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some parents have an index and call one of its shards model.safetensors: the index still comes last."""
    parents, wanted = [], []
    for number, change in enumerate((0, 1)):
        files = micro_tensors()
        files["model.safetensors"] = files.pop(SHARDS[1])
        parent = write_parent(tmp_path / f"parent{number}", files)
        if change:
            change_tensor(parent / SHARDS[0], "model.layers.0.norm.weight")
        build(parent, tmp_path / f"whole{number}")
        parents.append(parent)
        wanted.append(published(tmp_path / f"whole{number}"))
    shutil.copytree(tmp_path / "whole0", tmp_path / "count")
    steps = steps_of(lambda: build(parents[1], tmp_path / "count", workers=1), monkeypatch)
    for step in range(len(steps)):
        out = Path(shutil.copytree(tmp_path / "whole0", tmp_path / "out"))
        with cut_at(step, monkeypatch), pytest.raises(Cut):
            build(parents[1], out, workers=1)
        assert_whole_or_gated(out, *wanted, gates=(INDEX,))
        if step % 5 == 0:
            build(parents[1], out)
            assert published(out) == wanted[1], step
        shutil.rmtree(out)


@pytest.fixture
def killer() -> Iterator[Callable[..., str]]:
    """kill(seconds, parent, recipe, out): builds in a process of its own and kills it after `seconds`."""
    command = [sys.executable, "-m", "tests.pipeline.kill_server"]
    server = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"

    def kill(*words: Any) -> str:
        server.stdin.write("\t".join(map(str, words)) + "\n")
        server.stdin.flush()
        return server.stdout.readline().strip()

    yield kill
    server.stdin.close()
    server.wait()
    server.stdout.close()


def test_a_build_killed_at_random_moments_resumes_to_the_same_bytes(
    parent: Path,
    tmp_path: Path,
    killer: Callable[..., str],
    reference: dict[str, bytes],
    second: tuple[Path, dict[str, bytes]],
) -> None:
    """Twelve kills with SIGKILL, of first builds and of rebuilds: at each moment whole or gated, then the reference."""
    other, wanted = second
    recipes = {parent: write_recipe(tmp_path), other: write_recipe(tmp_path, SECOND, "second.toml")}
    started = time.monotonic()
    build(parent, tmp_path / "out", recipes[parent])
    seconds = time.monotonic() - started
    moments, killed = random.Random(7), 0
    for number in range(12):
        target, goal = ((other, wanted), (parent, reference))[number % 2]
        if number % 4 == 3:
            shutil.rmtree(tmp_path / "out")
        killed += (
            killer(moments.uniform(0, 1.5 * seconds), target, recipes[target], tmp_path / "out") == "killed"
        )
        assert_whole_or_gated(tmp_path / "out", reference, wanted)
        build(target, tmp_path / "out", recipes[target])
        assert published(tmp_path / "out") == goal, number
    assert killed, "no build was slow enough to be killed"


def stop_after(shards: int, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """A Watch that stops the build once `shards` shards are filled; they still reach the disk."""
    watch, filled = Watch(), 0
    original = schedule.fill

    def fill(*task: Any) -> Any:
        nonlocal filled
        staged = original(*task)
        filled += 1
        if filled == shards:
            watch.stop.set()
        return staged

    monkeypatch.setattr(schedule, "fill", fill)
    return watch


def cut_build(parent: Path, out: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[str]:
    """A build that stops after two shards; returns their names."""
    with monkeypatch.context() as patch:
        watch = stop_after(2, patch)
        with pytest.raises(StoppedError):
            run.build(prepare(parent), out, Settings(workers=1, kernel="numpy", **settings), watch)
    assert published(out) == {}
    return sorted(path.name.removesuffix(".json") for path in (out / STATE_FOLDER / "receipts").iterdir())


def test_a_build_that_was_stopped_goes_on_at_the_shards_without_a_receipt(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes]
) -> None:
    """The two that were complete are not read again."""
    done = cut_build(parent, tmp_path / "out", monkeypatch)
    assert len(done) == 2
    opened: list[str] = []
    original = Source.__init__
    monkeypatch.setattr(
        Source,
        "__init__",
        lambda self, path, *rest: (opened.append(path.name), original(self, path, *rest))[1],
    )
    summary = build(parent, tmp_path / "out")
    left = {*SHARDS, SCALES} - set(done)
    assert sorted(summary.resumed) == done
    assert {name for name in opened if name.endswith(".safetensors")} == left
    assert summary.bytes_read == sum((parent / file).stat().st_size for file in left)
    assert published(tmp_path / "out") == reference


def test_a_worker_that_was_given_up_for_dead_vouches_for_no_other_workers_file(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes]
) -> None:
    """Two workers at one shard: when the first keeps its receipt, the file beside it is whole, the second half-way."""
    tasks: dict[str, ShardTask] = {}

    def cut(all_tasks: dict[str, ShardTask], *rest: object) -> None:
        tasks.update(all_tasks)
        raise Cut

    monkeypatch.setattr(schedule, "in_threads", cut)
    with pytest.raises(Cut):
        build(parent, tmp_path / "out")
    first_is_at_it, second_is_at_it, first_is_done = (threading.Event() for _ in range(3))

    def first() -> None:
        def wait(count: int) -> None:
            first_is_at_it.set()
            second_is_at_it.wait(10)

        make_shard(tasks[SHARDS[0]], Watch(wait), Worker())
        first_is_done.set()

    staged: list[bytes] = []

    def look(count: int) -> None:
        second_is_at_it.set()
        if not staged and first_is_done.wait(10):
            staged.append((tmp_path / "out" / STATE_FOLDER / "staging" / SHARDS[0]).read_bytes())

    thread = threading.Thread(target=first)
    thread.start()
    assert first_is_at_it.wait(10)
    make_shard(tasks[SHARDS[0]], Watch(look), Worker())
    thread.join()
    assert staged == [reference[SHARDS[0]]]


def test_explain_tells_what_a_cut_build_has_made(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = cut_build(parent, tmp_path / "out", monkeypatch)
    verdicts = run.explain(prepare(parent), tmp_path / "out", Settings(), lambda line: None).shards
    assert all(verdict.reason == "it was not built yet" for verdict in verdicts)
    assert sorted(verdict.file for verdict in verdicts if verdict.staged) == done


def test_what_was_staged_from_a_file_that_changed_since_is_not_used(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = cut_build(parent, tmp_path / "out", monkeypatch)
    tensor = next(iter(micro_tensors()[done[0]]))
    change_tensor(parent / done[0], tensor)
    summary = build(parent, tmp_path / "out")
    assert list(summary.resumed) == done[1:]
    build(parent, tmp_path / "fresh")
    assert published(tmp_path / "out") == published(tmp_path / "fresh")


def test_what_was_staged_for_another_plan_is_not_used(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = cut_build(parent, tmp_path / "out", monkeypatch)
    summary = build(parent, tmp_path / "out", RECIPE.replace("[8, 8]", "[4, 4]").replace("[4, 4]", "[2, 2]"))
    assert set(summary.resumed) <= set(done) - {SHARDS[0], SHARDS[2]}
    build(parent, tmp_path / "fresh", RECIPE.replace("[8, 8]", "[4, 4]").replace("[4, 4]", "[2, 2]"))
    assert published(tmp_path / "out") == published(tmp_path / "fresh")


@pytest.mark.parametrize(("first", "then"), [(False, True), (True, False)])
def test_a_build_resumed_with_another_wish_for_digests_gives_what_a_fresh_one_gives(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool, then: bool
) -> None:
    cut_build(parent, tmp_path / "out", monkeypatch, file_digests=first)
    assert len(build(parent, tmp_path / "out", file_digests=then).resumed) == 2
    build(parent, tmp_path / "fresh", file_digests=then)
    assert published(tmp_path / "out") == published(tmp_path / "fresh")


@pytest.mark.parametrize("garbage", [b"", b"{}", b"[]", b"null", b'{"file": 1}'])
def test_a_receipt_that_is_none_is_not_believed(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes], garbage: bytes
) -> None:
    done = cut_build(parent, tmp_path / "out", monkeypatch)
    (tmp_path / "out" / STATE_FOLDER / "receipts" / f"{done[0]}.json").write_bytes(garbage)
    assert list(build(parent, tmp_path / "out").resumed) == done[1:]
    assert published(tmp_path / "out") == reference


def test_orphans_of_a_killed_run_are_removed(parent: Path, built: Path, reference: dict[str, bytes]) -> None:
    state = built / STATE_FOLDER
    (state / "staging" / "orphan.safetensors").write_bytes(bytes(1000))
    (state / "staging" / "folder" / "deep").mkdir(parents=True)
    (state / "staging" / "folder" / "deep" / "file").write_text("x")
    (state / "receipts" / "orphan.safetensors.json").write_text("{}")
    build(parent, built)
    assert list((state / "staging").iterdir()) == []
    assert list((state / "receipts").iterdir()) == []
    assert published(built) == reference


@pytest.mark.parametrize(
    "garbage", ["", "[]", "{}", "[" * 9999, '{"staged": 3, "removed": [], "entry": "x"}']
)
def test_a_journal_that_is_none_is_given_up_and_the_build_goes_on(
    parent: Path, built: Path, reference: dict[str, bytes], garbage: str
) -> None:
    state = built / STATE_FOLDER
    (state / "commit.json").write_text(garbage)
    build(parent, built)
    assert not (state / "commit.json").exists()
    assert published(built) == reference


def test_two_builds_in_one_folder_do_not_meet(
    parent: Path, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    """While one is at work, the other refuses in one sentence and harms nothing."""
    refusals: list[str] = []

    def meanwhile(count: int) -> None:
        with pytest.raises(BuildError) as refused:
            build(parent, tmp_path / "out")
        refusals.append(str(refused.value))

    run.build(prepare(parent), tmp_path / "out", Settings(workers=1, kernel="numpy"), Watch(meanwhile))
    assert set(refusals) == {
        f"{tmp_path / 'out'}: another build is at work in it; wait until it ends, or choose another --out"
    }
    assert published(tmp_path / "out") == reference


def test_a_parent_file_that_changed_since_the_plan_is_refused_by_name(parent: Path, built: Path) -> None:
    before = published(built)
    change_tensor(parent / SHARDS[1], "model.embed.weight")
    prepared = prepare(parent)
    change_tensor(parent / SHARDS[1], "model.embed.weight", place=1)
    with pytest.raises(CheckpointError, match=f"{SHARDS[1]}: changed since its header was read"):
        run.build(prepared, built, Settings(kernel="numpy"), Watch())
    assert published(built) == before


def test_a_parent_file_that_is_replaced_right_after_its_header_was_read_is_refused_by_name(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another header over the same bytes would put every tensor elsewhere."""
    files = importlib.import_module("shardmill.pipeline.container.weight_files")

    def replacing(path: Path, shard: str) -> Header:
        header = read_header(path, shard)
        if shard == SHARDS[0]:
            write_shard(path, micro_tensors()[shard], {"format": "another"})
        return header

    monkeypatch.setattr(files, "read_header", replacing)
    with pytest.raises(CheckpointError, match=f"{SHARDS[0]}: changed since its header was read"):
        build(parent, tmp_path / "out")
    assert published(tmp_path / "out") == {}


def test_a_carried_file_that_changed_since_the_plan_is_refused_by_name(parent: Path, tmp_path: Path) -> None:
    prepared = prepare(parent)
    (parent / "LICENSE").write_text("other")
    with pytest.raises(CheckpointError, match="LICENSE: changed since"):
        run.build(prepared, tmp_path / "out", Settings(kernel="numpy"), Watch())
    assert published(tmp_path / "out") == {}


@pytest.mark.parametrize("file", [SHARDS[0], SHARDS[1]], ids=["rewritten", "passed on"])
def test_a_parent_file_that_changes_while_it_is_read_is_refused_by_name(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    touched: list[str] = []
    original = Source.__enter__

    def meddle(source: Source) -> Source:
        entered = original(source)
        if source.path.name == file:
            os.utime(source.path, ns=(1, 1))
            touched.append(file)
        return entered

    monkeypatch.setattr(Source, "__enter__", meddle)
    with pytest.raises(CheckpointError, match=f"{file}: changed while it was read; let its writer finish"):
        build(parent, tmp_path / "out", workers=1)
    assert touched == [file]
    assert published(tmp_path / "out") == {}


def test_a_parent_file_that_is_cut_while_it_is_read_is_refused_at_its_last_byte(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    source = Source(path, file_stat(path)).__enter__()
    os.truncate(path, 30)
    with pytest.raises(CheckpointError, match="file: ends at byte 30, was cut while it was read"):
        source.read(memoryview(bytearray(100)), 0)
    os.close(source.fd)


def test_a_read_error_names_file_and_place(
    parent: Path, built: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes]
) -> None:
    """The earlier checkpoint stays; once the disk reads again, so does the build."""
    change_tensor(parent / SHARDS[1], "model.embed.weight")

    def fail(*args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    prepared = prepare(parent)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(
            CheckpointError, match=rf"{SHARDS[1]}: byte \d+ cannot be read: Input/output error"
        ):
            run.build(prepared, built, Settings(kernel="numpy"), Watch())
    assert published(built) == reference
    assert build(parent, built).files_written


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_a_disk_that_fills_up_leaves_the_earlier_checkpoint_and_a_resumable_build(
    built: Path,
    monkeypatch: pytest.MonkeyPatch,
    reference: dict[str, bytes],
    second: tuple[Path, dict[str, bytes]],
    call: str,
) -> None:
    """At each file that is written: one sentence with the way out, the earlier checkpoint whole, then the new one."""
    other, wanted = second
    original, prepared = getattr(os, call), prepare(other, SECOND)
    for allowed in range(3):
        calls = 0

        def full(*args: Any, allowed: int = allowed) -> Any:
            nonlocal calls
            calls += 1
            if calls > allowed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(BuildError, match=r"cannot be written: No space left on device; make room"):
                run.build(prepared, built, Settings(workers=1, kernel="numpy"), Watch())
        assert published(built) == reference
    build(other, built, SECOND)
    assert published(built) == wanted


def test_a_file_system_without_reservation_is_written_all_the_same(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes]
) -> None:
    def unknown(*args: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unknown)
    build(parent, tmp_path / "out")
    assert published(tmp_path / "out") == reference


def test_short_reads_and_writes_are_gone_on_with(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes]
) -> None:
    """A call that does a part of what was asked (a signal, a network file system) changes no byte."""
    read, write = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: read(fd, [views[0][:7]], offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, view, offset: write(fd, view[:5], offset))
    build(parent, tmp_path / "out")
    assert published(tmp_path / "out") == reference


def test_codes_that_read_back_otherwise_are_refused(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that forgets: the codes are written, then read by other code, and the two must agree."""
    write = os.pwrite

    def forgetful(fd: int, view: memoryview, offset: int) -> int:
        return write(fd, bytes(len(view)) if len(view) == 240 else view, offset)

    monkeypatch.setattr(os, "pwrite", forgetful)
    with pytest.raises(BuildError, match=r"mlp\.down\.weight: the read-back differs"):
        build(parent, tmp_path / "out")
    assert published(tmp_path / "out") == {}
