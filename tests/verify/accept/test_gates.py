"""Gates: what passes, what fails, and what nobody can know from so few documents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.verify.accept.gates import Gate, judge_mean, judge_median, judge_proportion, judge_value
from tests.verify.accept.coverage import ALLOWED, claims, meets, share, speed_share

pytest.importorskip("scipy", reason="the gates need the extra `accept`")

FLOOR = Gate("top1_agreement", at_least=0.95)
CLAIMS = {claim.name: claim for claim in claims()}
SLICE = [(10, 0.0), (10, 0.4), (24, 0.1), (24, 0.6)]
# With so few runs a rate of 5 % shows more than this once in some ten thousand cells; the whole table is
# `make accept-coverage`.
RUNS, MOST = 100, 0.14


def documents(hits: int, size: int, count: int, fewer: int = 0) -> tuple[list[int], list[int]]:
    """Documents alike, but that the first has `fewer` hits."""
    return [hits - fewer] + [hits] * (count - 1), [size] * count


@pytest.mark.parametrize("name", CLAIMS)
@pytest.mark.parametrize(("count", "correlation"), SLICE)
def test_a_server_at_the_limit_hardly_ever_passes(name, count, correlation):
    claim = CLAIMS[name]
    assert share(claim, claim.at_limit, count, correlation, RUNS, seed=5) <= MOST


@pytest.mark.parametrize("name", [name for name in CLAIMS if "confident_flips" not in name])
def test_a_server_well_inside_the_limit_passes_with_two_dozen_documents(name):
    claim = CLAIMS[name]
    assert share(claim, claim.inside, 24, 0.0, 40, seed=6) >= 0.9


@given(
    hits=st.lists(st.integers(0, 60), min_size=10, max_size=40),
    limit=st.sampled_from([0.3, 0.6, 0.95]),
)
def test_a_server_whose_own_figure_misses_the_limit_never_passes(hits, limit):
    """What `share` leaves out of the simulation, since it needs no judging."""
    sizes, gate = [60] * len(hits), Gate("x", at_least=limit)
    if not meets(gate, sum(hits) / sum(sizes)):
        assert judge_proportion(gate, hits, sizes).outcome != "PASS"
        assert judge_mean(gate, hits, sizes, positive=True).outcome != "PASS"


def test_a_limit_of_two_percent_needs_more_than_two_dozen_documents():
    gate = Gate("confident_flips", at_most=0.02)
    few, many = (judge_proportion(gate, [0] * count, [60] * count) for count in (24, 64))
    assert (few.outcome, many.outcome) == ("INCONCLUSIVE", "PASS")
    assert "add documents, longer ones do not help" in few.sentence


@given(hits=st.integers(0, 500), count=st.integers(1, 9))
def test_fewer_than_ten_documents_decide_nothing(hits, count):
    counted = judge_proportion(FLOOR, [hits] * count, [500] * count)
    averaged = judge_mean(Gate("mean_kl", at_most=0.05), [hits / 1e4] * count, [500] * count, positive=True)
    assert {counted.outcome, averaged.outcome} == {"INCONCLUSIVE"}
    assert "at least 10 are needed" in counted.sentence
    assert "at least 10 are needed" in averaged.sentence


def test_a_bare_count_is_one_document():
    assert judge_proportion(FLOOR, 2700, 2700) == judge_proportion(FLOOR, [2700], [2700])
    assert judge_proportion(FLOOR, 2700, 2700).outcome == "INCONCLUSIVE"


def test_misses_in_one_document_weigh_more_than_the_same_misses_spread():
    spread = judge_proportion(FLOOR, *documents(98, 100, 24))
    lumped = judge_proportion(FLOOR, *documents(100, 100, 24, fewer=48))
    assert spread.value == lumped.value == 0.98
    assert (spread.outcome, lumped.outcome) == ("PASS", "INCONCLUSIVE")
    assert lumped.low < spread.low


def test_a_server_far_outside_fails():
    assert judge_proportion(FLOOR, *documents(80, 100, 24)).outcome == "FAIL"
    assert judge_mean(Gate("mean_kl", at_most=0.05), [9.0] * 24, [100] * 24, positive=True).outcome == "FAIL"


@given(hits=st.lists(st.integers(0, 50), min_size=1, max_size=30), floor=st.sampled_from([0.5, 0.9, 0.95]))
def test_a_floor_on_hits_is_a_ceiling_on_misses(hits, floor):
    sizes = [50] * len(hits)
    at_least = judge_proportion(Gate("x", at_least=floor), hits, sizes)
    at_most = judge_proportion(Gate("x", at_most=1 - floor), [50 - h for h in hits], sizes)
    if at_least.low is not None:
        assert (at_most.low, at_most.high) == pytest.approx((1 - at_least.high, 1 - at_least.low))
        assert {at_least.outcome, at_most.outcome} != {"PASS", "FAIL"}


def test_a_limit_of_all_or_none_is_checked_on_what_was_asked_and_estimates_nothing():
    assert judge_proportion(Gate("needles", at_least=1.0), [3, 3], [3, 3]).outcome == "PASS"
    assert judge_proportion(Gate("needles", at_least=1.0), [3, 2], [3, 3]).outcome == "FAIL"
    assert judge_proportion(Gate("confident_flips", at_most=0), [0, 1], [30, 30]).outcome == "FAIL"


def test_documents_without_a_counted_position_do_not_count():
    hits, sizes = documents(99, 100, 24)
    assert judge_proportion(FLOOR, [*hits, 0], [*sizes, 0]) == judge_proportion(FLOOR, hits, sizes)


def test_the_same_counts_get_the_same_chance():
    hits, sizes = documents(99, 100, 24, fewer=20)
    assert judge_proportion(FLOOR, hits, sizes).chance == judge_proportion(FLOOR, hits, sizes).chance > 0


def test_a_gate_that_is_not_decided_says_what_would_decide():
    sentence = judge_proportion(FLOOR, *documents(191, 200, 24)).sentence
    assert "positions would decide" in sentence
    assert "sits on the limit" in judge_proportion(FLOOR, *documents(95, 100, 24)).sentence


def test_a_mean_without_any_difference_is_exactly_nothing():
    ruling = judge_mean(Gate("mean_kl", at_most=0.0), [0.0] * 12, [30] * 12, positive=True)
    assert (ruling.outcome, ruling.low, ruling.high) == ("PASS", 0, 0)


def test_the_bounds_of_a_mean_are_those_of_the_gates_confidence():
    rng = np.random.default_rng(4)
    sums = rng.gamma(2, 1, 24).tolist()
    wide, narrow = (
        judge_mean(Gate("mean_kl", at_most=1.0, confidence=c), sums, [10] * 24, True) for c in (0.99, 0.8)
    )
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high


def test_five_rounds_bound_a_median_and_four_do_not():
    gate = Gate("decode_c1", at_least=10.0)
    assert judge_median(gate, [11, 12, 13, 14, 15]).outcome == "PASS"
    assert judge_median(gate, [9.9, 12, 13, 14, 15]).outcome == "INCONCLUSIVE"
    assert judge_median(gate, [11, 12, 13, 14]).outcome == "INCONCLUSIVE"
    assert judge_median(gate, [1, 2, 3, 4, 5]).outcome == "FAIL"


@pytest.mark.parametrize("rounds", [5, 8, 24])
def test_a_server_whose_median_speed_is_the_limit_hardly_ever_passes(rounds):
    assert speed_share(rounds, 1000, seed=2) <= ALLOWED + 0.01


def test_a_ceiling_is_judged_from_the_other_side():
    gate = Gate("mean_kl", at_most=0.05)
    outcomes = [judge_value(gate, v, v - 0.01, v + 0.01).outcome for v in (0.03, 0.05, 0.07)]
    assert outcomes == ["PASS", "INCONCLUSIVE", "FAIL"]


def test_what_was_not_measured_is_not_passed():
    assert judge_proportion(FLOOR, [], []).outcome == "NOT MEASURED"
    assert judge_value(Gate("needles", at_least=1.0), None).outcome == "NOT MEASURED"
    assert judge_mean(Gate("mean_kl", at_most=1), [], []).outcome == "NOT MEASURED"
    assert judge_median(Gate("decode_c1", at_least=1), []).outcome == "NOT MEASURED"
