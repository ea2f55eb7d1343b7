"""The commands: help with an example, JSON alone on stdout, exit codes, sentences instead of tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shardmill.verify.commands.group import QUESTIONS, verify
from tests.verify.zoo.clean import mixed_child, nvfp4_parent

OURS = [question for question in QUESTIONS if question not in ("accept", "fit")]


def _ask(*arguments: str | Path) -> Result:
    return CliRunner().invoke(verify, [str(argument) for argument in arguments])


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    mixed_child().write(tmp_path / "child")
    nvfp4_parent().write(tmp_path / "parent")
    return tmp_path / "child", tmp_path / "parent"


@pytest.mark.parametrize("question", OURS)
def test_every_question_has_help_with_an_example(question: str) -> None:
    result = _ask(question, "--help")
    assert result.exit_code == 0
    assert f"Example: shardmill verify {question} " in result.output


def test_the_group_lists_its_questions_without_importing_them() -> None:
    code = (
        "import sys, shardmill.verify.commands.group as c; c.verify.main(['--help'], standalone_mode=False);"
    )
    heavy = ("numpy", "xxhash", "shardmill.verify.questions.integrity", "huggingface_hub")
    code += f"assert not set({heavy}) & set(sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(question in shown.stdout for question in QUESTIONS)


@pytest.mark.parametrize("extra", [(), ("--parent",)])
def test_a_clean_child_exits_0_and_json_is_all_there_is_on_stdout(
    pair: tuple[Path, Path], extra: tuple[str, ...]
) -> None:
    result = _ask("integrity", pair[0], "--json", *extra, *([pair[1]] if extra else []))
    value = json.loads(result.stdout)
    assert (result.exit_code, value["question"], value["status"]) == (0, "integrity", "clean")
    assert value["findings"] == []
    assert ("parent" in value["checked"], "parent" in value["not_checked"]) == (bool(extra), not extra)
    assert {"structure", "scales", "codes", "config", "digests"} <= set(value["checked"])


def test_without_a_manifest_digests_are_said_not_to_be_checked(pair: tuple[Path, Path]) -> None:
    assert "digests" in json.loads(_ask("integrity", pair[1], "--json").stdout)["not_checked"]
    assert "not checked: digests" in _ask("integrity", pair[1]).output


def test_a_finding_in_json_names_rule_file_tensor_expected_and_got(pair: tuple[Path, Path]) -> None:
    (pair[0] / "tokenizer.json").write_bytes(b"[]")
    result = _ask("integrity", pair[0], "--json")
    (finding,) = json.loads(result.stdout)["findings"]
    assert result.exit_code == 1
    assert list(finding) == ["rule", "severity", "file", "tensor", "expected", "got"]
    assert (finding["rule"], finding["severity"], finding["file"]) == ("SM055", "error", "tokenizer.json")
    assert len(finding["expected"]) == len(finding["got"]) == 64


def test_people_get_one_line_for_a_fine_file_and_what_to_do_for_a_finding(pair: tuple[Path, Path]) -> None:
    (pair[0] / "tokenizer.json").write_bytes(b"[]")
    lines = _ask("integrity", pair[0]).output.splitlines()
    assert sum(line.startswith("ok  model-00001-of-00002.safetensors") for line in lines) == 1
    assert any(line.startswith("error SM055 file-digest: ") for line in lines)
    assert any(line.startswith("    what to do: ") for line in lines)
    assert lines[-1] == "integrity: 1 error"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("integrity", "nowhere"), "nowhere: there is no such folder or file"),
        (("lint", "{child}/config.json"), "give a checkpoint's folder"),
        (("lint", "{child}", "--select", "SM9"), "'SM9' is no rule"),
        (("lint", "{child}", "--tp", "x"), "give sizes like 1,2"),
        (("roundtrip", "{child}"), "--parent"),
        (("wonder", "{child}"), "No such command"),
    ],
)
def test_a_question_that_cannot_be_asked_exits_2(
    pair: tuple[Path, Path], arguments: tuple[str, ...], said: str
) -> None:
    result = _ask(*(argument.format(child=pair[0]) for argument in arguments))
    assert (result.exit_code, said in result.output) == (2, True)
    assert "Traceback" not in result.output


def test_a_question_of_another_room_that_is_not_there_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(QUESTIONS, "dream", ("verify.dream.commands:dream", "A room not built."))  # type: ignore[arg-type]
    result = _ask("dream", "x")
    assert (result.exit_code, "cannot be asked here" in result.output) == (2, True)


def test_all_asks_what_applies_and_gives_one_verdict(pair: tuple[Path, Path]) -> None:
    result = _ask("all", pair[0], "--parent", pair[1], "--json")
    value = json.loads(result.stdout)
    assert (result.exit_code, value["status"]) == (0, "clean")
    assert list(value["facts"]) == ["integrity", "lint", "loads", "roundtrip", "reproduce", "signature"]


def test_python_m_verify_works_without_pipeline(pair: tuple[Path, Path]) -> None:
    code = "import sys; sys.modules['pipeline'] = None; import runpy; sys.argv = ['verify', 'integrity', sys.argv[1]];"
    code += "runpy.run_module('verify', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(pair[0])], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "integrity: clean")


def test_selected_and_ignored_rules(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (pair[1] / "model-00001-of-00002.safetensors").unlink()
    everything = json.loads(_ask("lint", pair[1], "--json").stdout)["findings"]
    only = json.loads(_ask("lint", pair[1], "--json", "--select", "missing-shard").stdout)["findings"]
    assert {f["rule"] for f in only} == {"SM022"}
    assert len(everything) > len(only)
    ignore = tmp_path / "ignore"
    ignore.write_text(
        "\ufeffSM022 model-0000*  # lies on another disk\r\n\r\n# a comment\r\n"
    )  # as Windows writes it
    report = json.loads(_ask("lint", pair[1], "--json", "--ignore", str(ignore)).stdout)
    assert "SM022" not in {f["rule"] for f in report["findings"]}
    assert report["facts"]["ignored"] == {"SM022 missing-shard: lies on another disk": 1}


@pytest.mark.parametrize(
    ("line", "said"), [("SM022", "without a reason"), ("SM999 # x", "is not"), ("SM022 a b # x", "is not")]
)
def test_an_ignore_line_needs_a_rule_and_a_reason(
    pair: tuple[Path, Path], tmp_path: Path, line: str, said: str
) -> None:
    (tmp_path / "ignore").write_text(line)
    result = _ask("lint", pair[0], "--ignore", str(tmp_path / "ignore"))
    assert (result.exit_code, said in result.output) == (2, True)


def test_a_demanded_tensor_parallel_size_that_cuts_a_block_is_an_error(pair: tuple[Path, Path]) -> None:
    assert _ask("lint", pair[0], "--tp", "1").exit_code == 0
    result = _ask("lint", pair[0], "--tp", "8", "--json")
    assert [f["rule"] for f in json.loads(result.stdout)["findings"]] == ["SM207"]


def test_names_in_hostile_files_reach_the_terminal_without_control_characters(
    pair: tuple[Path, Path],
) -> None:
    index = pair[1] / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["\x1b[31mred\u202e"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(value))
    output = _ask("integrity", pair[1]).output
    assert "\x1b" not in output
    assert "\u202e" not in output
    assert "\\x1b[31mred" in output


def test_the_rules_are_listed_without_a_checkpoint() -> None:
    result = _ask("lint", "--list-rules")
    assert result.exit_code == 0
    assert "SM101  warning  placeholder-input-scale" in result.output


def test_findings_beyond_a_bound_are_counted_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path]
) -> None:
    monkeypatch.setattr("shardmill.verify.rules.findings.FINDINGS_OF_A_RULE_MAX", 3)
    index, file = pair[1] / "model.safetensors.index.json", "model-00001-of-00002.safetensors"
    names = [name for name, placed in json.loads(index.read_text())["weight_map"].items() if placed == file]
    index.write_text(json.dumps({"weight_map": {names[0]: file}}))
    value = json.loads(_ask("lint", pair[1], "--json").stdout)
    assert sum(row["rule"] == "SM024" for row in value["findings"]) == 3
    assert value["more"]["SM024"] == len(names) - 1 - 3
    assert f"and {len(names) - 1 - 3:,} more" in _ask("integrity", pair[1]).output


def test_where_there_is_no_terminal_progress_is_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shardmill.verify.commands import options

    now = iter([0.0, 4.0, 11.0, 12.0, 22.0])
    monkeypatch.setattr(options.time, "monotonic", lambda: next(now))
    with options.Bar() as bar:
        for done in (1, 2, 3, 4):
            bar(done * 10**9, 8 * 10**9)
    assert capsys.readouterr().err.splitlines() == [
        "verify: 1.9 GiB of 7.5 GiB, 173.4 MiB/s, 33 s left",
        "verify: 3.7 GiB of 7.5 GiB, 173.4 MiB/s, 22 s left",
    ]


def test_progress_names_the_question_and_counts_what_it_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of several questions each has its own rate, from when the one before ended."""
    from shardmill.verify.commands import options

    now = iter([0.0, 100.0, 120.0, 140.0])
    monkeypatch.setattr(options.time, "monotonic", lambda: next(now))
    with options.Bar() as bar:
        bar.of("integrity")(1 << 30, 1 << 30)
        bar.of("reproduce")(1000, 4000)
        bar.of("reproduce")(2000, 4000)
    assert capsys.readouterr().err.splitlines() == [
        "integrity: 1.0 GiB of 1.0 GiB, 10.2 MiB/s, 0 s left",
        "reproduce: 1,000 blocks of 4,000 blocks, 50 blocks/s, 60 s left",
        "reproduce: 2,000 blocks of 4,000 blocks, 50 blocks/s, 40 s left",
    ]


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("integrety", "Did you mean integrity?"),
        ("{child}", "To ask all of a checkpoint: verify all {child}"),
        ("hf://org/name", "To ask all of a checkpoint: verify all hf://org/name"),
        ("wonder", "No such command 'wonder'."),
    ],
)
def test_a_question_that_is_misspelt_or_left_out_is_answered_with_the_right_call(
    pair: tuple[Path, Path], word: str, hint: str
) -> None:
    result = _ask(word.format(child=pair[0]))
    assert (result.exit_code, result.output.rstrip().endswith(hint.format(child=pair[0]))) == (2, True)


def test_a_missing_shard_is_one_fault_and_not_one_of_each_of_its_weights(pair: tuple[Path, Path]) -> None:
    (pair[0] / "model-00001-of-00002.safetensors").unlink()
    found = {
        finding["rule"] for finding in json.loads(_ask("integrity", pair[0], "--json").stdout)["findings"]
    }
    assert {"SM022", "SM053"} <= found
    assert "SM060" not in found
