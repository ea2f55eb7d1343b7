"""Codes that GPTQ and AWQ chose with data raise no alarm beside the parent; a single fault in them does."""

from __future__ import annotations

import numpy as np
import pytest

from tests.verify.tools.chosen_with_data import Array, alarms, awq, gptq
from tests.verify.zoo.encoders import matrix

ROWS, COLUMNS, GROUP = 96, 128, 32


def _inputs() -> Array:
    """Of a few strong directions, as activations are, some columns ten times louder."""
    random = np.random.Generator(np.random.PCG64(4))
    mixed = random.standard_normal((400, 12)) @ random.standard_normal((12, COLUMNS))
    loud = np.where(np.arange(COLUMNS) % 17 == 3, 10.0, 1.0)
    made: Array = ((mixed + 0.5 * random.standard_normal((400, COLUMNS))) * loud).astype(np.float32)
    return made


def _pairs() -> dict[str, tuple[Array, Array, bool]]:
    w, x = np.asarray(matrix("chosen", ROWS, COLUMNS)), _inputs()
    made, factors = awq(w, x, group=GROUP)
    return {
        "gptq": (gptq(w, x, group=GROUP), w, False),
        "gptq ordered": (gptq(w, x, group=GROUP, ordered=True), w, False),
        "gptq by row": (gptq(w, x, group=0), w, False),
        "gptq of eight bits": (gptq(w, x, 8, GROUP), w, True),
        "awq": (made, (w * factors).astype(np.float32), False),
    }


PAIRS = _pairs()


@pytest.mark.parametrize("name", PAIRS)
def test_what_was_chosen_with_data_is_not_taken_for_a_fault(name: str) -> None:
    got, want, eight = PAIRS[name]
    assert alarms(got, want, GROUP, eight) == []
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error > (0.001 if eight else 0.05)  # it is another weight than the parent's


@pytest.mark.parametrize("name", PAIRS)
def test_a_row_a_column_a_block_or_a_scale_of_another_place_is_found(name: str) -> None:
    got, want, eight = PAIRS[name]
    loud = int(np.argmax(np.square(want).sum(0)))
    for change in (
        lambda m: m.__setitem__([3, 40], m[[40, 3]]),
        lambda m: m.__setitem__((slice(None), loud), -m[:, loud]),
        lambda m: m.__setitem__((7, slice(0, GROUP)), -m[7, :GROUP]),
        lambda m: m.__setitem__((9, slice(0, GROUP)), m[9, :GROUP] * np.float32(2)),
        lambda m: m.__setitem__((11, slice(None)), 0),
    ):
        changed = got.copy()
        change(changed)
        assert alarms(changed, want, GROUP, eight)
