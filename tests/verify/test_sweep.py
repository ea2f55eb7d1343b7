"""A sample of the sweep over clean checkpoints (`make clean-zoo` asks all): nothing is found, however it is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verify.sweep import WAYS, ZOO, alarms

SAMPLE = ("mixed_child", "fp8 scalar scale_inv", "int4 of 32")


@pytest.mark.parametrize("name", SAMPLE)
def test_a_clean_checkpoint_is_clean_in_every_way(name: str, tmp_path: Path) -> None:
    assert dict(alarms(name, tmp_path)) == {way: [] for way in WAYS}


def test_the_sweep_has_more_than_fifty_checkpoints_and_most_have_a_parent() -> None:
    assert len(ZOO) >= 50
    assert sum(original is not None for _, original in ZOO.values()) >= 40
