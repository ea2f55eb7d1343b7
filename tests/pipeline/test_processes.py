"""Shards on forked processes: same bytes, one clear sentence where one dies, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.run import build as run
from shardmill.pipeline.run import schedule, shared
from shardmill.pipeline.run import shard as shards
from shardmill.pipeline.run.processes import Fill, Unit, in_processes
from shardmill.pipeline.stages.job import Settings, StoppedError, Watch
from tests.kernels.conftest import bell
from tests.pipeline.parents import (
    SCALES,
    SHARDS,
    build,
    micro_tensors,
    prepare,
    published,
    write_parent,
    write_shard,
)


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever threads the test runner has: a worker touches none of its objects."""
    monkeypatch.setattr(schedule, "_can_fork", lambda: True)


def crew(do: Callable[[str, Watch], Any], names: str, watch: Watch | None = None, workers: int = 2) -> Any:
    """Results of `do` for each letter of `names`."""

    def make_fill(place: int) -> Fill:
        def fill(unit: Unit, results: Mapping[str, Any], own: Watch) -> Callable[[], Any]:
            result = do(unit.name, own)
            return lambda: result

        return fill

    units = [Unit(name, f"{name}.safetensors") for name in names]
    return in_processes(units, workers, make_fill, watch or Watch())


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_the_number_of_processes_changes_no_byte(
    parent: Path, tmp_path: Path, reference: dict[str, bytes], workers: int
) -> None:
    summary = build(parent, tmp_path / "out", workers=workers)
    assert published(tmp_path / "out") == reference
    assert 2 <= summary.workers <= workers


@pytest.mark.parametrize("workers", [8, 20])
def test_a_shard_that_several_workers_share_has_the_same_bytes(
    parent: Path, tmp_path: Path, reference: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Parts of any size: each weight's codes come from one worker, the file's digest from another."""
    monkeypatch.setattr(shared, "PART_BYTES_MIN", 1)
    split: list[str] = []
    shared_out = schedule.shared_out

    def noting(tasks: Any, most: int) -> Any:
        units, work = shared_out(tasks, most)
        split.extend(unit.name for unit in units if "part" in unit.name)
        return units, work

    monkeypatch.setattr(schedule, "shared_out", noting)
    build(parent, tmp_path / "out", workers=workers)
    assert len(split) >= 2
    assert published(tmp_path / "out") == reference


ONE = """\
format = 1
name = "one"
[output]
profile = "{profile}"
[[family]]
name = "q"
match = "{{a,b,c,d}}.weight"
{action}
expect = 4
"""
ACTIONS = {
    **{
        numerics: ("modelopt-mixed", f'action = "quantize"\nblock = [8, 8]\nnumerics = "{numerics}"')
        for numerics in ("amax/1", "mse/1", "recover/1", "ue8m0/1")
    },
    "convert": ("compressed-tensors", 'action = "convert"\nto = "nvfp4"'),
}


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("action", ACTIONS)
def test_one_file_is_shared_by_all_workers_down_to_the_rows_of_a_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, digests: bool
) -> None:
    """A single file with one large weight: every worker has a part of it; shard, manifest and counts are the same."""
    parent = tmp_path / "parent"
    parent.mkdir()
    weights = {name: bell(place, 100 if name == "a" else 8, 64) for place, name in enumerate("abcd")}
    weights["d"][:] = 0
    tensors = {f"{name}.weight": ("BF16", bits.shape, bits.tobytes()) for name, bits in weights.items()}
    write_shard(parent / "model.safetensors", tensors)
    (parent / "config.json").write_text('{"model_type": "x"}')
    profile, keys = ACTIONS[action]
    recipe = tmp_path / "r.toml"
    recipe.write_text(ONE.format(profile=profile, action=keys))
    build(parent, tmp_path / "alone", recipe, file_digests=digests)
    monkeypatch.setattr(shared, "PART_BYTES_MIN", 1)
    portions: list[shards.Portion] = []
    parts_of = shared._parts

    def noting(task: Any, most: int) -> Any:
        groups = parts_of(task, most)
        portions.extend(portion for group in groups for portion in group)
        return groups

    monkeypatch.setattr(shared, "_parts", noting)
    build(parent, tmp_path / "out", recipe, workers=3, file_digests=digests)
    rows = sorted(portion.rows for portion in portions if portion.rows)
    if action == "convert":
        assert len(portions) == 4
    else:
        assert (rows[0][0], rows[-1][1]) == (0, 100)
        assert len(rows) >= 3
    assert published(tmp_path / "out") == published(tmp_path / "alone")


def test_a_shard_larger_than_a_workers_share_is_split_and_finished_before_the_small_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one large file and three small ones, two workers share the large one; its end does not wait for the others."""
    parent = tmp_path / "parent"
    parent.mkdir()
    where = {}
    for place, name in enumerate("abcd"):
        bits = bell(place, 400 if name == "a" else 8, 64)
        file = f"model-{place + 1}.safetensors"
        write_shard(parent / file, {f"{name}.weight": ("BF16", bits.shape, bits.tobytes())})
        where[f"{name}.weight"] = file
    (parent / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (parent / "config.json").write_text('{"model_type": "x"}')
    recipe = tmp_path / "r.toml"
    recipe.write_text(ONE.format(profile="modelopt-mixed", action=ACTIONS["amax/1"][1]))
    monkeypatch.setattr(shared, "PART_BYTES_MIN", 1)
    names: list[str] = []
    shared_out = schedule.shared_out

    def noting(tasks: Any, most: int) -> Any:
        units, work = shared_out(tasks, most)
        names.extend(unit.name for unit in units)
        return units, work

    monkeypatch.setattr(schedule, "shared_out", noting)
    build(parent, tmp_path / "out", recipe, workers=2)
    large = [name for name in names if name.startswith("model-1")]
    assert names[: len(large)] == large
    assert len(large) >= 2 + 3
    assert sorted(names[len(large) :]) == [f"model-{place}.safetensors" for place in (2, 3, 4)]


@pytest.mark.parametrize("action", ["amax/1", "convert"])
def test_kernels_are_compiled_before_workers_are_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """What a worker gets has encoded a little already, and a block for the whole matrix is no reason to encode much."""
    pytest.importorskip("numba", reason="needs the extra `fast`")
    parent = tmp_path / "parent"
    parent.mkdir()
    bits = bell(1, 64, 64)
    tensors = {f"{name}.weight": ("BF16", bits.shape, bits.tobytes()) for name in "abcd"}
    write_shard(parent / "model.safetensors", tensors)
    (parent / "config.json").write_text('{"model_type": "x"}')
    profile, keys = ACTIONS[action]
    recipe = tmp_path / "r.toml"
    recipe.write_text(ONE.format(profile=profile, action=keys.replace("[8, 8]", "[1048576, 1048576]")))
    found: list[dict[str, Any]] = []
    compiled = schedule.compiled
    monkeypatch.setattr(schedule, "compiled", lambda tasks: found.append(compiled(tasks)) or found[-1])
    build(parent, tmp_path / "out", recipe, workers=2, kernel="numba")
    assert list(found[0]) == [{"amax/1": "numba", "convert": "codes numba"}[action]]


def test_rows_that_are_not_what_a_worker_wrote_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker's rows have a digest of their own, which the one that finishes the file compares."""
    parent = tmp_path / "parent"
    parent.mkdir()
    bits = bell(1, 64, 64)
    tensors = {f"{name}.weight": ("BF16", bits.shape, bits.tobytes()) for name in "abcd"}
    write_shard(parent / "model.safetensors", tensors)
    (parent / "config.json").write_text('{"model_type": "x"}')
    recipe = tmp_path / "r.toml"
    recipe.write_text(ONE.format(profile="modelopt-mixed", action=ACTIONS["amax/1"][1]))
    monkeypatch.setattr(shared, "PART_BYTES_MIN", 1)
    fill_rest = shards.fill_rest

    def spoilt(task: Any, parts: Any, staged: Path, *rest: Any) -> Any:
        with staged.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        return fill_rest(task, parts, staged, *rest)

    monkeypatch.setattr(shards, "fill_rest", spoilt)
    with pytest.raises(BuildError, match="differs from what was written"):
        build(parent, tmp_path / "out", recipe, workers=16, file_digests=False)


def test_work_is_done_in_other_processes_than_this_one() -> None:
    pids = crew(lambda name, watch: (time.sleep(0.05), os.getpid())[1], "abcd")
    assert os.getpid() not in pids.values()
    assert len(set(pids.values())) == 2


def test_the_bytes_that_every_worker_reports_are_added_up() -> None:
    counts: list[int] = []

    def work(name: str, watch: Watch) -> None:
        for _ in range(1000):
            watch.done(3)

    crew(work, "abcdef", Watch(counts.append), workers=3)
    assert all(counts), "no progress is no news"
    assert sum(counts) == 6 * 1000 * 3


def test_a_worker_that_the_system_kills_is_one_sentence_and_the_build_goes_on_later(
    parent: Path, tmp_path: Path, reference: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = shards.fill

    def dies(task: Any, *rest: Any) -> Any:
        if task.plan.file == SHARDS[2]:
            os.kill(os.getpid(), signal.SIGKILL)
        return fill(task, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "fill", dies)
        with pytest.raises(
            BuildError, match=rf"{SHARDS[2]}: the worker that made it was killed by SIGKILL; .* --workers"
        ):
            build(parent, tmp_path / "out", workers=2)
        assert published(tmp_path / "out") == {}
    build(parent, tmp_path / "out", workers=2)
    assert published(tmp_path / "out") == reference


def test_the_first_failure_is_told_and_stops_the_others(tmp_path: Path) -> None:
    def work(name: str, watch: Watch) -> None:
        (tmp_path / name).touch()
        if name == "a":
            raise BuildError("a can't be made")
        for _ in range(10_000):  # until the failure is noted: 10 s at most
            watch.done(1)
            time.sleep(0.001)

    with pytest.raises(BuildError, match="a can't be made"):
        crew(work, "abcdef")
    assert len(list(tmp_path.iterdir())) <= 3


def test_a_caller_that_wants_to_stop_is_heard() -> None:
    watch = Watch()

    def work(name: str, own: Watch) -> None:
        while True:
            own.done(1)
            time.sleep(0.001)

    watch.advance = lambda count: watch.stop.set()
    with pytest.raises(StoppedError):
        crew(work, "ab", watch)


def test_an_interrupt_waits_for_no_worker() -> None:
    """They are killed, whatever they do."""

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        crew(lambda name, watch: (watch.done(1), time.sleep(30)), "ab", Watch(interrupt))
    assert time.monotonic() - started < 10


def test_a_worker_holds_no_file_of_its_parent(tmp_path: Path) -> None:
    """Above all not the lock, which must end with the build even where a worker hangs."""
    with (tmp_path / "lock").open("w") as lock:
        held = crew(
            lambda name, watch: [
                str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.exists()
            ],
            "ab",
        )
        assert not lock.closed
    assert all(str(tmp_path / "lock") not in files for files in held.values())


def test_a_worker_ignores_the_terminals_interrupt() -> None:
    """It goes to all processes of a terminal; only the parent decides what follows from it."""
    handled = crew(lambda name, watch: signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "ab")
    assert all(handled.values())


def test_an_error_that_cannot_travel_is_told_in_words() -> None:
    class OddError(Exception):
        def __init__(self, first: int, second: int) -> None:
            super().__init__("odd")

    def work(name: str, watch: Watch) -> None:
        raise OddError(1, 2)

    with pytest.raises(BuildError, match="OddError: odd"):
        crew(work, "ab")


def test_a_process_with_threads_of_its_own_is_not_forked(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes]
) -> None:
    """A lock that another thread holds would stay held in the child: then the workers are threads."""

    def forked(*rest: object) -> None:
        raise AssertionError("forked")

    monkeypatch.setattr(schedule, "_can_fork", lambda: False)
    monkeypatch.setattr(schedule, "in_processes", forked)
    build(parent, tmp_path / "out", workers=2)
    assert published(tmp_path / "out") == reference


def test_a_failure_of_a_weight_names_it_from_any_process(tmp_path: Path) -> None:
    files = micro_tensors()
    dtype, shape, data = files[SHARDS[0]]["model.layers.0.attn.q.weight"]
    files[SHARDS[0]]["model.layers.0.attn.q.weight"] = (dtype, shape, b"\xc0\x7f" + data[2:])
    parent = write_parent(tmp_path / "parent", files)
    with pytest.raises(
        BuildError, match=r"model\.layers\.0\.attn\.q\.weight: the weight at row 0, column 0 is nan"
    ):
        run.build(prepare(parent), tmp_path / "out", Settings(workers=2, kernel="numpy"), Watch())
    assert SCALES not in published(tmp_path / "out")
