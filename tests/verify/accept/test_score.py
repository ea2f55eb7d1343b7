"""KL over shown tokens and a tail, top-1 agreement, flips: by hand and as laws."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.verify.accept.compare import Scored
from shardmill.verify.accept.score import Pair, divergence, pair, read_positions
from shardmill.verify.accept.stats import document_bootstrap

pytest.importorskip("scipy", reason="intervals need the extra `accept`")


def entry(*tokens: tuple[int, float]) -> dict[str, dict[str, float]]:
    ranked = sorted(tokens, key=lambda t: -t[1])
    return {str(token): {"logprob": logprob, "rank": i + 1} for i, (token, logprob) in enumerate(ranked)}


def test_a_divergence_by_hand():
    base, test = {1: log(0.5), 2: log(0.3)}, {1: log(0.4), 2: log(0.4)}
    by_hand = 0.5 * log(0.5 / 0.4) + 0.3 * log(0.3 / 0.4) + 0.2 * log(0.2 / 0.2)
    assert divergence(base, test) == pytest.approx(by_hand)


def test_tokens_that_only_one_side_shows_fall_into_the_tail():
    base, test = {1: log(0.7), 2: log(0.2)}, {1: log(0.6), 3: log(0.3)}
    assert divergence(base, test) == pytest.approx(0.7 * log(0.7 / 0.6) + 0.3 * log(0.3 / 0.4))


@given(seed=st.integers(0, 10_000), top=st.integers(1, 20))
def test_what_is_shown_never_exceeds_the_true_divergence(seed, top):
    rng = np.random.Generator(np.random.PCG64(seed))
    p, q = rng.dirichlet(np.full(50, 0.3), 2)
    p, q = np.maximum(p, 1e-12), np.maximum(q, 1e-12)
    true = float((p * np.log(p / q)).sum())
    shown = [{int(i): log(d[i]) for i in np.argsort(-d)[:top]} for d in (p, q)]
    assert -1e-12 <= divergence(*shown) <= true + 1e-6


@given(seed=st.integers(0, 10_000))
def test_a_distribution_does_not_diverge_from_itself(seed):
    rng = np.random.Generator(np.random.PCG64(seed))
    shown = {i: log(x) for i, x in enumerate(rng.dirichlet(np.ones(8))[:6])}
    assert divergence(shown, shown) == pytest.approx(0, abs=1e-12)


def test_a_tail_of_nothing_is_no_infinity():
    assert divergence({1: log(0.9)}, {1: 0.0}) < 5


def test_positions_are_read_past_those_skipped():
    entries = [None, entry((5, -0.1), (9, -3.0)), entry((7, -0.5), (6, -1.0))]
    positions = read_positions([4, 9, 6], entries, skip=2)
    assert [(p.best, p.actual) for p in positions] == [(7, -1.0)]
    assert positions[0].confidence == pytest.approx(exp(-0.5))


def test_the_first_token_has_no_prediction_and_is_never_scored():
    assert len(read_positions([4, 9], [None, entry((9, -0.1))], skip=0)) == 1


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([None], "1 entries for 2 tokens"),
        ([None, entry((8, -0.1))], "lacks the prompt's own token"),
        ([None, None], "lacks"),
    ],
)
def test_answers_that_do_not_fit_the_prompt_are_refused(entries, message):
    with pytest.raises(ValueError, match=message):
        read_positions([4, 9], entries, skip=0)


def test_agreement_flips_and_largest_change_are_counted_apart():
    a, b = entry((1, -0.05), (2, -4.0)), entry((2, -0.6), (1, -0.9))
    base = read_positions([0, 1, 2], [None, a, b], 0)
    test = read_positions([0, 1, 2], [None, entry((2, -0.3), (1, -1.4)), b], 0)
    scored = Scored(tuple(pair("d", x, y) for x, y in zip(base, test, strict=True)), confident=0.9)
    assert (scored.agreement.hits, scored.agreement.n) == (1, 2)
    assert (scored.flips.hits, scored.flips.n) == (1, 1)
    assert scored.max_delta == pytest.approx(1.35)


def test_a_position_is_identical_only_if_every_shown_number_is():
    one = read_positions([0, 1], [None, entry((1, -0.5), (2, -1.0))], 0)[0]
    other = read_positions([0, 1], [None, entry((1, -0.5), (2, -1.0000001))], 0)[0]
    assert [pair("d", one, one).identical, pair("d", one, other).identical] == [True, False]


def test_the_mean_divergence_is_over_positions_and_its_bounds_over_documents():
    pairs = [Pair(f"d{i % 20}", True, 0.01 * (i % 7), 0.5, 0.0, False) for i in range(400)]
    value = Scored(tuple(pairs), 0.9).mean_kl()
    assert value.value == pytest.approx(np.mean([p.kl for p in pairs]))
    sums = [sum(p.kl for p in pairs if p.document == f"d{i}") for i in range(20)]
    two_sided = document_bootstrap(sums, [20] * 20, confidence=0.9)  # one-sided at 95 % each
    assert (value.low, value.high) == pytest.approx((two_sided.low, two_sided.high))


def test_without_any_difference_the_divergence_is_exactly_nothing():
    pairs = tuple(Pair(f"d{i}", True, 0.0, 0.5, 0.0, True) for i in range(3))
    value = Scored(pairs, 0.9).mean_kl()
    assert (value.value, value.low, value.high) == (0, 0, 0)
