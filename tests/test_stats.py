"""Intervals and tests against SciPy, closed forms, published tables and simulation (in full: tests/bench/simulations.py)."""

import itertools
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats

from pipeline.core.params import Rule
from pipeline.gating.rules import bound_of, judge
from pipeline.metrics.builder import as_metric
from pipeline.stats import intervals

SURE = {"confidence": 0.95, "resamples": 1000}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# --- cluster bootstrap -------------------------------------------------------------------------------------------


def test_cluster_interval_is_never_inside_the_t_interval_of_its_clusters() -> None:
    x = rng(1).exponential(1, 25)
    found = intervals.cluster_bootstrap(x, np.ones(25), np.arange(25), rng=rng(5), **SURE)
    low, high = scipy_stats.ttest_1samp(x, 0).confidence_interval(0.95)
    assert found.value == pytest.approx(x.mean())
    assert found.low <= low + 1e-12 and found.high >= high - 1e-12  # type: ignore[operator]


def test_upper_limit_of_skewed_clusters_is_bootstrap_t_done_by_hand() -> None:
    x = rng(2).lognormal(0, 1, 20)
    found = intervals.cluster_bootstrap(x, np.ones(20), np.arange(20), confidence=0.95, resamples=20000, rng=rng(5))
    draws = x[rng(6).integers(0, 20, (20000, 20))]
    low_t = np.quantile(scipy_stats.ttest_1samp(draws, x.mean(), axis=1).statistic, 0.025)
    assert found.high == pytest.approx(x.mean() - low_t * scipy_stats.sem(x), rel=0.03)


def test_ratio_error_is_that_of_the_jackknife() -> None:
    size = rng(3).integers(200, 400, 40)
    num, den = rng(4).normal(2, 0.3, 40) * size, size.astype(float)
    alone = (num.sum() - num) / (den.sum() - den)
    jackknife = np.sqrt(39 / 40 * ((alone - alone.mean()) ** 2).sum())
    assert intervals._ratio_error(num, den, num.sum() / den.sum()) == pytest.approx(jackknife, rel=0.02)


def test_items_of_one_cluster_do_not_narrow_the_interval() -> None:
    x = rng(1).normal(size=40)
    once = intervals.cluster_bootstrap(x, np.ones(40), np.arange(40), rng=rng(2), **SURE)
    copied = intervals.cluster_bootstrap(np.repeat(x, 25), np.ones(1000), np.repeat(np.arange(40), 25), rng=rng(2), **SURE)
    assert copied.high - copied.low == pytest.approx(once.high - once.low, rel=1e-6)  # type: ignore[operator]


def test_a_transform_is_applied_to_value_and_limits() -> None:
    x = rng(7).uniform(0.5, 2, 30)
    plain = intervals.cluster_bootstrap(x, np.ones(30), np.arange(30), rng=rng(2), **SURE)
    for name, shape in (("exp", np.exp), ("sqrt", np.sqrt)):
        found = intervals.cluster_bootstrap(x, np.ones(30), np.arange(30), rng=rng(2), transform=name, **SURE)
        assert (found.value, found.low, found.high) == pytest.approx([shape(v) for v in (plain.value, plain.low, plain.high)])


def test_a_share_stays_between_0_and_1_and_a_divergence_above_0() -> None:
    share = intervals.cluster_bootstrap([1.0] * 11 + [0.0], [1.0] * 12, range(12), rng=rng(), **SURE, bounds=(0, 1))
    kld = intervals.cluster_bootstrap([5.0] + [0.001] * 11, [1.0] * 12, range(12), rng=rng(), **SURE, bounds=(0, np.inf))
    assert share.high == 1 and kld.low == 0


def bootstrap(num: Any, clusters: Any, **more: Any) -> Any:
    return intervals.cluster_bootstrap(num, np.ones(len(num)), clusters, rng=rng(), **(SURE | more))


def test_interval_of_no_difference_is_no_difference() -> None:
    found = bootstrap(np.zeros(50), np.arange(50))
    assert (found.value, found.low, found.high) == (0, 0, 0)


def test_one_changed_item_still_has_an_interval_and_its_method_says_which() -> None:
    found = bootstrap([1.0] + [0.0] * 19, np.arange(20), bounds=(0, 1))
    assert found.low == 0 < found.high and found.method.startswith("t over clusters")


@pytest.mark.parametrize("clusters, why", [(["a"] * 3, "one cluster"), ([1, 2, 3], "3 clusters, and all of them agree")])
def test_one_cluster_has_no_interval_and_three_that_agree_are_no_certainty(clusters: list[Any], why: str) -> None:
    found = bootstrap([1.0] * 3, clusters)
    assert found.value == 1 and found.low is found.high is None and why in found.warnings[-1]


@pytest.mark.parametrize("n", [20, 30])
def test_a_share_in_which_all_agree_is_no_certainty(n: int) -> None:
    found = bootstrap(np.zeros(n), np.arange(n) % 10, bounds=(0, 1))
    assert (found.value, found.low) == (0, 0) and found.high == pytest.approx(intervals.wilson(0, 10, confidence=0.95).high)


def test_a_difference_without_losses_may_still_be_a_loss() -> None:
    assert bootstrap(np.repeat([1.0, 0.0], [2, 58]), np.arange(60) % 20, bounds=(-1, 1)).low < 0


def test_a_limit_past_all_numbers_is_no_interval_and_no_warning_of_the_arithmetic() -> None:
    found = bootstrap([0.0, 6.0], ["a", "b"], confidence=0.999, transform="exp")
    assert found.value == pytest.approx(np.exp(3)) and found.low is found.high is None
    assert found.warnings[-1] == "a limit is past all numbers: no interval"


def test_many_clusters_of_which_one_is_nearly_everything_are_few() -> None:
    sizes = np.array([5000] + [10] * 29)
    found = intervals.cluster_bootstrap(rng().uniform(1, 2, 30) * sizes, sizes, range(30), rng=rng(), **SURE)
    assert found.warnings == ("30 clusters, which weigh as 1, are few",)
    even = intervals.cluster_bootstrap(rng().uniform(1, 2, 30), np.ones(30), range(30), rng=rng(), **SURE)
    assert even.warnings == ()


# --- quantiles ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [0.1, 0.5, 0.9])
def test_quantile_and_its_interval_of_independent_values_are_scipys_exact_one(q: float) -> None:
    x = np.sort(rng(4).normal(size=4000))
    found = intervals.quantile_interval(x, np.arange(4000), q, confidence=0.95)
    assert found.value == np.quantile(x, q, method="inverted_cdf")
    exact = scipy_stats.quantile_test(x, p=q).confidence_interval(0.95)
    ranks = np.searchsorted(x, [found.low, exact.low, found.high, exact.high])
    assert abs(ranks[0] - ranks[1]) <= 3 and abs(ranks[2] - ranks[3]) <= 3  # of a half-width of 37 to 62 ranks


def test_a_quantile_beyond_what_was_seen_has_no_upper_limit_and_so_no_interval() -> None:
    found = intervals.quantile_interval(rng().normal(size=155), np.repeat(range(5), 31), 0.99, confidence=0.95)
    assert found.low is None and found.high is None
    assert "155 values are few" in found.warnings[0] and "reaches past" in found.warnings[1]


def test_no_limit_of_a_quantile_is_the_largest_value_behind_which_nothing_was_measured() -> None:
    given = []
    for n in range(40, 400, 20):
        x = rng(n).normal(size=n)
        given += [intervals.quantile_interval(x, np.arange(n), q, confidence=0.95).high for q in (0.9, 0.95, 0.98)]
        assert all(high is None or high < x.max() for high in given[-3:]), n
    assert None in given and len(set(given)) > 10


def test_values_of_one_document_do_not_narrow_a_quantiles_interval() -> None:
    x = rng(5).normal(size=60)
    once = intervals.quantile_interval(x, np.arange(60), 0.5, confidence=0.95)
    copied = intervals.quantile_interval(np.repeat(x, 50), np.repeat(np.arange(60), 50), 0.5, confidence=0.95)
    assert copied.high - copied.low >= once.high - once.low  # type: ignore[operator]


# --- proportions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("right, n", [(0, 12), (1, 12), (7, 12), (12, 12), (12, 40), (81, 263), (0, 20), (1, 29)])
def test_wilson_is_scipys(right: int, n: int) -> None:
    found, expected = intervals.wilson(right, n, confidence=0.9), scipy_stats.binomtest(right, n).proportion_ci(0.9, "wilson")
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12) and found.value == right / n


@pytest.mark.parametrize("both, won, lost, neither, low, high", [
    (36, 12, 2, 0, 0.0569, 0.3404), (20, 12, 2, 16, 0.0562, 0.3292), (18, 12, 2, 18, 0.0562, 0.3290),
    (36, 14, 0, 0, 0.1528, 0.4167), (35, 14, 0, 1, 0.1461, 0.4175), (18, 14, 0, 18, 0.1441, 0.3963),
    (2, 97, 1, 0, 0.8721, 0.9854), (1, 97, 1, 1, 0.8736, 0.9850), (0, 30, 0, 0, 0.8395, 1.0), (54, 0, 0, 0, -0.0664, 0.0664),
    (30, 0, 0, 24, -0.0358, 0.0358),
])  # fmt: skip
def test_paired_difference_is_that_of_newcombe_1998_table_iii(
    both: int, won: int, lost: int, neither: int, low: float, high: float
) -> None:
    """Statistics in Medicine 17:2635, method 10; his e, f, g, h are both, won, lost, neither here."""
    found = intervals.paired_difference(both, lost, won, neither, confidence=0.95)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


def test_a_million_items_have_an_interval_as_wide_as_a_walds() -> None:
    found = intervals.paired_difference(600_000, 30_000, 20_000, 350_000, confidence=0.95)
    half = 1.959964 * np.sqrt((0.05 - 0.01**2) / 10**6)
    assert (found.low, found.high) == pytest.approx((-0.01 - half, -0.01 + half), abs=2e-6)


def test_error_of_two_arithmetics_is_half_of_what_their_sums_differ_by() -> None:
    assert intervals.arithmetic_error([[1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0]], 4) == pytest.approx(1 / 2 / 4)


def test_an_error_is_added_by_its_square_and_never_leaves_the_bounds() -> None:
    found = intervals.widened(intervals.Estimate(0.5, 0.2, 0.9, 10, "m"), 0.4 / 1.959964, confidence=0.95, bounds=(0, 1))
    assert (found.low, found.high) == (pytest.approx(0.5 - np.hypot(0.3, 0.4), abs=1e-6), 1)


@pytest.mark.parametrize("lost, won", [(30, 20), (4, 18), (7, 7)])
def test_paired_p_is_mcnemars_chi_square_and_grows_with_an_error(lost: int, won: int) -> None:
    change = [-1.0] * lost + [1.0] * won + [0.0] * 50
    chi = scipy_stats.chi2.sf((lost - won) ** 2 / (lost + won), 1)
    assert intervals.paired_p(change, 0) == pytest.approx(chi) and intervals.paired_p(change, 5) >= intervals.paired_p(change, 0)


@pytest.mark.parametrize("lost, won", [(0, 1), (3, 9), (30, 20), (7, 7)])
def test_mcnemar_is_the_sum_of_binomial_terms(lost: int, won: int) -> None:
    tail = scipy_stats.binom.cdf(min(lost, won), lost + won, 0.5)
    assert intervals.mcnemar(lost, won) == pytest.approx(min(1.0, 2 * tail)) and intervals.mcnemar(0, 0) is None


def test_of_two_intervals_the_outer_limits_count_and_one_without_bounds_never() -> None:
    one, other = intervals.Estimate(0, -2, 1, 9, "one"), intervals.Estimate(0, -1, 2, 9, "other")
    none = intervals.Estimate(0, None, None, 9, "none")
    for found in (intervals.outer(one, other), intervals.outer(other, one)):
        assert (found.low, found.high) == (-2, 2) and "one" in found.method and "other" in found.method
    assert intervals.outer(one, none) is one is intervals.outer(none, one)


# --- rounds ------------------------------------------------------------------------------------------------------


def test_mean_interval_is_that_of_student_1908() -> None:
    sleep = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]  # hours gained, drug 2 over drug 1
    found = intervals.mean_t(sleep, confidence=0.95)
    assert (found.value, found.low, found.high) == pytest.approx((1.58, 0.7001142, 2.4598858))


def test_ratio_interval_is_the_t_interval_of_logs() -> None:
    ratios = [1.1, 1.2, 1.15, 1.3, 1.05]
    found = intervals.geometric_mean_t(ratios, confidence=0.95)
    logs = np.log(ratios)
    low, high = scipy_stats.t.interval(0.95, 4, loc=logs.mean(), scale=scipy_stats.sem(logs))
    assert found.value == pytest.approx(scipy_stats.gmean(ratios))
    assert (found.low, found.high) == pytest.approx((np.exp(low), np.exp(high)))


@pytest.mark.parametrize("estimate", [intervals.mean_t, intervals.geometric_mean_t])
def test_one_round_has_a_value_and_no_interval_and_none_has_neither(estimate: Any) -> None:
    one, none = estimate([2.0], confidence=0.95), estimate([], confidence=0.95)
    assert one.value == pytest.approx(2) and one.low is None and one.warnings
    assert none.value is None and none.n == 0 and none.warnings


# --- power -------------------------------------------------------------------------------------------------------


def connor(delta: float, changed: float) -> float:
    """Pairs that McNemar's test needs, two-sided 5 %, power 80 % (Connor 1987, Biometrics 43:207); 155 for (0.15, 0.45)."""
    return ((1.95996 * np.sqrt(changed) + 0.84162 * np.sqrt(changed - delta**2)) / delta) ** 2


@pytest.mark.parametrize("n, changed", [(700, 0.03), (700, 0.08), (3000, 0.02)])
def test_what_a_paired_interval_resolves_is_connors_1987_sample_size_turned_around(n: int, changed: float) -> None:
    half = round(n * changed / 2)
    found = intervals.paired_difference(round(0.7 * n) - half, half, half, round(0.3 * n) - half, confidence=0.95)
    smallest = intervals.resolvable(found.low, found.high, confidence=0.95)  # type: ignore[arg-type]
    assert connor(smallest, changed) == pytest.approx(n, rel=0.1)


@pytest.mark.parametrize("estimate, threshold, half", [
    ((-1.0, -2.4, 0.4, 1000), -2.0, 1.4), ((1.0, 0.8, 2.0, 100), 0.5, 0.2), ((1.0, 0.8, 2.0, 100), 3.0, 1.0),
])  # fmt: skip
def test_the_side_of_the_bound_says_how_many_items_settle_it(estimate: Any, threshold: float, half: float) -> None:
    """The error is half / 1.960 now, and the distance must be 1.960 + 0.842 errors."""
    value, *_, n = estimate
    expected = n * (half * (1.959964 + 0.841621) / 1.959964 / (threshold - value)) ** 2
    assert intervals.items_to_settle(intervals.Estimate(*estimate, ""), threshold) == np.ceil(expected)
    assert intervals.items_to_settle(intervals.Estimate(*estimate, ""), value) is None
    assert intervals.items_to_settle(intervals.Estimate(value, None, None, n, ""), threshold) is None


# --- several rules -----------------------------------------------------------------------------------------------


def test_holm_is_the_closure_of_bonferroni() -> None:
    """Closed testing: a hypothesis falls only if every set of hypotheses that holds it does."""
    for p in rng(10).uniform(0, 0.2, (20, 4)).tolist():
        sets = [s for k in range(1, 5) for s in itertools.combinations(range(4), k)]
        closure = [max(min(1.0, len(s) * min(p[j] for j in s)) for s in sets if i in s) for i in range(4)]
        assert intervals.holm(p) == pytest.approx(closure)
    assert intervals.holm([]) == [] and intervals.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_one_sided_p_of_a_t_interval_is_the_t_tests() -> None:
    x = rng(11).normal(1, 1, 8)
    found = intervals.mean_t(x, confidence=0.95)
    for bound in (-1.0, 0.4, 2.5):
        p = intervals.one_sided_p(found.value - bound, found.high - found.value, df=7, confidence=0.95)  # type: ignore[operator]
        assert p == pytest.approx(scipy_stats.ttest_1samp(x, bound, alternative="greater").pvalue)
    exact = [intervals.one_sided_p(distance, 0.0, df=1, confidence=0.95) for distance in (0.1, 0.0, -0.1)]
    assert exact == [0, 1, 1], "what is exact is past its bound or is not"


# --- coverage, small; tests/bench/simulations.py has it at full size ----------------------------------------------


def coverage(find: Any, truth: float, runs: int) -> float:
    found = [find() for _ in range(runs)]
    return float(np.mean([e.low <= truth <= e.high for e in found]))


@pytest.mark.parametrize("documents", [11, 27])
def test_divergence_interval_covers_what_it_says_at_few_documents(documents: int) -> None:
    """Three Monte Carlo errors at 600 runs are 2.7 points; BCa, at 89 % with 11 documents, stands below them."""
    draw = rng(12)
    sizes = np.array([380] * 11 + [48] * (documents - 11))
    doc = np.repeat(np.arange(documents), sizes)

    def find() -> intervals.Estimate:
        mean = 0.02 * np.exp(draw.normal(-0.04, 0.283, documents))  # document means as in our rows: log-sd 0.2 to 0.4
        kld = mean[doc] * np.exp(draw.normal(-0.98, 1.4, len(doc)))  # tokens within one: log-sd 1.3 to 1.5
        return intervals.cluster_bootstrap(kld, np.ones(len(doc)), doc, confidence=0.95, resamples=400, rng=draw)

    assert 0.93 <= coverage(find, 0.02, 600) <= 0.98


def test_paired_interval_covers_items_of_families() -> None:
    """Newcombe's alone, which takes items for independent, covers 88 %."""
    draw, cells, family = rng(13), [0.62, 0.06, 0.02, 0.30], np.arange(240) % 80

    def find() -> intervals.Estimate:
        kind = np.where(draw.random(240) < 0.5, draw.choice(4, 80, p=cells)[family], draw.choice(4, 240, p=cells))
        change = (kind == 2).astype(float) - (kind == 1)
        plain = intervals.paired_difference(*np.bincount(kind, minlength=4).tolist(), confidence=0.95)
        whole = intervals.cluster_bootstrap(change, np.ones(240), family, confidence=0.95, resamples=400, rng=draw)
        return intervals.outer(plain, whole)

    assert 0.92 <= coverage(find, -0.04, 300) <= 0.98


def test_a_variant_exactly_at_its_margin_passes_at_most_5_times_in_100() -> None:
    """Through the real rules; a two-sided 95 % interval lets 2.5 % by."""
    draw = rng(15)
    acc, speed = bound_of(Rule(metric="acc_delta/all", margin="2 pp")), bound_of(Rule(metric="speed_ratio", margin="10 %"))
    passed = {"acc": 0, "speed": 0}
    for _ in range(1000):
        table = draw.multinomial(696, [0.66, 0.035, 0.015, 0.29])
        delta = intervals.paired_difference(*map(int, table), confidence=0.95)
        passed["acc"] += judge(acc, as_metric("acc_delta/all", delta, 0.95, 100.0)).verdict == "PASS"
        ratio = intervals.geometric_mean_t(0.9 * np.exp(draw.normal(0, 0.06, 5)), confidence=0.95)
        passed["speed"] += judge(speed, as_metric("speed_ratio", ratio, 0.95)).verdict == "PASS"
    assert all(0.005 <= n / 1000 <= 0.05 for n in passed.values()), passed


def test_clusters_that_weigh_as_few_give_an_interval_as_wide_as_few_do() -> None:
    """Two long documents and nine of one token are two documents, whatever their number."""
    labels = np.repeat(np.arange(11), [5000, 5000, *[1] * 9])
    values = np.where(labels == 0, 0.015, np.where(labels == 1, 0.017, 0.016))
    found = intervals.cluster_bootstrap(values, np.ones(len(values)), labels, rng=rng(), **SURE)
    assert found.weight == pytest.approx(2, abs=0.01) and found.clusters == 11
    assert found.low is not None and found.high is not None and found.high - found.low > 0.01
