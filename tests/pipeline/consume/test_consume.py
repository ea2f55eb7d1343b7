"""A parent's shard goes once its children are whole, and at every moment one of the two is."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardmill.pipeline.commands.main import shardmill
from shardmill.pipeline.container.header import read_header
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.run import consume, schedule
from tests.pipeline.parents import (
    RECIPE,
    SCALES,
    SHARDS,
    change_tensor,
    published,
    write_parent,
    write_recipe,
)
from tests.pipeline.test_atomic import Cut, cut_at

FILES = (*SHARDS, SCALES)
CUTS = 40


def run(parent: Path, out: Path, *words: str, recipe: str = RECIPE) -> Result:
    path = write_recipe(out.parent / "recipes", recipe)
    given = [
        "build",
        "-c",
        path,
        "--parent",
        parent,
        "--out",
        out,
        "--workers",
        "1",
        "--kernel",
        "numpy",
        *words,
    ]
    return CliRunner().invoke(shardmill, list(map(str, given)))


def pin(parent: Path, out: Path) -> None:
    path = write_recipe(out.parent / "recipes")
    result = CliRunner().invoke(shardmill, ["pin", "-c", str(path), "--parent", str(parent)])
    assert result.exit_code == 0, result.output


@pytest.fixture
def out(parent: Path, tmp_path: Path) -> Path:
    """An output folder whose recipe is pinned to the micro parent."""
    pin(parent, tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def ordinary(out: Path, tmp_path: Path) -> dict[str, bytes]:
    """What a build under the same lock publishes that leaves its parent alone."""
    twin = write_parent(tmp_path / "twin")
    result = run(twin, out.parent / "plain")
    assert result.exit_code == 0, result.output
    return published(out.parent / "plain")


def weights(parent: Path) -> set[str]:
    return {path.name for path in parent.glob("*.safetensors")}


def test_the_checkpoint_is_that_of_an_ordinary_build_and_the_parents_shards_are_gone(
    parent: Path, out: Path, ordinary: dict[str, bytes]
) -> None:
    """What is published does not tell how the parent was treated, and a second call finds nothing to do."""
    result = run(parent, out, "--consume-parent")
    assert result.exit_code == 0, result.output
    assert published(out) == ordinary
    assert weights(parent) == set()
    assert (parent / "config.json").exists()
    again = run(parent, out, "--consume-parent")
    assert "nothing to do" in again.output
    assert published(out) == ordinary


def test_the_disk_holds_one_shard_more_than_the_parent_at_most(
    parent: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parent and children together never exceed the parent by more than 1.1 of its largest shard."""
    sizes = {name: (parent / name).stat().st_size for name in FILES}
    most = [0]
    make = schedule.make_shards

    def watched(*args: Any) -> Any:
        done = make(*args)
        staged = sum(path.stat().st_size for path in (out / ".shardmill/staging").iterdir())
        there = sum(path.stat().st_size for path in parent.glob("*.safetensors"))
        most[0] = max(most[0], staged + there)
        return done

    monkeypatch.setattr(consume, "make_shards", watched)
    assert run(parent, out, "--consume-parent").exit_code == 0
    assert sum(sizes.values()) < most[0] <= sum(sizes.values()) + 1.1 * max(sizes.values())


def all_whole(parent: Path, out: Path, sizes: dict[str, int], ordinary: dict[str, bytes]) -> bool:
    """Whether each of the parent's shards is there whole, or the child of its name is, under a receipt or in place."""
    for name, size in sizes.items():
        if (parent / name).is_file() and (parent / name).stat().st_size == size:
            continue
        staged, receipt = out / ".shardmill/staging" / name, out / f".shardmill/receipts/{name}.json"
        places = [path for path in (staged, out / name) if path.is_file()]
        if not any(path.read_bytes() == ordinary[name] for path in places):
            return False
        if not (out / name).is_file() and not receipt.is_file():
            return False
    return True


def test_cut_at_any_effect_the_same_command_goes_on(
    parent: Path, out: Path, ordinary: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the process ends, the parent's shard or its child is whole, and no byte of the result changes."""
    kept = Path(shutil.copytree(parent, tmp_path / "kept"))
    sizes = {name: (kept / name).stat().st_size for name in FILES}

    def start_again() -> None:
        for folder in (out, parent):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(kept, parent)

    start_again()
    with cut_at(1 << 30, monkeypatch, of_commit=False) as done:
        assert run(parent, out, "--consume-parent").exit_code == 0
    assert published(out) == ordinary
    seen = set()
    for step in sorted(random.Random(1).sample(range(len(done)), CUTS)):
        start_again()
        with cut_at(step, monkeypatch, of_commit=False), pytest.raises(Cut):
            run(parent, out, "--consume-parent")
        assert all_whole(parent, out, sizes, ordinary), (step, done[step])
        seen.add(len(weights(parent)))
        result = run(parent, out, "--consume-parent")
        assert result.exit_code == 0, (step, result.output, result.exception)
        assert published(out) == ordinary
        assert weights(parent) == set()
    assert seen == set(range(len(FILES) + 1))
    assert len(done) > CUTS


def test_a_child_that_the_disk_gives_back_otherwise_leaves_the_parent_alone(
    parent: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read-back comes before removal."""
    leave = consume._leave_cache

    def spoiled(path: Path) -> None:
        leave(path)
        change_tensor(path, read_header(path, path.name).tensors[0].name)

    monkeypatch.setattr(consume, "_leave_cache", spoiled)
    result = run(parent, out, "--consume-parent")
    assert isinstance(result.exception, BuildError)
    assert "the disk gives other bytes" in str(result.exception)
    assert weights(parent) == set(FILES)


def half_consumed(parent: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds until the parent has lost two shards."""
    remove = consume.Consumer._remove

    def stopping(self: consume.Consumer, *args: Any) -> None:
        remove(self, *args)
        if len(weights(parent)) == len(FILES) - 2:
            raise BuildError("stopped here")

    with monkeypatch.context() as patch:
        patch.setattr(consume.Consumer, "_remove", stopping)
        assert "stopped here" in str(run(parent, out, "--consume-parent").exception)


@pytest.mark.parametrize(
    ("words", "change", "says"),
    [
        ((), False, "fetch it again"),
        (("--consume-parent",), True, "was consumed; give the recipe that consumed it"),
    ],
)
def test_no_other_build_sweeps_a_consumed_parents_children_away(
    parent: Path, out: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], change: bool, says: str
) -> None:
    """Staged children are then all that is left of the parent, so nothing removes them."""
    half_consumed(parent, out, monkeypatch)
    staged = sorted((out / ".shardmill/staging").iterdir())
    recipe = RECIPE.replace("block = [4, 4]", "block = [8, 8]") if change else RECIPE
    result = run(parent, out, *words, recipe=recipe)
    assert says in str(result.exception)
    assert sorted((out / ".shardmill/staging").iterdir()) == staged


def test_a_build_of_another_parent_refuses_that_output_folder(
    parent: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds where the output folder is given another parent."""
    half_consumed(parent, out, monkeypatch)
    staged = sorted((out / ".shardmill/staging").iterdir())
    result = run(write_parent(tmp_path / "other"), out)
    assert "unfinished build that has consumed" in str(result.exception)
    assert sorted((out / ".shardmill/staging").iterdir()) == staged


def test_a_lost_child_is_made_again_once_the_parents_shard_is_back(
    parent: Path, out: Path, ordinary: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is lost is named, and one file brought back is enough."""
    kept = Path(shutil.copytree(parent, tmp_path / "kept"))
    half_consumed(parent, out, monkeypatch)
    gone = sorted(set(FILES) - weights(parent))
    (out / ".shardmill/staging" / gone[0]).unlink()
    assert f"the parent's {gone[0]} was consumed" in str(run(parent, out, "--consume-parent").exception)
    shutil.copy2(kept / gone[0], parent / gone[0])
    assert run(parent, out, "--consume-parent").exit_code == 0
    assert published(out) == ordinary


def link(parent: Path, out: Path) -> None:
    os.link(parent / SHARDS[0], parent.parent / "elsewhere.safetensors")


def symlink(parent: Path, out: Path) -> None:
    (parent / SHARDS[0]).rename(parent.parent / "blob")
    (parent / SHARDS[0]).symlink_to(parent.parent / "blob")


def second_lock(parent: Path, out: Path) -> None:
    recipes = out.parent / "recipes"
    shutil.copy(recipes / "pipeline.lock", recipes / "another.lock")


def lock_in_the_parent(parent: Path, out: Path) -> None:
    shutil.copy(out.parent / "recipes/pipeline.lock", parent.parent / "another.lock")


def no_lock(parent: Path, out: Path) -> None:
    (out.parent / "recipes/pipeline.lock").unlink()


@pytest.mark.parametrize(
    ("shared", "says"),
    [
        (link, "has 2 names"),
        (symlink, "is a link to"),
        (second_lock, "another recipe is pinned"),
        (lock_in_the_parent, "another recipe is pinned"),
        (no_lock, "run `shardmill pin` first"),
    ],
)
def test_a_parent_that_others_may_use_is_refused(
    parent: Path, out: Path, shared: Callable[[Path, Path], None], says: str
) -> None:
    """A link, a second name or a second lock says that somebody else may read the parent."""
    shared(parent, out)
    result = run(parent, out, "--consume-parent")
    assert isinstance(result.exception, BuildError)
    assert says in str(result.exception)
    assert weights(parent) == set(FILES)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_parent_that_another_program_reads_is_refused(parent: Path, out: Path, mapped: bool) -> None:
    """A server that has mapped a shard holds no file open, and reads it all the same."""
    text = (
        "import mmap, sys\n"
        "file = open(sys.argv[1], 'rb')\n"
        f"held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if {mapped} else file\n"
        f"file.close() if {mapped} else None\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", text, str(parent / SHARDS[0])]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout
        assert reader.stdout.readline() == b"ready\n"
        result = run(parent, out, "--consume-parent")
        assert reader.stdin
        reader.stdin.close()
    assert f"{SHARDS[0]}: is open in the process {reader.pid} (" in str(result.exception)
    assert weights(parent) == set(FILES)
    assert run(parent, out, "--consume-parent").exit_code == 0


def test_a_parent_that_is_read_only_is_refused_before_a_shard_is_made(
    parent: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK and access(path, mode))
    result = run(parent, out, "--consume-parent")
    assert "can't be written to, so its shards can't be removed" in str(result.exception)
    assert not out.exists()


def test_on_two_disks_that_of_the_output_must_hold_all_of_it(
    parent: Path, out: Path, ordinary: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is freed elsewhere makes no room here."""
    total = sum(len(data) for name, data in ordinary.items() if name.endswith(".safetensors"))
    usage, stat = shutil.disk_usage(parent), Path.stat

    def elsewhere(self: Path, **how: Any) -> os.stat_result:
        found = stat(self, **how)
        if self != parent:
            return found
        fields = list(found)
        fields[2] = found.st_dev + 1
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", elsewhere)
    for free, code in ((total - 1, 1), (total, 0)):
        monkeypatch.setattr(consume.shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        result = run(parent, out, "--consume-parent")
        assert result.exit_code == code, (free, result.exception)
        assert weights(parent) == (set(FILES) if code else set())
    assert published(out) == ordinary


def test_a_lock_of_another_tool_is_nobodys_claim(parent: Path, out: Path) -> None:
    (out.parent / "recipes/poetry.lock").write_text("[[package]]\n")
    assert run(parent, out, "--consume-parent").exit_code == 0


def test_a_folder_in_a_hubs_cache_is_refused(parent: Path, out: Path) -> None:
    cached = parent.parent / "models--org--name/snapshots/0123"
    cached.parent.mkdir(parents=True)
    parent.rename(cached)
    result = run(cached, out, "--consume-parent")
    assert "hub's cache" in str(result.exception)


@pytest.mark.parametrize("words", [["--passthrough", "hardlink"], ["--scheduler", "tcp://127.0.0.1:1"]])
def test_what_does_not_go_with_it_is_a_usage_error(parent: Path, out: Path, words: list[str]) -> None:
    assert run(parent, out, "--consume-parent", *words).exit_code == 2
    assert weights(parent) == set(FILES)


def test_a_strict_build_refuses_before_it_removes(parent: Path, tmp_path: Path) -> None:
    """A shard that a strict build refuses stays."""
    path = parent / SHARDS[1]
    header = read_header(path, path.name)
    ref = next(each for each in header.tensors if each.name == "model.embed.weight")
    data = bytearray(path.read_bytes())
    data[header.data_begin + ref.begin : header.data_begin + ref.begin + 2] = b"\xc0\x7f"
    path.write_bytes(data)
    pin(parent, tmp_path / "out")
    result = run(parent, tmp_path / "out", "--consume-parent", "--strict")
    assert "the build is strict" in str(result.exception)
    assert SHARDS[1] in weights(parent)


@pytest.mark.parametrize("why", ["a tmpfs of the parent and 1.1 of its largest shard"])
def test_a_file_system_just_large_enough_is(
    parent: Path, out: Path, ordinary: dict[str, bytes], tmp_path: Path, why: str
) -> None:
    """Asked of the planned sums: the disk is said to have exactly 1.1 of the largest shard free."""
    largest = max((parent / name).stat().st_size for name in FILES)
    usage = shutil.disk_usage(parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consume.shutil, "disk_usage", lambda path: usage._replace(free=int(1.1 * largest)))
        assert run(parent, out, "--consume-parent").exit_code == 0, why
    assert published(out) == ordinary
    shutil.rmtree(out)
    shutil.rmtree(parent)
    write_parent(parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consume.shutil, "disk_usage", lambda path: usage._replace(free=100))
        result = run(parent, out, "--consume-parent")
    assert "at its fullest and the disk has 100 free" in str(result.exception)
    assert weights(parent) == set(FILES)
