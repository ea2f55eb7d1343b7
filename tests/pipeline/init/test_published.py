"""Forty published layouts: init plans each, knows every name, and leaves at most five for an expert to change."""

from __future__ import annotations

import pytest

from tests.pipeline.init.published import LAYOUTS, Layout, Size, drafted, row

FEW = Size(layers=4, experts=2)  # names repeat; dimensions are the published ones


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_init_plans_it_and_knows_its_names(layout: Layout) -> None:
    """Something converts, the share is told, and no matrix is kept because its name is not known."""
    made = drafted(layout, FEW)
    assert made.plan.conversions
    assert 0 < made.share <= 1
    assert f"{made.share:.0%}" in row(layout, made)
    assert made.unknown == ()


def test_there_are_forty_and_few_want_an_expert() -> None:
    """What init leaves that a person would convert is listed with its reason."""
    assert len(LAYOUTS) == 40
    assert sum(bool(layout.left) for layout in LAYOUTS) <= 5


def test_stacks_that_are_left_are_told_by_name() -> None:
    """Step's experts are stacks under names of their own: kept, and said to be stacks."""
    (step,) = (layout for layout in LAYOUTS if layout.name.startswith("Step"))
    families = {family.name: family for family in drafted(step, FEW).plan.families}
    assert families["stacks"].action == "keep"
    assert "experts in one tensor" in str(families["stacks"].reason)
