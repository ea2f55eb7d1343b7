"""`shardmill report`: three files, one object with --json, one sentence for each fault."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("jinja2", reason="the report needs the extra `report`")
pytest.importorskip("matplotlib", reason="the report's figures need the extra `report`")

from shardmill.pipeline.errors import CheckpointError
from shardmill.verify.commands import report as command
from shardmill.verify.commands.report import report
from tests.pipeline.parents import listing
from tests.schemas import held


def test_it_writes_a_page_a_card_and_json(small: tuple[Path, Path], tmp_path: Path) -> None:
    """And changes neither checkpoint; the object on stdout is the one in the file."""
    parent, out = small
    before = listing(out), listing(parent)
    result = CliRunner().invoke(
        report, [str(out), "--parent", str(parent), "--out", str(tmp_path / "r"), "--json"]
    )
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == [
        "card.md",
        "report.html",
        "report.json",
    ]
    told = held(result.stdout)
    assert told == json.loads((tmp_path / "r" / "report.json").read_text())
    assert told["compared"] is True
    assert (listing(out), listing(parent)) == before


def test_two_reports_of_one_checkpoint_are_the_same_bytes(small: tuple[Path, Path], tmp_path: Path) -> None:
    """No time, host or path stands in them, and no figure holds a random name."""
    for name in "ab":
        assert CliRunner().invoke(report, [str(small[1]), "--out", str(tmp_path / name)]).exit_code == 0
    for file in ("report.html", "card.md", "report.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ('{"name": "another"}', "report.json, in place of the report of another\n"),
        ('{"name": "small"}', "report.json\n"),
        ("[]", "report.json\n"),
        ("no JSON", "report.json\n"),
    ],
)
def test_a_report_of_another_checkpoint_is_not_replaced_without_a_word(
    small: tuple[Path, Path], tmp_path: Path, before: str, said: str
) -> None:
    """The folder's default is the same for all: whoever reports on two checkpoints loses the first report."""
    name = json.loads((small[1] / "shardmill.manifest.json").read_text())["recipe"]["name"]
    (tmp_path / "report.json").write_text(before.replace("small", name))
    result = CliRunner().invoke(report, [str(small[1]), "--out", str(tmp_path)])
    assert (result.exit_code, result.output.endswith(said)) == (0, True), result.output


def test_a_folder_that_shardmill_did_not_build_is_told_so(small: tuple[Path, Path], tmp_path: Path) -> None:
    result = CliRunner().invoke(report, [str(small[0]), "--out", str(tmp_path / "r")])
    assert isinstance(result.exception, CheckpointError)
    assert "no shardmill.manifest.json" in str(result.exception)
    assert not (tmp_path / "r").exists()


def test_an_edited_manifest_is_told_so(small: tuple[Path, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(small[1], tmp_path / "copy"))
    manifest = copy / "shardmill.manifest.json"
    manifest.write_text(manifest.read_text().replace("nobody/small", "somebody/small"))
    result = CliRunner().invoke(report, [str(copy), "--out", str(tmp_path / "r")])
    assert isinstance(result.exception, CheckpointError)
    assert "was edited" in str(result.exception)


def test_a_missing_shard_is_a_finding_of_the_report(small: tuple[Path, Path], tmp_path: Path) -> None:
    """What can be told is still told: the weights are named, their errors are not."""
    copy = Path(shutil.copytree(small[1], tmp_path / "copy"))
    (copy / "model-00001-of-00002.safetensors").unlink()
    arguments = [str(copy), "--parent", str(small[0]), "--out", str(tmp_path / "r"), "--json"]
    result = CliRunner().invoke(report, arguments)
    assert result.exit_code == 0, result.output
    told = held(result.stdout)
    assert told["lint"]["status"] == "error"
    assert [weight["error"] for weight in told["weights"]] == [None] * 5


def test_it_never_writes_into_the_checkpoint(small: tuple[Path, Path]) -> None:
    """Whose every file the manifest accounts for."""
    result = CliRunner().invoke(report, [str(small[1]), "--out", str(small[1] / "report")])
    assert result.exit_code == 2
    assert "lies in the checkpoint" in result.output


def test_without_the_extra_it_says_what_to_install(
    small: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "matplotlib" else object())
    result = CliRunner().invoke(report, [str(small[1]), "--out", str(tmp_path / "r")])
    assert result.exit_code == 2
    assert "pip install" in result.output
    assert not (tmp_path / "r").exists()
