"""The action, the hook and the container file do what docs/ci.md says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.verify.zoo.clean import mixed_child

ROOT = Path(__file__).parents[1]
ACTION = ROOT / ".github" / "actions" / "verify"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Where `shardmill` is this checkout's."""
    tool = tmp_path / "bin" / "shardmill"
    tool.parent.mkdir()
    call = "import sys; from shardmill.pipeline.commands.main import main; sys.argv[0] = 'shardmill'; main()"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{call}" "$@"\n')
    tool.chmod(0o755)
    path = f"{tool.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src")}


@pytest.mark.parametrize("faulty", [False, True])
def test_the_action_fails_with_the_findings_and_passes_without(
    tmp_path: Path, environment: dict[str, str], faulty: bool
) -> None:
    folder, sarif, summary = tmp_path / "c", tmp_path / "out.sarif", tmp_path / "summary"
    mixed_child().write(folder)
    if faulty:
        (folder / "tokenizer.json").write_bytes(b"{}  ")
    said = {"PLACE": str(folder), "QUESTION": "integrity", "OPTIONS": "--data", "SARIF": str(sarif),
            "GITHUB_STEP_SUMMARY": str(summary)}  # fmt: skip
    run = subprocess.run([ACTION / "verify.sh"], env=environment | said, capture_output=True, text=True)
    assert run.returncode == int(faulty), run.stderr
    assert bool(json.loads(sarif.read_text())["runs"][0]["results"]) is faulty
    assert f"integrity: {'error' if faulty else 'clean'}" in summary.read_text()


def test_the_action_says_why_a_question_could_not_be_asked(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    said = {"PLACE": str(tmp_path / "none"), "QUESTION": "lint", "SARIF": str(tmp_path / "out.sarif")}
    run = subprocess.run([ACTION / "verify.sh"], env=environment | said, capture_output=True, text=True)
    assert (run.returncode, "no such folder" in run.stderr, (tmp_path / "out.sarif").exists()) == (
        2,
        True,
        False,
    )


@pytest.mark.parametrize("faulty", [False, True])
def test_the_hook_stops_a_push_of_a_faulty_checkpoint(
    tmp_path: Path, environment: dict[str, str], faulty: bool
) -> None:
    folder, remote = tmp_path / "c", tmp_path / "remote.git"
    mixed_child().write(folder)
    if faulty:
        (folder / "tokenizer.json").write_bytes(b"{}  ")

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        who = ["-c", "user.name=n", "-c", "user.email=e@e"]
        return subprocess.run(
            ["git", *who, *words], cwd=folder, env=environment, capture_output=True, text=True
        )

    subprocess.run(["git", "init", "--quiet", "--bare", remote], check=True)
    git("init", "--quiet", "--initial-branch=main")
    (folder / ".git" / "hooks" / "pre-push").write_bytes((ROOT / "docs" / "ci" / "pre-push").read_bytes())
    (folder / ".git" / "hooks" / "pre-push").chmod(0o755)
    git("add", "--all")
    git("commit", "--quiet", "--message", "model")
    pushed = git("push", str(remote), "main")
    assert (pushed.returncode != 0) is faulty, pushed.stderr
    heads = subprocess.run(["git", "branch", "--list"], cwd=remote, capture_output=True, text=True).stdout
    assert ("main" in heads) is not faulty


def test_the_container_installs_extras_that_exist_and_runs_a_command_that_exists() -> None:
    lines = (ROOT / "pipeline" / "Dockerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = lines.partition("/src[")[2].partition("]")[0].split(",")
    assert set(named) <= set(extras)
    assert 'ENTRYPOINT ["shardmill"]' in lines
