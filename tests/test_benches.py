"""Benches are run rarely, so what they import is held by the default tests."""

from __future__ import annotations

import importlib

import pytest

from tests.test_import_ladder import ROOT


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "bench").glob("[a-z]*.py")))
def test_every_bench_finds_what_it_imports(name: str) -> None:
    """A function that moved must not be missed first by who wants a figure."""
    module = importlib.import_module(f"bench.{name}")
    assert module.__doc__
