"""KL over shown tokens and a tail, top-1 agreement, flips: by hand and as laws."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.verify.accept.score import Pair, divergence, pair, read_positions
from shardmill.verify.accept.scored import Scored

pytest.importorskip("scipy", reason="intervals need the extra `accept`")


def entry(*tokens: tuple[int, float]) -> dict[str, dict[str, float]]:
    ranked = sorted(tokens, key=lambda t: -t[1])
    return {str(token): {"logprob": logprob, "rank": i + 1} for i, (token, logprob) in enumerate(ranked)}


def test_a_divergence_by_hand():
    base, test = {1: log(0.5), 2: log(0.3)}, {1: log(0.4), 2: log(0.4)}
    by_hand = 0.5 * log(0.5 / 0.4) + 0.3 * log(0.3 / 0.4) + 0.2 * log(0.2 / 0.2)
    assert divergence(base, test) == pytest.approx(by_hand)


def test_a_token_that_only_the_baseline_shows_gets_at_most_what_the_test_leaves_over():
    base, test = {1: log(0.7), 2: log(0.2)}, {1: log(0.6), 3: log(0.3)}
    by_hand = 0.7 * log(0.7 / 0.6) + 0.2 * log(0.2 / 0.1) + 0.1 * log(0.1 / 0.3)
    assert divergence(base, test) == pytest.approx(by_hand)
    capped = 0.7 * log(0.7 / 0.6) + 0.2 * log(0.2 / 0.05) + 0.1 * log(0.1 / 0.35)
    assert divergence(base, test, unseen_max=0.05) == pytest.approx(capped)


def test_a_quite_different_tail_diverges():
    """Twenty tokens each, of which only the first is shared."""
    base = {0: log(0.8), **{i: log(0.01) for i in range(1, 20)}}
    test = {0: log(0.8), **{i: log(0.01) for i in range(101, 120)}}
    assert divergence(base, test, unseen_max=0.01) > 0.4


@given(seed=st.integers(0, 10_000), top=st.integers(1, 20))
def test_what_is_shown_never_exceeds_the_true_divergence(seed, top):
    rng = np.random.Generator(np.random.PCG64(seed))
    p, q = rng.dirichlet(np.full(50, 0.3), 2)
    p, q = np.maximum(p, 1e-12), np.maximum(q, 1e-12)
    true = float((p * np.log(p / q)).sum())
    shown = [{int(i): log(d[i]) for i in np.argsort(-d)[:top]} for d in (p, q)]
    least = divergence(*shown, unseen_max=exp(min(shown[1].values())))
    assert -1e-12 <= divergence(*shown) <= least + 1e-9
    assert least <= true + 1e-6


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
        ([None, 7], "lacks"),
        ([None, {**entry((9, -0.1)), "x": {"logprob": -3.0, "rank": 2}}], "no token id"),
        ([None, {"9": {"logprob": None, "rank": 1}}], "expected a log probability, got None"),
        ([None, {"9": {"logprob": float("nan"), "rank": 1}}], "expected a log probability, got nan"),
        ([None, {"9": {"logprob": float("-inf"), "rank": 1}}], "expected a log probability"),
        ([None, {"9": {"logprob": 3.0, "rank": 1}}], r"expected a log probability, got 3\.0"),
        ([None, {"9": {"logprob": True, "rank": 1}}], "expected a log probability, got True"),
        ([None, {"9": {"logprob": -0.1}}], "expected a rank from 1 on, got None"),
        ([None, {"9": {"logprob": -0.1, "rank": 0}}], "expected a rank from 1 on, got 0"),
        ([None, {"9": 5}], "expected a log probability"),
        ([None, {"9": {"logprob": -0.1, "rank": 2}}], "shows 0 of the 1 likeliest"),
        ([None, {**entry((8, -0.1)), "9": {"logprob": -0.05, "rank": 2}}], "rank 1 is not the likeliest"),
        ([None, entry((9, -0.1), (8, -0.2))], "add to more than 1"),
    ],
)
def test_answers_that_do_not_fit_the_prompt_are_refused(entries, message):
    with pytest.raises(ValueError, match=message):
        read_positions([4, 9], entries, skip=0)


def test_a_server_that_shows_fewer_tokens_than_asked_is_refused():
    entries = [None, entry((9, -0.1), (8, -3.0))]
    assert len(read_positions([4, 9], entries, 0, top_k=2)) == 1
    with pytest.raises(ValueError, match="entry 1 shows 2 of the 3 likeliest tokens"):
        read_positions([4, 9], entries, 0, top_k=3)


def test_a_first_choice_that_the_other_shows_only_as_the_texts_own_token_is_outside_its_top_k():
    own = {"9": {"logprob": -6.0, "rank": 40}}
    base = read_positions([4, 9], [None, {**entry((7, -0.1), (6, -3.0)), **own}], 0, top_k=2)[0]
    test = read_positions([4, 9], [None, entry((9, -0.1), (7, -3.0))], 0, top_k=2)[0]
    assert pair("d", base, test).outside
    assert not pair("d", base, base).outside
    assert pair("d", base, test).unseen == pytest.approx(1 - exp(-0.1) - exp(-6.0))


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
    mean = Scored(tuple(pairs), 0.9).mean_kl()
    assert mean.value == pytest.approx(np.mean([p.kl for p in pairs]))
    assert mean.sums[3] == pytest.approx(sum(p.kl for p in pairs if p.document == "d3"))
    assert (len(mean.sums), mean.sizes[3]) == (20, 20)
    assert mean.bounds().low < mean.value < mean.bounds().high


def test_without_any_difference_the_divergence_is_exactly_nothing():
    pairs = tuple(Pair(f"d{i}", True, 0.0, 0.5, 0.0, True) for i in range(12))
    mean = Scored(pairs, 0.9).mean_kl()
    assert (mean.value, mean.bounds().low, mean.bounds().high) == (0, 0, 0)


def test_the_mean_and_rms_of_the_change_are_those_of_the_texts_own_tokens():
    changes = [0.1 * (i % 7) - 0.3 for i in range(240)]
    pairs = tuple(Pair(f"d{i // 20}", True, 0.0, 0.5, c, False) for i, c in enumerate(changes))
    scored = Scored(pairs, 0.9)
    assert scored.mean_delta().value == pytest.approx(np.mean(changes))
    assert scored.rms_delta == pytest.approx(np.sqrt(np.mean(np.square(changes))))
    bounds = scored.mean_delta().bounds(0.975)
    assert bounds.low < np.mean(changes) < bounds.high


def test_documents_without_a_sure_position_do_not_count_for_flips():
    pairs = tuple(Pair(f"d{i}", i != 3, 0.0, 0.95 if i % 2 else 0.5, 0.0, False) for i in range(8))
    flips = Scored(pairs, 0.9).flips
    assert (flips.by_document, flips.sizes) == ((0, 1, 0, 0), (1, 1, 1, 1))
