"""`shardmill tune` parses, refuses in sentences, and shows an example."""

import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="torch is not installed: the extra `torch`")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

from shardmill.pipeline.commands.tune import tune
from shardmill.pipeline.errors import ShardmillError


def test_help_has_an_example_line():
    shown = CliRunner().invoke(tune, ["--help"])
    assert shown.exit_code == 0
    assert "shardmill tune --shape 12576,4096 --block 32" in shown.output


def test_a_wrong_shape_is_a_usage_error():
    shown = CliRunner().invoke(tune, ["--shape", "12576"])
    assert shown.exit_code == 2
    assert "expected N,K" in shown.output


def test_without_a_gpu_it_says_so(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shown = CliRunner().invoke(tune, ["--shape", "12576,4096"])
    assert isinstance(shown.exception, ShardmillError)
    assert "no GPU found" in str(shown.exception)


def test_a_search_prints_a_line_for_each_number_of_tokens(monkeypatch, tmp_path):
    import torch

    from shardmill.kernels import tune as search
    from shardmill.kernels.block_gemm import Stock

    best = search.Best(1, 12e-6, 340e-6, Stock.default((32, 32)), 35e-6, None, float("nan"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(search, "tune", lambda *arguments: iter([best]))
    shown = CliRunner().invoke(tune, ["--shape", "12576,4096", "--m", "1", "--out", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "340.0" in shown.output
    assert f"written to {tmp_path}" in shown.output.replace("\n", "")
