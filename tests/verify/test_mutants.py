"""A sample of `make mutants`: every change to a clean checkpoint is found."""

from __future__ import annotations

from tests.verify.mutants import verdicts


def test_every_mutant_of_a_sample_is_killed() -> None:
    alive = [(operator, what) for operator, what, killed in verdicts(stride=41) if not killed]
    assert alive == []


def test_every_mutant_of_a_sample_of_every_form_is_killed() -> None:
    """`make mutants` tries them all: alone, and with the parent's floats beside."""
    from tests.verify.form_mutants import mutants
    from tests.verify.form_mutants import verdicts as of_forms

    alive = [(m.form, m.how, m.operator, m.what) for m, killed in of_forms(stride=17) if not killed]
    assert alive == []
    assert sum(1 for _ in mutants()) >= 300


def test_every_mutant_of_a_sample_of_exchanged_moved_and_foreign_parts_is_killed() -> None:
    """Holes at odd places, layers, experts, rows and norms exchanged, configs and tokenizers of another model."""
    from tests.verify.other_mutants import mutants

    every = list(mutants())
    alive = [(m.form, m.how, m.operator) for m in every[::83] if not m.killed()]
    assert alive == []
    assert len(every) >= 1_500
