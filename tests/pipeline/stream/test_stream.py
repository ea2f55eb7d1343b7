"""A build into a hub shows what a build into a folder would, and keeps none of it here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardmill.pipeline.commands.main import shardmill
from shardmill.pipeline.container import ranges
from shardmill.pipeline.publish.hub import Hub as Asked
from shardmill.pipeline.stream import shards as shards_of
from tests.pipeline.parents import MANIFEST, RECIPE, SCALES, SHARDS, build, published, write_recipe
from tests.pipeline.publish.hub import Hub, sha256
from tests.pipeline.publish.test_publish import PARENT, PLACE, hub, pytestmark, shards, shown
from tests.schemas import held

__all__ = ["hub", "pytestmark"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def add_parent(hub: Hub, parent: Path, **how: Any) -> str:
    """The parent on the hub at the recipe's commit; its place."""
    repository = hub.add(PARENT, published(parent), **how)
    repository.commits[COMMIT] = repository.commits[repository.branches["main"]]
    repository.branches["main"] = COMMIT
    return f"hf://{PARENT}@{COMMIT}"


def run(tmp_path: Path, parent: Any, *words: Any, recipe: str = RECIPE) -> Result:
    path = write_recipe(tmp_path / "recipes", recipe)
    given = [
        "build",
        "-c",
        path,
        "--parent",
        parent,
        "--out",
        PLACE,
        "--workers",
        "1",
        "--kernel",
        "numpy",
        *words,
    ]
    return CliRunner().invoke(shardmill, list(map(str, given)))


def told(tmp_path: Path, parent: Any, *words: Any, recipe: str = RECIPE) -> Any:
    result = run(tmp_path, parent, *words, "--json", recipe=recipe)
    assert result.exception is None, (result.output, result.exception)
    return held(result.stdout)


def weights_in(folder: Path) -> int:
    """Bytes of the weight files below a folder, as the disk holds them."""
    return sum(
        path.stat().st_blocks * 512 for path in folder.rglob("*.safetensors*") if path.suffix != ".json"
    )


def test_the_hub_shows_what_a_folder_would_hold(hub: Hub, parent: Path, tmp_path: Path, cache: Path) -> None:
    """Byte for byte, with the unchanged shards copied by the server and each rewritten one sent once."""
    build(parent, tmp_path / "near")
    add_parent(hub, parent)
    facts = told(tmp_path, parent, "--create")
    assert shown(hub) == published(tmp_path / "near")
    assert set(facts["hub"]["copied"]["files"]) == shards(tmp_path / "near", rewritten=False)
    large = {name for name in facts["hub"]["sent"]["files"] if name.endswith(".safetensors")}
    assert large == shards(tmp_path / "near", rewritten=True)
    assert len(hub.sent) == len(large)
    assert weights_in(cache) == 0


def test_from_hub_to_hub_neither_checkpoint_is_here(
    hub: Hub, parent: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker never has more than one shard here, and after the build there is none."""
    place = add_parent(hub, parent)
    build(parent, tmp_path / "near")
    seen = []
    upload = Asked.upload

    def watched(self: Asked, operation: Any) -> None:
        seen.append(len(list(cache.rglob("staging/*.safetensors"))))
        upload(self, operation)

    monkeypatch.setattr(Asked, "upload", watched)
    told(tmp_path, place, "--create")
    assert shown(hub) == published(tmp_path / "near")
    assert max(seen) == 1
    assert not list((cache / "shardmill" / "out").rglob("*.safetensors"))


def test_a_second_build_sends_and_reads_nothing(hub: Hub, parent: Path, tmp_path: Path) -> None:
    """Not a byte of the parent is fetched again."""
    place = add_parent(hub, parent)
    first = told(tmp_path, place, "--create")
    sent, calls = hub.sent_bytes, len(hub.calls)
    second = told(tmp_path, place)
    assert (second["made"], second["bytes_read"], hub.sent_bytes) == ({}, 0, sent)
    assert second["hub"]["unchanged"]
    assert second["hub"]["commit"] == first["hub"]["commit"]
    assert "resolve" not in hub.calls[calls:]


def test_json_tells_how_many_worked_and_what_an_interrupted_build_had_done(
    hub: Hub, parent: Path, tmp_path: Path
) -> None:
    """What was read and sent before an interruption is taken up again, and named as that."""
    place = add_parent(hub, parent)
    hub.fail.append(("commit", 403))
    assert run(tmp_path, place, "--create").exit_code == 1
    again = told(tmp_path, place)
    files = [*sorted((*SHARDS, SCALES))]
    assert sorted(again["resumed"]) == sorted(again["made"]) == files
    assert (again["workers"], again["bytes_read"], again["kernel"]) == (0, 0, "none")
    nothing = told(tmp_path, place)
    assert (nothing["resumed"], nothing["made"], nothing["workers"]) == ([], {}, 0)


def test_a_shard_that_was_made_and_not_sent_is_taken_up_where_it_is(
    hub: Hub, parent: Path, tmp_path: Path, cache: Path
) -> None:
    place = add_parent(hub, parent)
    hub.fail += [("upload", 403)] * 3
    assert run(tmp_path, place, "--create").exit_code == 1
    left = {path.name for path in cache.rglob("staging/*.safetensors")}
    assert len(left) == 1
    facts = told(tmp_path, place)
    assert left < set(facts["resumed"]) < set(facts["made"])
    assert facts["workers"] == 1
    assert sorted(hub.sent.values()) == [1, 1]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_no_worker_begins_a_shard_before_its_last_one_is_sent(
    hub: Hub, parent: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Of four shards that are made here, as many are here as there are workers, and no more."""
    place = add_parent(hub, parent, xet=False)
    seen = []
    upload = Asked.upload

    def watched(self: Asked, operation: Any) -> None:
        seen.append(len(list(cache.rglob("staging/*safetensors*"))))
        upload(self, operation)

    monkeypatch.setattr(Asked, "upload", watched)
    facts = told(tmp_path, place, "--create", "--workers", workers)
    assert facts["workers"] == workers
    assert len(seen) > 4
    assert max(seen) <= workers


def test_a_disk_for_one_shard_gets_one_worker(
    hub: Hub, parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a disk for none is refused before anything is sent."""
    place = add_parent(hub, parent, xet=False)
    largest = max((parent / name).stat().st_size for name in (*SHARDS, SCALES))
    usage = shards_of.shutil.disk_usage(parent)
    monkeypatch.setattr(shards_of.shutil, "disk_usage", lambda path: usage._replace(free=100))
    refused = run(tmp_path, place, "--create", "--workers", 3)
    assert "the disk has 100 free" in str(refused.exception)
    assert hub.sent == {}
    monkeypatch.setattr(shards_of.shutil, "disk_usage", lambda path: usage._replace(free=int(1.2 * largest)))
    assert told(tmp_path, place, "--workers", 3)["workers"] == 1


def test_a_hub_that_gives_its_files_more_slowly_is_waited_for(
    hub: Hub, parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it says, where it says so."""
    place = add_parent(hub, parent)
    waits: list[float] = []
    monkeypatch.setattr(ranges, "sleep", waits.append)
    hub.fail += [("resolve", 429)] * 3
    hub.wait_seconds = 7
    told(tmp_path, place, "--create")
    assert waits == [7.0] * 3


def test_a_branch_that_moved_while_shards_were_made_is_left_to_whoever_moved_it(
    hub: Hub, parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no shard goes twice when the same command is run again."""
    place = add_parent(hub, parent)
    hub.add("me/child", {"README.md": b"hello"})
    upload = Asked.upload

    def meanwhile(self: Asked, operation: Any) -> None:
        upload(self, operation)
        repository = hub.repositories["me/child"]
        if len(repository.messages) == 1:
            repository.commit("main", dict(repository.at("main") or {}), "somebody else's")

    monkeypatch.setattr(Asked, "upload", meanwhile)
    refused = run(tmp_path, place)
    assert "somebody else has committed" in str(refused.exception)
    assert shown(hub) == {"README.md": b"hello"}
    build(parent, tmp_path / "near")
    assert len(told(tmp_path, place)["resumed"]) == 4
    assert shown(hub) == published(tmp_path / "near")
    assert max(hub.sent.values()) == 1


def test_without_its_notes_a_build_believes_the_branchs_manifest(
    hub: Hub, parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit of a hub can't change, so its manifest needs no proof by the parent's bytes."""
    place = add_parent(hub, parent)
    told(tmp_path, place, "--create")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert told(tmp_path, place)["made"] == {}


def test_a_manifest_on_the_branch_that_is_none_is_replaced(hub: Hub, parent: Path, tmp_path: Path) -> None:
    """What lies on a branch may be anybody's: it never stops a build."""
    place = add_parent(hub, parent)
    hub.add("me/child", {MANIFEST: b'{"format": "another"}'})
    assert set(told(tmp_path, place)["made"]) >= set(SHARDS)
    assert json.loads(shown(hub)[MANIFEST])["parent"]["repository"] == PARENT


def test_a_changed_recipe_makes_and_sends_only_the_shards_that_it_changes(
    hub: Hub, parent: Path, tmp_path: Path
) -> None:
    """A build into a hub is as incremental as one into a folder."""
    place = add_parent(hub, parent)
    told(tmp_path, place, "--create")
    sent = dict(hub.sent)
    changed = RECIPE.replace("block = [8, 8]", "block = [4, 4]")
    facts = told(tmp_path, place, recipe=changed)
    assert set(facts["made"]) == {SHARDS[2]}
    assert len(hub.sent) == len(sent) + 1
    build(parent, tmp_path / "near", changed)
    assert shown(hub) == published(tmp_path / "near")


@pytest.mark.parametrize(
    ("why", "far"), [("regions", True), ("regions", False), ("no xet", True), ("no parent", False)]
)
def test_what_the_hub_does_not_copy_is_sent(
    hub: Hub, parent: Path, tmp_path: Path, why: str, far: bool
) -> None:
    """Other regions, no Xet, no parent there: the result is the same, and no shard is sent twice."""
    hub.regions_differ = why == "regions"
    place = add_parent(hub, parent, xet=why != "no xet")
    if why == "no parent":
        del hub.repositories[PARENT]
    build(parent, tmp_path / "near")
    result = run(tmp_path, place if far else parent, "--create")
    assert result.exit_code == 0, result.output
    assert shown(hub) == published(tmp_path / "near")
    assert sorted(hub.sent.values()) == [1] * 4


def test_a_shard_that_the_hub_lost_is_made_again(hub: Hub, parent: Path, tmp_path: Path) -> None:
    """A note is no proof that the hub holds a shard."""
    add_parent(hub, parent)
    told(tmp_path, parent, "--create")
    published_before = shown(hub)
    hub.add("me/child", {"config.json": b"{}"})
    told(tmp_path, parent)
    assert shown(hub) == published_before


def test_a_parent_that_is_not_what_the_hub_states_is_refused(hub: Hub, parent: Path, tmp_path: Path) -> None:
    place = add_parent(hub, parent)
    assert "nothing was written" in run(tmp_path, place, "--create", "--expect-key", "0" * 64).output
    entry = hub.repositories[PARENT].commits[COMMIT][SHARDS[1]]
    other = entry.data[:-1] + bytes([entry.data[-1] ^ 1])
    hub.serves[sha256(entry.data)] = other
    result = run(tmp_path, place, "--create")
    assert result.exit_code == 1
    assert "the hub states" in str(result.exception)
    assert shown(hub) == {}


@pytest.mark.parametrize("words", [["--no-sha256"], ["--scheduler", "tcp://127.0.0.1:1"]])
def test_what_a_hub_can_do_nothing_with_is_refused(
    hub: Hub, parent: Path, tmp_path: Path, words: list[str]
) -> None:
    """The hub is not even asked."""
    result = run(tmp_path, parent, "--create", *words)
    assert result.exit_code == 1
    assert f"does without {words[0]}" in str(result.exception)
    assert hub.calls == []


def test_the_options_of_a_hub_want_a_hub(parent: Path, tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "recipes")
    words = ["build", "-c", path, "--parent", parent, "--out", tmp_path / "out", "--create"]
    result = CliRunner().invoke(shardmill, list(map(str, words)))
    assert result.exit_code == 2
    assert "go with --out hf://" in result.output


def test_the_manifest_on_the_hub_tells_where_the_parent_is(hub: Hub, parent: Path, tmp_path: Path) -> None:
    told(tmp_path, add_parent(hub, parent), "--create")
    manifest = json.loads(shown(hub)[MANIFEST])
    assert manifest["parent"] == {"repository": PARENT, "revision": COMMIT}


def test_a_parent_on_a_hub_is_pinned_by_what_the_hub_states(hub: Hub, parent: Path, tmp_path: Path) -> None:
    """No byte of a shard's data is fetched for it, and a build under the lock finds its parent."""
    place = add_parent(hub, parent)
    text = RECIPE[: RECIPE.index("[parent]")] + RECIPE[RECIPE.index("[output]") :]
    recipe = write_recipe(tmp_path / "recipes", text)
    words = ["pin", "-c", str(recipe), "--parent", place]
    assert CliRunner().invoke(shardmill, ["plan", *words[1:]]).exit_code == 0
    calls = len(hub.calls)
    result = CliRunner().invoke(shardmill, words)
    assert result.exit_code == 0, result.output
    assert "resolve" not in hub.calls[calls:]
    lock = json.loads(recipe.with_suffix(".lock").read_text())
    assert (lock["repository"], lock["revision"]) == (PARENT, COMMIT)
    for name in SHARDS:
        assert lock["files"][name]["sha256"] == sha256((parent / name).read_bytes())
    assert run(tmp_path, place, "--create", recipe=text).exit_code == 0


def test_a_quiet_build_into_a_hub_says_nothing_on_standard_error(
    hub: Hub, parent: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "recipes")
    add_parent(hub, parent)
    words = ["-q", "build", "-c", recipe, "--parent", parent, "--out", PLACE, "--create", "--workers", "1"]
    result = CliRunner().invoke(shardmill, list(map(str, words)))
    assert (result.exit_code, result.stderr) == (0, "")
