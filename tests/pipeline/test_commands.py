"""The command line: exit codes, one JSON object, an example in every help, and never a traceback."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from shardmill.pipeline.commands import main as commands
from shardmill.pipeline.commands.progress import meter
from shardmill.pipeline.manifest.store import Store
from shardmill.pipeline.run import build as run
from shardmill.pipeline.run.stale import Verdict
from tests.pipeline.conftest import ROOT
from tests.pipeline.parents import (
    MANIFEST,
    RECIPE,
    SCALES,
    SHARDMILL,
    SHARDS,
    change_tensor,
    micro_tensors,
    published,
    write_parent,
    write_recipe,
)

# A shell's background job ignores SIGINT, and hands that on to its children.
HEARS_SIGINT = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"

Told = tuple[int, str, str]  # exit code, standard output, standard error


@pytest.fixture
def shardmill(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Told]]:
    """Runs the command in this process."""
    before = signal.getsignal(signal.SIGTERM)

    def call(*words: Any) -> Told:
        monkeypatch.setattr(sys, "argv", ["shardmill", *map(str, words)])
        code = commands.answer()
        told = capsys.readouterr()
        return code, told.out, told.err

    yield call
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def places(parent: Path, tmp_path: Path) -> list[Any]:
    """-c RECIPE --parent PARENT --out OUT"""
    return ["-c", write_recipe(tmp_path), "--parent", parent, "--out", tmp_path / "out"]


def test_plan_build_explain_tell_what_they_did(shardmill: Callable[..., Told], places: list[Any]) -> None:
    code, out, _ = shardmill("plan", *places)
    assert code == 0
    assert "6 tensors convert; 2 files are rewritten, 2 passed on" in out
    assert "loads at tensor-parallel size 1, 2, 4; not 8" in out
    assert "disk: needs" in out
    assert "[4,4]" in out
    code, out, _ = shardmill("explain", *places)
    assert (code, out.count("will be made: it was not built yet")) == (0, 4)
    code, out, _ = shardmill("build", *places, "--kernel", "numpy")
    assert code == 0
    assert "4 shards made" in out
    assert "kernel: numpy" in out
    code, out, _ = shardmill("build", *places)
    assert (code, out.startswith("nothing to do: ")) == (0, True)
    code, out, _ = shardmill("explain", *places)
    assert code == 0
    assert out.count("is up to date") == 4
    assert out.endswith("0 of 4 shards will be made, the others are up to date\n")


def test_plan_says_which_files_stay_behind_and_why(
    shardmill: Callable[..., Told], places: list[Any], parent: Path
) -> None:
    """A tokenizer whose download was cut is a link to nothing; its absence must not come as a surprise."""
    (parent / "vocab.json").symlink_to(parent / "nowhere")
    assert (
        "not passed on: vocab.json (0 B): it is not a file, or a link to nothing\n"
        in shardmill("plan", *places)[1]
    )
    left = json.loads(shardmill("plan", *places, "--json")[1])["side_files"]["left"]
    assert left["vocab.json"]["reason"] == "it is not a file, or a link to nothing"


def test_names_with_brackets_are_shown_as_they_are(shardmill: Callable[..., Told], places: list[Any]) -> None:
    places[1].write_text(RECIPE.replace('"mlp"', '"mlp [/b] [red]"').replace('"micro"', '"[/i]"'))
    code, out, _ = shardmill("plan", *places)
    assert code == 0
    assert "mlp [/b] [red]" in out
    assert "[/i]: from the parent to the output" in out


def test_the_summary_names_a_kernel_only_where_one_encoded(
    shardmill: Callable[..., Told], places: list[Any], parent: Path
) -> None:
    def kernel() -> str:
        return str(json.loads(shardmill("build", *places, "--kernel", "numpy", "--json")[1])["kernel"])

    assert kernel() == "numpy"
    change_tensor(parent / SCALES, "model.layers.0.experts.0.input_scale")
    assert kernel() == "none"


def test_lines_of_progress_tell_what_is_done_of_what(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is no terminal. What was judged before the work began doesn't slow the rate."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with meter(quiet=False) as progress:
        now[0] = 1000.0
        progress.begin(4 << 20)
        for now[0] in (1005.0, 1010.0):
            progress.advance(1 << 20)
    assert capsys.readouterr().err == "2.0 MiB of 4.0 MiB, 204.8 KiB/s, 10 s left\n"


def test_json_is_one_object_and_nothing_else(shardmill: Callable[..., Told], places: list[Any]) -> None:
    code, out, _ = shardmill("plan", *places, "--json")
    facts = json.loads(out)
    assert (code, facts["converted"], facts["files_rewritten"]) == (0, 6, [SHARDS[0], SHARDS[2]])
    assert facts["disk"]["needed"] == facts["output"]["file_bytes"]
    code, out, _ = shardmill("explain", *places, "--json")
    shards = dict.fromkeys(sorted((*SHARDS, SCALES)), "it was not built yet")
    told = json.loads(out)
    assert (told["shards"], told["staged"]) == (shards, [])
    assert told["others"][:3] == ["config.json", "README.md", "model.safetensors.index.json"]
    code, out, err = shardmill("build", *places, "--json")
    summary = json.loads(out)
    assert (code, err) == (0, "")
    assert summary["plan_key"] == facts["key"]
    assert summary["made"].keys() == {*SHARDS, SCALES}
    code, out, _ = shardmill("build", *places, "--json")
    assert (code, json.loads(out)["made"], json.loads(out)["files_written"]) == (0, {}, [])


def test_explain_counts_what_a_cut_build_has_made_apart(
    shardmill: Callable[..., Told], places: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = (
        Verdict("a", "it was not built yet", staged=True),
        Verdict("b", "it was not built yet"),
        Verdict("c", None),
    )
    monkeypatch.setattr(run, "explain", lambda *rest: run.Explanation(verdicts, ("config.json",)))
    assert shardmill("explain", *places)[1].splitlines() == [
        "a: is made and will be published",
        "b: will be made: it was not built yet",
        "c: is up to date",
        "config.json: will be written",
        "1 of 3 shards will be made, 1 made before will be published, the others are up to date",
    ]


def test_explain_writes_nothing(shardmill: Callable[..., Told], places: list[Any]) -> None:
    assert shardmill("explain", *places)[0] == 0
    assert not places[-1].exists()


def test_plan_names_no_output_and_needs_none(shardmill: Callable[..., Told], places: list[Any]) -> None:
    code, out, _ = shardmill("plan", *places[:4])
    assert (code, "disk:" in out) == (0, False)


def test_the_short_way_out_sees_every_change(
    shardmill: Callable[..., Told], places: list[Any], parent: Path
) -> None:
    """A build that finds nothing to do without planning must not miss a change of parent, recipe or output."""
    recipe, out = places[1], places[-1]

    def made() -> set[str]:
        return set(json.loads(shardmill("build", *places, "--json")[1])["files_written"])

    made()
    assert made() == set()
    change_tensor(parent / SCALES, "model.layers.0.experts.0.input_scale")
    assert made() == {SCALES, MANIFEST}
    (out / "config.json").unlink()
    assert made() == {"config.json"}
    (out / MANIFEST).unlink()
    assert MANIFEST in made()
    (parent / "NOTICE").write_text("new")
    assert "NOTICE" in made()
    recipe.write_text(RECIPE.replace("[8, 8]", "[4, 4]"))
    assert SHARDS[2] in made()
    recipe.write_text(RECIPE.replace("[8, 8]", "[4, 4]") + "\n# a remark\n")
    assert made() == {MANIFEST}, "it holds the recipe's text"
    assert made() == set()
    assert set(json.loads(shardmill("build", *places, "--json", "--no-sha256")[1])["files_written"]) == {
        MANIFEST
    }
    (out / SHARDS[1]).write_bytes(b"x")
    assert SHARDS[1] in made()


@pytest.mark.parametrize("file", [SCALES, "config.json"])
def test_the_short_way_out_sees_what_changed_while_the_last_build_was_at_work(
    shardmill: Callable[..., Told],
    places: list[Any],
    parent: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
) -> None:
    """Whatever a build has read already may change before it ends; the next build must not believe it."""
    original = run.publish

    def meddle(*rest: Any) -> Any:
        if file == SCALES:
            change_tensor(parent / SCALES, "model.layers.0.experts.0.input_scale")
        else:
            config = json.loads((parent / file).read_text())
            (parent / file).write_text(json.dumps({**config, "eps": 1}))
        return original(*rest)

    with monkeypatch.context() as patch:
        patch.setattr(run, "publish", meddle)
        assert shardmill("build", *places)[0] == 0
    assert file in json.loads(shardmill("build", *places, "--json")[1])["files_written"]
    assert json.loads(shardmill("build", *places, "--json")[1])["files_written"] == []


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (
            ["build", "--parent", "{parent}", "--out", "{out}", "-c", "{here}/nowhere.toml"],
            2,
            "does not exist",
        ),
        (["build", "--parent", "{here}/nowhere", "--out", "{out}", "-c", "{recipe}"], 2, "does not exist"),
        (["build", "--parent", "{parent}", "--out", "{parent}", "-c", "{recipe}"], 2, "is the parent itself"),
        (["build", "--parent", "{parent}", "--out", "{recipe}", "-c", "{recipe}"], 2, "is a file"),
        (["build", "--parent", "{parent}", "-c", "{recipe}"], 2, "Missing option '-o' / '--out'"),
        (
            ["build", "--parent", "{parent}", "--out", "{out}", "-c", "{recipe}", "--workers", "0"],
            2,
            "--workers",
        ),
        (
            ["build", "--parent", "{parent}", "--out", "{out}", "-c", "{recipe}", "--expect-key", "0"],
            1,
            "not 0",
        ),
        (["plan", "--parent", "{parent}", "-c", "{here}"], 2, "is a directory"),
        (
            ["explain", "--parent", "{parent}", "--out", "{here}", "-c", "{recipe}", "--x"],
            2,
            "No such option",
        ),
        (["fly"], 2, "No such command 'fly'"),
        (["toy-parent", "{here}"], 1, "holds something other than a toy parent"),
    ],
)
def test_a_fault_is_one_sentence_and_its_exit_code(
    shardmill: Callable[..., Told],
    places: list[Any],
    parent: Path,
    words: list[str],
    code: int,
    sentence: str,
) -> None:
    """1 for the world, 2 for the way the command was called; standard output stays empty."""
    names = {"parent": parent, "out": places[-1], "recipe": places[1], "here": places[1].parent}
    told = shardmill(*(word.format(**names) for word in words))
    assert told[0] == code, told
    assert sentence in told[2]
    assert "Traceback" not in told[2]
    assert told[1] == ""
    assert not places[-1].exists()


def test_a_recipe_fault_is_usage_and_a_plan_fault_is_a_failure(
    shardmill: Callable[..., Told], places: list[Any]
) -> None:
    recipe = places[1]
    recipe.write_text(RECIPE.replace("expect", "expekt", 1))
    code, _, err = shardmill("plan", *places)
    told = f"{recipe}:16: family 'attention': expekt: the key 'expekt' is not known (do you mean 'expect'?)"
    assert (code, told in err) == (2, True)
    recipe.write_text(RECIPE.replace("expect = 4", "expect = 5"))
    code, _, err = shardmill("plan", *places)
    assert (code, "expects 5 tensors, the parent has 4" in err) == (1, True)


def test_an_expected_key_that_is_met_builds(shardmill: Callable[..., Told], places: list[Any]) -> None:
    key = json.loads(shardmill("plan", *places, "--json")[1])["key"]
    assert shardmill("build", *places, "--expect-key", key)[0] == 0


@pytest.mark.parametrize("place", ["save", "stage", "commit", "keep_receipt"])
def test_an_error_of_the_operating_system_is_a_sentence_too(
    shardmill: Callable[..., Told], places: list[Any], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A full disk or a lost mount may strike anywhere; the same command goes on after it is mended."""

    def fail(*args: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/somewhere/file")

    with monkeypatch.context() as patch:
        patch.setattr(Store, place, fail)
        code, _, err = shardmill("build", *places)
    assert code == 1
    assert "/somewhere/file: No space left on device" in err
    assert "Traceback" not in err
    assert shardmill("build", *places)[0] == 0


def test_a_kernel_that_is_not_installed_is_told_with_the_way_to_get_it(
    shardmill: Callable[..., Told], places: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    code, _, err = shardmill("build", *places, "--kernel", "numba")
    assert (code, "pip install numba" in err) == (2, True)
    assert not places[-1].exists()


def every_command() -> Iterator[tuple[str, click.Command]]:
    """Each command and subcommand that is there: its words and itself."""
    waiting: list[tuple[str, click.Command]] = [("shardmill", commands.shardmill)]
    while waiting:
        words, command = waiting.pop()
        yield words, command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                try:
                    inner = command.get_command(context, name)
                except ImportError:
                    continue  # needs a package that is not installed
                assert inner is not None
                waiting.append((f"{words} {name}", inner))


def test_every_command_shows_an_example_in_its_help() -> None:
    without = []
    for words, command in every_command():
        text = command.get_help(click.Context(command, info_name=words))
        if "Example" not in text or words.split()[-1] not in text.partition("Example")[2]:
            without.append(words)
    assert without == []


def test_every_command_of_the_table_exists() -> None:
    """A row without its module would be a command that fails when it is called."""
    for _, (place, line) in commands.COMMANDS.items():
        module = place.partition(":")[0]
        path = ROOT / "src" / (module.replace(".", "/") + ".py")
        assert path.exists() or (path.with_suffix("") / "__init__.py").exists(), module
        assert line.endswith((".", "?")), line


def test_help_and_version_as_a_user_calls_them() -> None:
    """In a process of its own, as installed."""
    for words, expected in ((["--help"], "Commands:"), (["--version"], "shardmill 0.")):
        told = subprocess.run([*SHARDMILL, *words], cwd=ROOT, capture_output=True, text=True, check=True)
        assert expected in told.stdout
        assert told.stderr == ""


def test_a_reader_that_leaves_early_is_no_traceback(places: list[Any]) -> None:
    """`shardmill explain ... | head -0`"""
    command = [*SHARDMILL, "explain", *map(str, places)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate()
    assert err == ""


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_a_build_at_once_and_the_next_one_finishes_it(
    shardmill: Callable[..., Told],
    places: list[Any],
    reference: dict[str, bytes],
    number: int,
    code: int,
    workers: int,
) -> None:
    """The build is signalled from a worker, a thread of it or a process, in the middle of a shard."""
    script = (
        f"{HEARS_SIGINT}"
        "import os, shardmill.pipeline.stages.job as job, shardmill.pipeline.run.processes as processes\n"
        "from shardmill.pipeline.commands.main import main\n"
        "build = os.getpid()\n"
        f"signalled = lambda self, count: (os.kill(build, {int(number)}), __import__('time').sleep(120))\n"
        "job.Watch.done = processes.BoardWatch.done = signalled\n"
        "main()"
    )
    command = [sys.executable, "-c", script, "build", *map(str, places), "--workers", str(workers)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert told.returncode == code
    assert "run the same command to continue" in told.stderr
    assert "Traceback" not in told.stderr
    assert published(places[-1]) == {}
    assert shardmill("build", *places)[0] == 0
    assert published(places[-1]) == reference


def test_a_second_signal_on_the_way_out_is_not_heard(places: list[Any]) -> None:
    """Ctrl-C once more while the first one is answered: the same sentence and exit code, and at once."""
    script = (
        f"{HEARS_SIGINT}"
        "import os, shardmill.pipeline.stages.job as job, shardmill.pipeline.commands.main as commands\n"
        "import shardmill.pipeline.run.processes as processes\n"
        "build = os.getpid()\n"
        "interrupt = lambda: os.kill(build, 2)\n"
        "done = lambda self, count: (interrupt(), __import__('time').sleep(120))\n"
        "job.Watch.done = processes.BoardWatch.done = done\n"
        "say = commands.click.echo\n"
        "commands.click.echo = lambda *words, **how: (interrupt(), say(*words, **how))\n"
        "commands.main()"
    )
    command = [sys.executable, "-c", script, "build", *map(str, places)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert told.returncode == 130
    assert told.stderr.strip() == "stopped; run the same command to continue"


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_caller_that_closed_a_stream_gets_the_exit_code_all_the_same(
    places: list[Any], closed: str
) -> None:
    """As daemons and cron start it."""
    command = ["sh", "-c", f'"$@" {closed}', "sh", *SHARDMILL, "build", *map(str, places)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (told.returncode, told.stderr) == (0, "")
    assert MANIFEST in published(places[-1])


def test_what_libraries_want_done_at_the_end_is_done() -> None:
    script = (
        "import atexit, sys\n"
        "from shardmill.pipeline.commands.main import main\n"
        "atexit.register(print, 'done at exit')\n"
        "main()"
    )
    command = [sys.executable, "-c", script, "--version"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "done at exit"


@pytest.mark.parametrize(("left", "code"), [("None", 0), ("3", 3), ("'a sentence'", 1)])
def test_a_command_that_leaves_the_process_itself_is_understood(left: str, code: int) -> None:
    script = (
        "import sys, shardmill.pipeline.commands.main as commands\n"
        f"commands.shardmill = lambda standalone_mode: sys.exit({left})\n"
        "commands.main()"
    )
    told = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (told.returncode, told.stderr) == (code, "a sentence\n" if code == 1 else "")


def test_explain_names_every_file_that_a_build_then_writes(
    shardmill: Callable[..., Told], places: list[Any]
) -> None:
    """Config, README, index and a carried file, each damaged in place."""
    assert shardmill("build", *places)[0] == 0
    for name in ("config.json", "README.md", "model.safetensors.index.json", "LICENSE"):
        path = places[-1] / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + b"#")
        told = shardmill("explain", *places)[1].splitlines()
        assert [line for line in told if "will be" in line and "shards" not in line] == [
            f"{name}: will be written"
        ]
        assert json.loads(shardmill("build", *places, "--json")[1])["files_written"] == [name]
        assert path.read_bytes() == whole


def test_a_build_tells_why_it_makes_some_shards_again(
    shardmill: Callable[..., Told], places: list[Any]
) -> None:
    assert shardmill("build", *places)[0] == 0
    path = places[-1] / SHARDS[0]
    path.write_bytes(path.read_bytes()[:-1] + b"#")
    _, out, _ = shardmill("build", *places)
    assert f"{SHARDS[0]}: its bytes in {places[-1]} are not those that were built" in out
    assert "1 shard made, 3 up to date, 1 file written" in out


def test_what_a_build_of_another_kind_left_behind_is_removed_though_there_is_nothing_to_do(
    shardmill: Callable[..., Told], places: list[Any]
) -> None:
    assert shardmill("build", *places)[0] == 0
    orphan = places[-1] / ".shardmill" / "staging" / "model-00009-of-00009.safetensors.0a1b2c3d"
    orphan.write_bytes(bytes(100))
    for _ in range(2):
        assert shardmill("build", *places)[1].startswith("nothing to do: ")
        assert not orphan.exists()


def test_a_plan_that_is_stopped_does_not_claim_to_go_on(places: list[Any]) -> None:
    script = (
        "import os, shardmill.pipeline.run.prepare as run\n"
        "from shardmill.pipeline.commands.main import main\n"
        "run.make_plan = lambda *rest: (os.kill(os.getpid(), 15), __import__('time').sleep(120))\n"
        "main()"
    )
    command = [sys.executable, "-c", script, "plan", *map(str, places)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (told.returncode, told.stderr) == (143, "terminated\n")


@pytest.mark.parametrize("command", ["plan", "explain", "build"])
def test_what_a_build_would_refuse_plan_and_explain_refuse_too(
    shardmill: Callable[..., Told], places: list[Any], command: str
) -> None:
    """A folder with other files, the parent itself, a place inside another checkpoint: another --out is needed."""
    assert shardmill("build", *places)[0] == 0
    built, parent = places[-1], places[3]
    (built.parent / "other").mkdir()
    (built.parent / "other" / "x").touch()
    for out, why in (
        (built.parent / "other", "is not empty (x"),
        (parent, "is the parent itself"),
        (built / "inside", "is inside the checkpoint"),
    ):
        code, _, err = shardmill(command, *places[:-1], out)
        assert (code, why in err) == (2, True), err
    assert not (built / "inside").exists()


def test_a_build_over_another_parents_checkpoint_tells_what_goes(
    shardmill: Callable[..., Told], places: list[Any], tmp_path: Path
) -> None:
    assert shardmill("build", *places)[0] == 0
    files = micro_tensors()
    renamed = {file.replace("model-", "weights-"): tensors for file, tensors in files.items()}
    other = write_parent(tmp_path / "other-parent", renamed)
    code, _, err = shardmill("build", *places[:3], other, *places[4:])
    assert code == 0
    assert f"replaces another checkpoint: {SHARDS[0]} goes (4 of its 4 shards)" in err


def test_build_json_has_one_shape_whether_there_is_work_or_not(
    shardmill: Callable[..., Told], places: list[Any]
) -> None:
    first, again = (json.loads(shardmill("build", *places, "--json")[1]) for _ in range(2))
    assert first.keys() == again.keys()
    assert (again["plan_key"], again["kernel"], again["made"]) == (first["plan_key"], "none", {})


@pytest.mark.parametrize("command", ["plan", "explain", "build"])
def test_the_recipes_old_option_works_with_a_notice_and_is_not_shown(
    shardmill: Callable[..., Told], places: list[Any], command: str
) -> None:
    at = places.index("-c")
    old = [*places[:at], "--config", *places[at + 1 :]]
    code, _, err = shardmill(command, *old, "--json")
    assert (code, err.splitlines()[0]) == (
        0,
        "--config is now called --recipe; the old name works for one more release",
    )
    shown = shardmill(command, "--help")[1]
    assert "--recipe" in shown
    assert "--config" not in shown


def test_init_takes_its_old_option_with_a_notice(
    shardmill: Callable[..., Told], places: list[Any], tmp_path: Path
) -> None:
    parent = places[places.index("--parent") + 1]
    code, _, err = shardmill("init", parent, "--output", tmp_path / "drafted.toml")
    assert (code, "--output is now called --out" in err, (tmp_path / "drafted.toml").exists()) == (
        0,
        True,
        True,
    )
    assert "[stages]" not in (tmp_path / "drafted.toml").read_text()


def test_old_words_of_a_recipe_are_said_on_stderr(
    shardmill: Callable[..., Told], places: list[Any], tmp_path: Path
) -> None:
    recipe = Path(places[places.index("-c") + 1])
    recipe.write_text(recipe.read_text().replace('action = "quantize"', 'action = "quantise"', 1))
    code, out, err = shardmill("plan", *places, "--json")
    assert (code, json.loads(out)["converted"]) == (0, 6)
    assert "'quantise' is now written 'quantize'" in err


def test_an_output_folder_that_is_no_place_for_a_build_is_a_usage_error(
    shardmill: Callable[..., Told], tmp_path: Path
) -> None:
    """Inside the parent, around it, the parent itself, another's files: the argument is to be changed, exit code 2."""
    parent = write_parent(tmp_path / "parent", micro_tensors())
    recipe = write_recipe(tmp_path / "recipes")
    (tmp_path / "album").mkdir()
    (tmp_path / "album" / "photograph.jpg").write_bytes(b"")
    for out in (parent, parent / "out", tmp_path, tmp_path / "album"):
        code, _, error = shardmill("build", "-c", recipe, "--parent", parent, "--out", out)
        assert (code, "choose an" in error) == (2, True), error
