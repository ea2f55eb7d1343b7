"""A child of these tests ends at its CPU time and is never left behind; no vLLM is needed to see it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime_patch.vllm import conftest
from tests.runtime_patch.vllm.conftest import Running


def test_a_child_that_computes_for_ever_is_ended_by_its_cpu_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(conftest, "CPU_SECONDS", 1)
    process = subprocess.Popen(
        [sys.executable, "-c", "while True: pass"], start_new_session=True, preexec_fn=conftest.limit_cpu
    )
    with pytest.raises(AssertionError, match="used its 1 s of CPU time"):
        Running(process, tmp_path / "report.json", tmp_path / "log").report()
    assert process.returncode == -signal.SIGXCPU


def test_a_child_dies_with_the_wait_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    waited = process.wait

    def interrupted() -> int:
        monkeypatch.setattr(process, "wait", waited)
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Running(process, tmp_path / "report.json", tmp_path / "log").report()
    assert process.wait() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
