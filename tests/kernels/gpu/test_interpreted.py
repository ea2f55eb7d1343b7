"""The row kernels' portable path on the CPU, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch`")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

ROOT = Path(__file__).parents[3]


def test_write_restage_and_integer_decoder_give_the_reference_s_bytes_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.gpu.interpreted"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == "exact"


@pytest.mark.parametrize("what", ["checks", "bench"])
def test_gpu_checks_and_bench_say_that_they_skip_where_no_gpu_is_found(what, monkeypatch, capsys):
    import torch

    from tests.kernels.gpu import __main__ as runner

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["kernels_gpu", what])
    assert runner.main() == 0
    assert capsys.readouterr().out == "skipped: no GPU found\n"


def test_gpu_checks_name_the_packages_that_the_python_lacks(monkeypatch):
    from tests.kernels.gpu import __main__ as runner

    monkeypatch.setattr(runner, "find_spec", lambda name: None if name == "triton" else object())
    assert runner.obstacle() == f"{sys.executable} has no triton"
