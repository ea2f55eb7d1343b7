"""A sample of `make mutants`: every change to a clean checkpoint is found."""

from __future__ import annotations

from tests.verify.mutants import verdicts


def test_every_mutant_of_a_sample_is_killed() -> None:
    alive = [(operator, what) for operator, what, killed in verdicts(stride=41) if not killed]
    assert alive == []
