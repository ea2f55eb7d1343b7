"""Which families there are, and why some were kept, comes from the checkpoint itself."""

from __future__ import annotations

import shutil
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.pipeline.plan.readme import child_readme
from shardmill.pipeline.plan.types import FamilySummary
from shardmill.pipeline.recipe import read as recipes
from shardmill.pipeline.recipe.tables import Recipe
from shardmill.verify.reading.source import Folder
from shardmill.verify.report.facts import Facts
from shardmill.verify.report.families import Told, families_of
from shardmill.verify.report.gather import gather
from tests.pipeline.parents import write_recipe
from tests.verify.report.conftest import RECIPE, SHARDS

NAMES = st.text(string.ascii_letters + string.digits + " /+_()|:-$<&é", min_size=1, max_size=20).map(
    str.strip
)
SIZES = st.integers(0, 2**40)
FAMILIES = st.lists(
    st.builds(
        FamilySummary,
        name=NAMES.filter(bool),
        action=st.sampled_from(["keep", "quantize", "drop", "dequantize"]),
        reason=st.none() | NAMES.filter(bool),
        tensors=st.integers(1, 10**6),
        bytes_before=SIZES,
        bytes_after=SIZES,
        scale_bytes=SIZES,
        block=st.none() | st.tuples(st.integers(1, 512), st.integers(1, 512)),
    ),
    max_size=5,
    unique_by=lambda family: family.name.split(":")[0],  # `- a: b: c` could belong to `a` or to `a: b`
)


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return recipes.load(write_recipe(tmp_path_factory.mktemp("recipe"), RECIPE))


@given(families=FAMILIES)
def test_reading_the_readme_gives_back_the_families_that_were_written(
    recipe: Recipe, families: list[FamilySummary]
) -> None:
    told = families_of(child_readme(recipe, families, "key", SHARDS[:1], 2).decode())
    assert told == tuple(
        Told(
            name=family.name,
            action=family.action,
            reason=family.reason,
            tensors=family.tensors,
            bytes_before=family.bytes_before,
            bytes_after=family.bytes_after,
            scale_bytes=family.scale_bytes,
            block=family.block,
        )
        for family in families
    )


def test_families_add_up_to_the_checkpoint(facts: Facts) -> None:
    """Every tensor of the parent lies in one family, so sums over families are the whole's."""
    after = sum(family.bytes_after + family.scale_bytes for family in facts.families)
    assert after == facts.tensor_bytes
    assert sum(family.bytes_before or 0 for family in facts.families) == facts.parent_tensor_bytes


def test_a_checkpoint_alone_tells_all_but_the_errors(facts: Facts, facts_alone: Facts) -> None:
    """Its README knows the sizes before; nothing pretends to have compared weights."""
    assert not facts_alone.compared
    assert facts_alone.parent_tensor_bytes == facts.parent_tensor_bytes
    assert [family.reason for family in facts_alone.families] == [
        None,
        None,
        None,
        "vectors: <i>no</i> Linear",
    ]
    assert all(weight.error is None for weight in facts_alone.weights)
    assert all(family.error is None and not family.layers for family in facts_alone.families)
    assert facts_alone.worst == ()


def test_an_edited_readme_is_not_believed(small: tuple[Path, Path], tmp_path: Path) -> None:
    """The manifest and the headers then name the converted families, with the parent's sizes."""
    parent, out = small
    copy = Path(shutil.copytree(out, tmp_path / "copy"))
    readme = copy / "README.md"
    readme.write_text(readme.read_text().replace("no</i>", "NO</i>"))
    facts = gather(Folder(copy), Folder(parent))
    assert not facts.families_known
    assert [(family.name, family.reason) for family in facts.families] == [
        ("left alone", None),
        ("native", None),
        ("re-rounded", None),
    ]
    believed = gather(Folder(out), Folder(parent))
    sizes = {
        family.name: (family.bytes_before, family.bytes_after, family.scale_bytes)
        for family in facts.families
    }
    assert (
        sizes.items()
        <= {
            family.name: (family.bytes_before, family.bytes_after, family.scale_bytes)
            for family in believed.families
        }.items()
    )


def test_files_are_told_by_what_was_done_with_them(facts: Facts) -> None:
    kinds = {file.name: file.kind for file in facts.files}
    assert kinds[SHARDS[0]] == "rewritten"
    assert kinds[SHARDS[1]] == "passed on"
    assert kinds["config.json"] == kinds["LICENSE"] == "other"
    assert all(file.sha256 for file in facts.files)
