"""Runs of zero bytes are found wherever they begin, however the bytes come in strips."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardmill.verify.formats.zeros import RUN_BYTES_MIN, ZeroRuns


def _runs(data: np.ndarray, strip: int) -> tuple[tuple[int, int], ...]:  # type: ignore[type-arg]
    runs = ZeroRuns(len(data))
    for begin in range(0, len(data), strip):
        runs.feed(data[begin : begin + strip])
    return runs.finish()


@given(
    st.lists(st.tuples(st.integers(1, 9_000), st.integers(1, 9_000)), min_size=1, max_size=6),
    st.sampled_from([97, 4_096, 8_192, 1 << 20]),
)
def test_every_run_of_4_kib_is_found_and_no_shorter_one(pieces: list[tuple[int, int]], strip: int) -> None:
    """Live and zero pieces take turns; a run's place is exact."""
    data, wanted, at = [], [], 0
    for live, dead in pieces:
        data += [np.full(live, 7, np.uint8), np.zeros(dead, np.uint8)]
        if dead >= RUN_BYTES_MIN:
            wanted.append((at + live, at + live + dead))
        at += live + dead
    found = [run for run in _runs(np.concatenate(data), strip) if run[1] - run[0] > RUN_BYTES_MIN]
    assert found == [run for run in wanted if run[1] - run[0] > RUN_BYTES_MIN]


def test_a_small_tensor_of_zeros_is_one_run() -> None:
    assert _runs(np.zeros(48, np.uint8), 1 << 20) == ((0, 48),)
    assert _runs(np.ones(48, np.uint8), 1 << 20) == ()
