"""No question finds a fault in a clean checkpoint of any tool, alone, beside its parent, or read from afar."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.lint import LintOptions, lint
from shardmill.verify.reading.source import Folder
from tests.verify.zoo.published import PUBLISHED, Published


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.name)
def test_a_clean_checkpoint_gives_neither_error_nor_warning(published: Published, tmp_path: Path) -> None:
    """By integrity and lint of all data; by lint with the budget of a remote place."""
    published.model().write(tmp_path)
    source = Folder(tmp_path)
    found = [
        finding
        for report in (integrity(source), lint(source), lint(source, LintOptions(sample_bytes=2_048)))
        for finding in report.findings
        if finding.severity != "info"
    ]
    assert found == []


def test_the_zoo_has_forty_clean_checkpoints_and_every_form() -> None:
    from shardmill.verify.formats.schemes import quantized
    from shardmill.verify.formats.table import FORMS
    from shardmill.verify.reading.checkpoint import open_checkpoint
    from shardmill.verify.rules.findings import Report
    from tests.verify.memory import Memory
    from tests.verify.mutants import files_of

    assert len({published.name for published in PUBLISHED}) == len(PUBLISHED) >= 40
    kinds: set[str] = set()
    for published in PUBLISHED:
        checkpoint = open_checkpoint(Memory(files_of(published.model())), Report("integrity"))
        kinds |= {linear.kind for linear in quantized(checkpoint.tensors).values()}
    # Their makers' zoos are in tests/verify/zoo/clean.py: ComfyUI; Mistral's own layout has no config to judge.
    assert kinds >= FORMS.keys() - {"comfy-fp8", "mistral-fp8", "fp8-parts"}
