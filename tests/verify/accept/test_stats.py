"""The statistics against scipy and statsmodels, and by simulation: what covers 95 % covers 94 to 96."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.verify.accept.gates import Gate
from shardmill.verify.accept.stats import (
    bca,
    design_effect,
    document_bootstrap,
    mcnemar,
    positions_to_decide,
    positions_to_pass,
    resample_weights,
    wilson,
    wilson_bounds,
)

scipy_stats = pytest.importorskip("scipy.stats", reason="the statistics need the extra `accept`")
proportion = pytest.importorskip("statsmodels.stats.proportion", reason="statsmodels is the oracle")
contingency = pytest.importorskip("statsmodels.stats.contingency_tables")

DRAWS = 10_000


def rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


@given(n=st.integers(1, 5000), data=st.data(), confidence=st.sampled_from([0.8, 0.9, 0.95, 0.99]))
def test_wilson_equals_statsmodels(n, data, confidence):
    hits = data.draw(st.integers(0, n))
    ours = wilson(hits, n, confidence)
    theirs = proportion.proportion_confint(hits, n, alpha=1 - confidence, method="wilson")
    assert (ours.low, ours.high) == pytest.approx(theirs, abs=1e-12)


@given(n=st.integers(1, 2000), data=st.data())
def test_one_sided_bounds_are_a_two_sided_interval_of_twice_the_tail(n, data):
    hits = data.draw(st.integers(0, n))
    assert wilson_bounds(hits, n, 0.95) == wilson(hits, n, 0.9)


@given(first=st.integers(0, 60), second=st.integers(0, 60))
def test_mcnemar_equals_statsmodels_and_scipy(first, second):
    ours = mcnemar(first, second)
    assert ours == pytest.approx(contingency.mcnemar([[0, first], [second, 0]], exact=True).pvalue, abs=1e-12)
    if first + second:
        assert ours == pytest.approx(scipy_stats.binomtest(first, first + second).pvalue, abs=1e-12)


@pytest.mark.parametrize(
    ("hits", "percent"), [(264, 97.4), (263, 97.05), (262, 96.68), (259, 95.57), (255, 94.10), (261, 96.31)]
)
def test_every_published_percentage_is_a_count_of_271(hits, percent):
    assert round(100 * hits / 271, 2) == pytest.approx(percent, abs=0.02)


def test_the_published_9557_percent_carry_924_to_975():
    assert wilson(259, 271).outward(1) == (92.4, 97.5)


def test_the_published_score_does_not_decide_its_own_gate():
    assert wilson_bounds(259, 271).low < 0.95 < wilson_bounds(259, 271).high
    assert positions_to_decide(259 / 271, 0.95) == 3929


@pytest.mark.parametrize(("n", "p"), [(271, 0.955), (271, 0.9), (1500, 0.97), (4000, 0.95)])
def test_wilson_covers_what_it_says(n, p):
    hits = rng(n).binomial(n, p, DRAWS)
    inside = [wilson(h, n).low <= p <= wilson(h, n).high for h in np.unique(hits)]
    covered = np.array(inside)[np.searchsorted(np.unique(hits), hits)].mean()
    assert covered == pytest.approx(0.95, abs=0.01)


def documents(seed: int, count: int, size: int, p: float, draws: int) -> np.ndarray:
    """Agreeing positions [count, draws] of documents whose own rates vary around p (beta-binomial)."""
    g = rng(seed)
    rates = g.beta(p * 12, (1 - p) * 12, (count, draws))
    return g.binomial(size, rates).astype(float)


@pytest.mark.parametrize(("count", "size", "p"), [(40, 50, 0.9), (60, 100, 0.95), (200, 30, 0.97)])
def test_the_document_bootstrap_covers_what_it_says(count, size, p):
    hits = documents(count, count, size, p, DRAWS)
    low, high = bca(hits, np.full(count, float(size)), resample_weights(count, 1000, seed=3), 0.95)
    assert ((low <= p) & (p <= high)).mean() == pytest.approx(0.95, abs=0.01)


def test_plain_percentiles_of_few_documents_would_cover_too_little():
    hits, sizes = documents(5, 20, 10, 0.95, DRAWS), np.full(20, 10.0)
    weights = resample_weights(20, 1000, seed=3)
    plain = np.quantile(weights @ hits / 200, (0.025, 0.975), axis=0)
    covered = [
        ((low <= 0.95) & (high >= 0.95)).mean() for low, high in (plain, bca(hits, sizes, weights, 0.95))
    ]
    assert covered[0] < 0.92 < covered[1]


def test_the_document_bootstrap_agrees_with_scipys():
    hits = documents(7, 200, 50, 0.9, 1)[:, 0]
    ours = document_bootstrap(hits, [50] * 200)
    theirs = scipy_stats.bootstrap(
        (hits / 50,), np.mean, n_resamples=4000, method="BCa", rng=rng(2), batch=500
    )
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=2e-3)
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=2e-3)


def test_bias_and_acceleration_are_scipys(monkeypatch):
    """On 25 skewed documents, tails not expanded: every part of the correction shows."""
    monkeypatch.setattr("shardmill.verify.accept.stats.expanded_tail", lambda documents, confidence: 0.025)
    monkeypatch.setattr("shardmill.verify.accept.stats.RESAMPLES", 20_000)
    data = rng(4).lognormal(0, 1.2, 25)
    ours = document_bootstrap(data, np.ones(25))
    theirs = scipy_stats.bootstrap(
        (data,), np.mean, n_resamples=20_000, method="BCa", rng=rng(2)
    ).confidence_interval
    error = data.std() / 5
    assert ours.low == pytest.approx(theirs.low, abs=0.06 * error)
    assert ours.high == pytest.approx(theirs.high, abs=0.1 * error)


def test_fewer_than_ten_documents_have_no_bootstrap_and_no_design_effect():
    assert not document_bootstrap([5] * 9, [6] * 9).known
    assert design_effect([5] * 9, [6] * 9) == 1.0


def test_a_planned_number_of_independent_positions_passes_as_often_as_planned():
    n = positions_to_pass(0.965, 0.95, power=0.9)
    hits, counts = np.unique(rng(17).binomial(n, 0.965, DRAWS), return_counts=True)
    passes = np.array([wilson_bounds(int(h), n).low >= 0.95 for h in hits])
    assert (passes * counts).sum() / DRAWS == pytest.approx(0.9, abs=0.015)


@given(hits=st.integers(0, 500), floor=st.sampled_from([0.8, 0.9, 0.95, 0.99]))
def test_the_n_that_decides_decides_and_one_tenth_less_does_not(hits, floor):
    rate = hits / 500
    n = positions_to_decide(rate, floor)
    if n is None or n < 50:
        return
    gate = Gate("x", at_least=floor)
    bounds = [wilson_bounds(rate * m, m, gate.confidence) for m in (n, int(n * 0.9))]
    decided = [b.low >= floor - 1e-12 or b.high < floor + 1e-12 for b in bounds]
    assert decided == [True, False]


def test_a_rate_on_the_limit_is_never_decided():
    assert positions_to_decide(0.95, 0.95) is None


def test_no_number_of_positions_passes_a_true_rate_below_the_floor():
    with pytest.raises(ValueError, match="never passes"):
        positions_to_pass(0.94, 0.95, power=0.9)
