"""Intervals and tests against SciPy, closed forms and published examples."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from pipeline import stats


def test_cluster_bootstrap_of_singletons_is_scipys_bca() -> None:
    x = np.random.default_rng(0).exponential(1, 60)
    ours = stats.cluster_bootstrap(x, np.ones(60), np.arange(60), confidence=0.95, resamples=999, rng=np.random.default_rng(5))
    theirs = scipy_stats.bootstrap(
        (x,), np.mean, method="BCa", n_resamples=999, confidence_level=0.95, rng=np.random.default_rng(5)
    ).confidence_interval
    assert ours.value == pytest.approx(x.mean())
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=0.03)


def test_items_of_one_cluster_do_not_narrow_the_interval() -> None:
    x = np.random.default_rng(1).normal(size=40)
    keywords = {"confidence": 0.95, "resamples": 2000}
    once = stats.cluster_bootstrap(x, np.ones(40), np.arange(40), rng=np.random.default_rng(2), **keywords)
    copied = stats.cluster_bootstrap(
        np.repeat(x, 25), np.ones(1000), np.repeat(np.arange(40), 25), rng=np.random.default_rng(2), **keywords
    )
    assert copied.high - copied.low == pytest.approx(once.high - once.low, rel=1e-6)  # type: ignore[operator]


def test_interval_of_no_difference_is_no_difference() -> None:
    found = stats.cluster_bootstrap(
        np.zeros(50), np.ones(50), np.arange(50), confidence=0.95, resamples=200, rng=np.random.default_rng(0)
    )
    assert (found.value, found.low, found.high) == (0, 0, 0)


def test_one_cluster_has_no_interval_and_says_so() -> None:
    found = stats.cluster_bootstrap(
        [1.0, 2.0], [1.0, 1.0], ["a", "a"], confidence=0.95, resamples=200, rng=np.random.default_rng(0)
    )
    assert found.low is None and found.high is None and "one cluster" in found.warnings[0]


def test_three_clusters_that_agree_are_no_certainty() -> None:
    found = stats.cluster_bootstrap([1.0] * 3, [1.0] * 3, [1, 2, 3], confidence=0.95, resamples=200, rng=np.random.default_rng(0))
    assert found.value == 1 and found.low is None and found.clusters == 3


def test_quantile_is_the_inverse_distribution_function() -> None:
    x = np.random.default_rng(3).normal(size=500)
    for q in (0.5, 0.9, 0.99):
        found = stats.quantile_bootstrap(x, np.arange(500), q, confidence=0.95, resamples=200, rng=np.random.default_rng(0))
        assert found.value == np.quantile(x, q, method="inverted_cdf")


def test_a_quantile_of_few_values_carries_a_warning() -> None:
    found = stats.quantile_bootstrap(
        np.arange(99.0), np.arange(99), 0.99, confidence=0.95, resamples=200, rng=np.random.default_rng(0)
    )
    assert any("few" in w for w in found.warnings)


def test_newcombe_paired_interval_contains_mcnemars_answer_for_30_lost_20_won() -> None:
    found = stats.paired_difference(600, 30, 20, 350, confidence=0.95)
    assert found.value == pytest.approx(-0.010)
    assert found.low == pytest.approx(-0.0239, abs=5e-4) and found.high == pytest.approx(0.0039, abs=5e-4)
    assert stats.mcnemar(30, 20) == pytest.approx(0.203, abs=5e-4)


def test_paired_interval_covers_what_it_says() -> None:
    rng = np.random.default_rng(7)
    cells = np.array([0.62, 0.06, 0.04, 0.28])
    true = cells[2] - cells[1]
    inside = 0
    for table in rng.multinomial(300, cells, size=2000):
        found = stats.paired_difference(*map(int, table), confidence=0.95)
        inside += found.low <= true <= found.high  # type: ignore[operator]
    assert 0.93 <= inside / 2000 <= 0.97


def test_identical_answers_give_no_p_value() -> None:
    assert stats.mcnemar(0, 0) is None


def test_ratio_interval_is_the_t_interval_of_logs() -> None:
    ratios = [1.1, 1.2, 1.15, 1.3, 1.05]
    found = stats.geometric_mean_t(ratios, confidence=0.95)
    logs = np.log(ratios)
    low, high = scipy_stats.t.interval(0.95, 4, loc=logs.mean(), scale=scipy_stats.sem(logs))
    assert (found.low, found.high) == pytest.approx((np.exp(low), np.exp(high)))


def test_more_items_settle_what_is_inconclusive() -> None:
    found = stats.Estimate(-1.0, -2.4, 0.4, 1000, "")
    needed = stats.items_to_settle(found, -2.0)
    assert needed == 1960  # half-width 1.4 must shrink to 1.0: n x 1.96
    assert stats.items_to_settle(found, -1.0) is None
