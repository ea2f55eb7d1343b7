"""What the hub has is not sent again, and what it shows is the old commit or the whole new one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardmill.pipeline.commands.main import shardmill
from shardmill.pipeline.errors import ShardmillError
from shardmill.pipeline.publish.facts import HubFile, Listing, LocalFile, parse_place
from shardmill.pipeline.publish.plan import plan_publication, with_found
from tests.pipeline.delta.children import write_child
from tests.pipeline.parents import INDEX, MANIFEST, RECIPE, bf16, build, published, write_recipe
from tests.pipeline.publish.hub import Hub, Repository, serving
from tests.schemas import held

pytest.importorskip("huggingface_hub", reason="needs the extra `hub`")
# The library hands its open file to httpx2 by an argument that httpx2 would rather see under another name.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
PLACE = "hf://me/child"
PARENT = "nobody/micro"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty hub, asked by a library that does not wait between its tries and leaves Xet out."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serving(Hub()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        yield hub


@pytest.fixture
def child(parent: Path, tmp_path: Path, hub: Hub) -> Path:
    """The micro parent's child, two of its shards passed on; the parent is on the hub at the recipe's revision."""
    build(parent, tmp_path / "out")
    repository = hub.add(PARENT, published(parent))
    commit = json.loads((tmp_path / "out" / MANIFEST).read_text())["parent"]["revision"]
    repository.commits[commit] = repository.commits[repository.branches["main"]]
    return tmp_path / "out"


def run(*words: Any) -> Result:
    return CliRunner().invoke(shardmill, ["publish", *map(str, words)])


def told(*words: Any) -> Any:
    result = run(*words, "--json")
    assert result.exception is None, result.exception
    return held(result.stdout)


def shards(child: Path, rewritten: bool) -> set[str]:
    records = json.loads((child / MANIFEST).read_text())["shards"]
    return {name for name, record in records.items() if record["rewritten"] is rewritten}


def without_dotfiles(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if not name.startswith(".")}


def shown(hub: Hub, name: str = "me/child", branch: str = "main") -> dict[str, bytes]:
    return without_dotfiles(hub.repositories[name].head(branch))


def test_only_rewritten_files_are_sent_and_the_parents_are_copied(hub: Hub, child: Path) -> None:
    facts = told(child, PLACE, "--create")
    assert shown(hub) == published(child)
    assert set(facts["copied"]["files"]) == shards(child, rewritten=False)
    sizes = {name: len(data) for name, data in published(child).items()}
    expected = sum(size for name, size in sizes.items() if name not in shards(child, rewritten=False))
    assert hub.sent_bytes == facts["sent"]["bytes"] == expected
    large = {name for name in facts["sent"]["files"] if name.endswith(".safetensors")}
    assert large == shards(child, rewritten=True)
    assert hub.repositories["me/child"].messages == ["initial", "Publish micro"]


def test_a_dry_run_tells_the_same_and_changes_nothing(hub: Hub, child: Path) -> None:
    wished = told(child, PLACE, "--create", "--dry-run")
    assert "me/child" not in hub.repositories
    assert not {"create", "upload", "commit", "duplicate"} & set(hub.calls)
    done = told(child, PLACE, "--create")
    for way in ("sent", "copied", "found", "kept", "deleted"):
        assert wished[way] == done[way]
    assert run(child, PLACE, "--dry-run").output.startswith(
        "nothing to do: hf://me/child@main has every file"
    )


def test_a_published_checkpoint_is_not_published_again(hub: Hub, child: Path) -> None:
    first = told(child, PLACE, "--create")
    before = hub.sent_bytes
    second = told(child, PLACE)
    assert (second["unchanged"], second["commit"], hub.sent_bytes) == (True, first["commit"], before)
    assert len(hub.repositories["me/child"].messages) == 2


def test_a_changed_file_alone_is_sent_and_one_that_left_is_deleted(
    hub: Hub, child: Path, tmp_path: Path
) -> None:
    hub.add(
        "me/child", {**published(child), "old.safetensors": b"o", "notes.txt": b"n", ".gitattributes": b"g"}
    )
    copy = Path(shutil.copytree(child, tmp_path / "copy"))
    (copy / "extra.txt").write_bytes(b"more\n")
    facts = told(copy, PLACE)
    assert facts["sent"] == {"bytes": 5, "files": {"extra.txt": 5}}
    assert facts["deleted"] == {"bytes": 2, "files": {"notes.txt": 1, "old.safetensors": 1}}
    assert shown(hub) == published(copy)
    assert ".gitattributes" in hub.repositories["me/child"].head()


def test_a_shard_under_another_name_is_copied_within_the_repository(hub: Hub, tmp_path: Path) -> None:
    tensors = {"w": bf16("w", 8, 8)}
    old = write_child(tmp_path / "old", {"a.safetensors": tensors}, {})
    new = write_child(tmp_path / "new", {"b.safetensors": tensors}, {})
    hub.add("me/child", published(old), xet=False)
    facts = told(new, PLACE)
    assert list(facts["copied"]["files"]) == ["b.safetensors"]
    assert shown(hub) == published(new)
    assert hub.sent == {}


@pytest.mark.parametrize("why", ["regions", "no xet", "hidden"])
def test_what_the_hub_does_not_copy_is_sent(hub: Hub, child: Path, why: str) -> None:
    hub.regions_differ = why == "regions"
    if why == "no xet":
        repository = hub.repositories[PARENT]
        files = {name: entry.data for name, entry in next(iter(repository.commits.values())).items()}
        commits = list(repository.commits)
        again = hub.add(PARENT, files, xet=False)
        again.commits |= dict.fromkeys(commits, again.commits[again.branches["main"]])
    elif why == "hidden":
        del hub.repositories[PARENT]
    result = run(child, PLACE, "--create")
    assert result.exit_code == 0
    assert shown(hub) == published(child)
    assert sorted(hub.sent.values()) == [1, 1, 1, 1]
    if why != "no xet":
        assert "copied" in result.stderr


def test_a_branch_is_made_and_main_is_left_alone(hub: Hub, child: Path) -> None:
    main = {"README.md": b"hello", "other.safetensors": b"o"}
    hub.add("me/child", main)
    assert "has no branch next" in str(run(child, f"{PLACE}@next").exception)
    wished = told(child, f"{PLACE}@next", "--create", "--dry-run")
    assert list(wished["deleted"]["files"]) == ["other.safetensors"]
    told(child, f"{PLACE}@next", "--create", "--message", "a new one")
    assert shown(hub, branch="next") == published(child)
    assert shown(hub) == main
    assert hub.repositories["me/child"].messages[-1] == "a new one"


def test_private_is_kept_and_a_public_repository_refused(hub: Hub, child: Path) -> None:
    told(child, PLACE, "--create", "--private")
    assert hub.repositories["me/child"].private
    hub.add("me/public", {"README.md": b"hello"})
    for place in ("hf://me/public", "hf://me/public@next"):
        refused = run(child, place, "--create", "--private")
        assert "is public already" in str(refused.exception)
    assert shown(hub, "me/public") == {"README.md": b"hello"}


@pytest.mark.parametrize(
    "faults",
    [
        [("upload", 429), ("upload", 503)],
        [("upload", "cut"), ("batch", "cut"), ("preupload", 500)],
        [("upload", "lost")],
        [("upload", 403), ("upload", 403)],  # links that have expired
        [("tree", 429), ("verify", 502)],
    ],
)
def test_a_hub_that_fails_for_a_while_gets_every_file_all_the_same(
    hub: Hub, child: Path, faults: list[tuple[str, int | str]]
) -> None:
    hub.fail += faults
    assert run(child, PLACE, "--create").exit_code == 0
    assert hub.fail == []
    assert shown(hub) == published(child)


def test_files_in_parts_arrive_whole(hub: Hub, child: Path) -> None:
    hub.part_bytes = 500
    hub.fail += [("part", 500), ("part", "cut")]
    told(child, PLACE, "--create")
    assert shown(hub) == published(child)
    assert hub.calls.count("part") > hub.calls.count("complete") > 0


def test_a_lost_answer_to_the_commit_is_no_failure_and_no_second_commit(hub: Hub, child: Path) -> None:
    hub.fail.append(("commit", "lost"))
    assert run(child, PLACE, "--create").exit_code == 0
    assert hub.repositories["me/child"].messages == ["initial", "Publish micro"]


@pytest.mark.parametrize("status", [403, 413, 500])
def test_a_refused_commit_is_a_sentence_and_the_files_are_found_next_time(
    hub: Hub, child: Path, status: int
) -> None:
    hub.fail.append(("commit", status))
    refused = run(child, PLACE, "--create")
    assert isinstance(refused.exception, ShardmillError)
    assert "hf_secret" not in str(refused.exception)
    assert shown(hub) == {}
    facts = told(child, PLACE)
    assert set(facts["found"]["files"]) >= shards(child, rewritten=True)
    assert max(hub.sent.values()) == 1
    assert shown(hub) == published(child)


def test_a_branch_that_moved_meanwhile_is_left_to_whoever_moved_it(
    hub: Hub, child: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardmill.pipeline.publish.hub import Hub as Client

    hub.add("me/child", {"README.md": b"hello"})
    upload = Client.upload

    def meanwhile(self: Client, operation: Any) -> None:
        upload(self, operation)
        repository: Repository = hub.repositories["me/child"]
        if len(repository.messages) == 1:
            repository.commit("main", dict(repository.at("main") or {}), "somebody else's")

    monkeypatch.setattr(Client, "upload", meanwhile)
    refused = run(child, PLACE)
    assert "somebody else has committed" in str(refused.exception)
    assert shown(hub) == {"README.md": b"hello"}


def test_a_file_that_is_not_what_its_manifest_states_is_not_committed(hub: Hub, child: Path) -> None:
    name = min(shards(child, rewritten=True))
    data = bytearray((child / name).read_bytes())
    data[-1] ^= 1
    (child / name).write_bytes(data)
    refused = run(child, PLACE, "--create")
    assert f"{name}: expected the sha256" in str(refused.exception)
    assert shown(hub) == {}


LOCAL_FAULTS: dict[str, Callable[[Path], Any]] = {
    "a shard is missing": lambda child: (child / min(shards(child, True))).unlink(),
    "no index": lambda child: (child / INDEX).unlink(),
    "no manifest, and the index names what is not there": lambda child: (
        (child / MANIFEST).unlink(),
        (child / INDEX).write_text('{"weight_map": {"w": "gone.safetensors"}}'),
    ),
    "an interrupted commit": lambda child: (child / ".shardmill" / "commit.json").write_text("{}"),
}


@pytest.mark.parametrize("fault", LOCAL_FAULTS)
def test_half_a_checkpoint_is_refused_before_the_hub_is_asked(hub: Hub, child: Path, fault: str) -> None:
    LOCAL_FAULTS[fault](child)
    assert isinstance(run(child, PLACE, "--create").exception, ShardmillError)
    assert hub.calls == []


def test_a_checkpoint_without_sha256s_or_without_manifest_is_published_too(
    hub: Hub, parent: Path, tmp_path: Path
) -> None:
    build(parent, tmp_path / "out", write_recipe(tmp_path, RECIPE), file_digests=False)
    told(tmp_path / "out", PLACE, "--create")
    (tmp_path / "out" / MANIFEST).unlink()
    facts = told(tmp_path / "out", PLACE)
    assert list(facts["deleted"]["files"]) == [MANIFEST]
    assert shown(hub) == published(tmp_path / "out")


@pytest.mark.parametrize("place", ["me/child", "hf://me", "hf://me/../x", "hf://me/child@" + "0" * 40])
def test_a_place_that_is_none_is_a_usage_error(child: Path, hub: Hub, place: str) -> None:
    assert run(child, place).exit_code == 2
    assert hub.calls == []


def _local(name: str, sha256: str, git: str | None = None) -> LocalFile:
    return LocalFile(name, 1, sha256, git)


def _listing(repository: str, *files: HubFile) -> Listing:
    return Listing(repository, "c" * 40, {file.name: file for file in files})


def test_the_repositorys_own_copy_comes_before_the_parents_and_the_index_comes_last() -> None:
    files = [_local(name, name[0]) for name in (INDEX, "a.safetensors", "config.json", "b.safetensors")]
    here = _listing("me/x", HubFile("z.safetensors", 1, "a", "", copyable=False))
    parent = _listing("p/p", HubFile("a.safetensors", 1, "a", "", True), HubFile("b.safetensors", 1, "b", ""))
    plan = plan_publication(files, here, parent)
    assert [step.file.name for step in plan.steps] == ["a.safetensors", "b.safetensors", "config.json", INDEX]
    assert [step.way for step in plan.steps] == ["copy", "send", "send", "send"]
    assert plan.steps[0].source is not None
    assert plan.steps[0].source.repository == "me/x"
    assert [file.name for file in plan.deleted] == ["z.safetensors"]
    assert [step.way for step in with_found(plan, {"b"}).steps] == ["copy", "found", "send", "send"]


def test_a_small_file_is_known_by_gits_name_for_it() -> None:
    here = _listing("me/x", HubFile("a.json", 1, None, "1"), HubFile("b.json", 1, None, "2"))
    plan = plan_publication([_local("a.json", "s", "1"), _local("b.json", "s", "3")], here, None)
    assert [step.way for step in plan.steps] == ["keep", "send"]


def test_a_place_names_repository_and_branch() -> None:
    assert str(parse_place("hf://a/b")) == "hf://a/b@main"
    assert str(parse_place("hf://a/b@x/y")) == "hf://a/b@x/y"


def test_a_library_that_is_too_old_to_copy_is_told(
    hub: Hub, child: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "CommitOperationCopy", lambda src_path_in_repo, path_in_repo: None)
    assert "needs a newer huggingface_hub" in str(run(child, PLACE, "--create").exception)
    assert hub.calls == []


def test_progress_tells_bytes_rate_and_time_left_and_comes_to_what_is_sent(
    hub: Hub, child: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardmill.pipeline.commands import progress

    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    result = run(child, PLACE, "--create", "--workers", "1")
    lines = [line for line in result.stderr.splitlines() if "/s, " in line]
    assert lines[-1].endswith("0 s left")
    done, total = lines[-1].split(", ")[0].split(" of ")
    assert done == total == progress.human(hub.sent_bytes)


def test_a_quiet_publication_tells_no_progress(
    hub: Hub, child: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardmill.pipeline.commands import progress

    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    result = CliRunner().invoke(shardmill, ["-q", "publish", str(child), PLACE, "--create"])
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.parametrize("part_bytes", [0, 1000])
def test_what_is_read_for_the_hub_is_counted_once(hub: Hub, child: Path, part_bytes: int) -> None:
    """An expired link makes a file go twice; it is counted once all the same."""
    from shardmill.pipeline.publish.publish import Wish, publish, survey

    hub.part_bytes = part_bytes
    hub.fail.append(("part" if part_bytes else "upload", 403))
    counts: list[int] = []
    wish = Wish(create=True)
    surveyed = survey(child, parse_place(PLACE), wish, lambda line: None)
    totals: list[int] = []
    publish(surveyed, wish, lambda line: None, totals.append, counts.append)
    assert sum(counts) == totals[0] == surveyed.plan.bytes("send")
    assert len(counts) > len(surveyed.plan.of("send")) or not part_bytes
