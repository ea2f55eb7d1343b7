"""`verify origin` names the formula of checkpoints that other tools' own exporters wrote."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from shardmill.verify.questions.origin import origin
from shardmill.verify.reading.source import Folder
from tests.verify.tools import golden, seeded

KEPT = [name for name, expected in golden.EXPECTED.items() if expected.keep and expected.formula]


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeded")
    for dtype in seeded.DTYPES:
        seeded.write(folder / dtype, dtype)
    return folder


@pytest.mark.parametrize("name", KEPT)
def test_the_formula_of_a_tools_own_export_is_named(name: str, parents: Path, tmp_path: Path) -> None:
    """Every block is given bit for bit by the formula that the tool is known to compute, which is named first."""
    expected = golden.EXPECTED[name]
    made_by = golden.unpack(name, tmp_path)
    report = origin(Folder(tmp_path), Folder(parents / expected.dtype), 5)
    said = [str(fact) for key, fact in report.facts.items() if key != "seed"]
    assert [fact.partition(" (")[0].partition(":")[0] for fact in said] == [
        expected.formula.partition(" (")[0]
    ]
    assert report.findings == []
    assert name.startswith(made_by.partition(" ")[0])


def test_at_least_twelve_checkpoints_by_six_tools_are_kept() -> None:
    assert len(KEPT) >= 12
    assert len({name.partition(" ")[0] for name in KEPT}) >= 6


def test_the_page_has_a_row_for_each_kept_checkpoint_with_its_tools_version(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "verify-origin.md").read_text()
    for name in KEPT:
        made_by = golden.unpack(name, tmp_path / name)
        tool = made_by.partition(" ")[0]
        assert f"| {made_by} | {name.removeprefix(f'{tool} ')} | {golden.EXPECTED[name].formula} |" in page


def test_the_golden_files_are_small() -> None:
    assert sum(file.stat().st_size for file in golden.GOLDEN.iterdir()) <= 200_000


def test_the_seeded_parent_is_the_one_that_the_tools_were_given(parents: Path) -> None:
    digests = [
        hashlib.sha256((parents / d / "model.safetensors").read_bytes()).hexdigest() for d in seeded.DTYPES
    ]
    assert [digest[:16] for digest in digests] == ["cebe183288648ca5", "2af0587bd24dead9"]
