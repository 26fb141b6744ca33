"""Intervals and tests. Pure: NumPy and SciPy only; randomness comes in as a generator."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats


@dataclass(frozen=True)
class Estimate:
    """A value with its interval. `low` and `high` are None where there is none, and `warnings` says why."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    method: str
    warnings: tuple[str, ...] = ()
    clusters: int | None = None  # independent units behind n, where they are fewer than n


TRANSFORMS: dict[str, Callable[..., Any]] = {"mean": np.asarray, "exp": np.exp, "sqrt": np.sqrt}
FEW = 30  # below this many clusters a bootstrap interval is too narrow more often than it says


def cluster_bootstrap(
    numerator: ArrayLike, denominator: ArrayLike, clusters: ArrayLike, *, confidence: float, resamples: int,
    rng: np.random.Generator, transform: str = "mean",
) -> Estimate:  # fmt: skip
    """BCa interval of sum(numerator) / sum(denominator), whole clusters drawn with replacement.

    numerator, denominator: [n] per item (a denominator of ones gives the mean); clusters: [n] labels; items of one
    cluster (tokens of a document) are not independent and are drawn together. transform: a key of
    TRANSFORMS, applied to the ratio. Source: Efron 1987 (BCa), as scipy.stats.bootstrap computes it.
    """
    num, den = np.asarray(numerator, float), np.asarray(denominator, float)
    _, index = np.unique(np.asarray(clusters), return_inverse=True)
    nums: NDArray[np.float64] = np.bincount(index, num).astype(float)
    dens: NDArray[np.float64] = np.bincount(index, den).astype(float)
    shape: Callable[..., Any] = TRANSFORMS[transform]

    def statistic(a: NDArray[np.float64], b: NDArray[np.float64], axis: int = -1) -> Any:
        return shape(a.sum(axis) / b.sum(axis))

    value = float(statistic(nums, dens))
    method = f"BCa cluster bootstrap, {len(nums)} clusters, {resamples} resamples"
    if len(nums) < 2:
        return Estimate(value, None, None, len(num), method, ("one cluster: no interval can be made",), len(nums))
    notes = () if len(nums) >= FEW else (f"{len(nums)} clusters are few for an interval",)
    if (nums * dens.sum() == dens * nums.sum()).all():  # every cluster says the same: resampling cannot vary
        if notes and value != {"mean": 0.0, "exp": 1.0, "sqrt": 0.0}[transform]:
            return Estimate(value, None, None, len(num), method, (*notes, "all of them agree"), len(nums))
        return Estimate(value, value, value, len(num), method, notes, len(nums))
    with warnings.catch_warnings(), np.errstate(all="ignore"):  # a degenerate interval is found, and said, below
        warnings.simplefilter("ignore")
        result = stats.bootstrap(
        (nums, dens), statistic, paired=True, vectorized=True, method="BCa", n_resamples=resamples,
        confidence_level=confidence, rng=rng,
    ).confidence_interval  # fmt: skip
    if not (np.isfinite(result.low) and np.isfinite(result.high)):
        return Estimate(value, None, None, len(num), method, (*notes, "the bootstrap distribution is degenerate"), len(nums))
    return Estimate(value, float(result.low), float(result.high), len(num), method, notes, len(nums))


def quantile_bootstrap(
    values: ArrayLike, clusters: ArrayLike, q: float, *, confidence: float, resamples: int, rng: np.random.Generator
) -> Estimate:
    """Percentile interval of a quantile, whole clusters drawn with replacement.

    values: [n]; the estimate is the inverse of the empirical distribution function (no interpolation). A quantile with
    fewer than ten values beyond it carries a warning.
    """
    x = np.asarray(values, float)
    _, index = np.unique(np.asarray(clusters), return_inverse=True)
    count = int(index.max()) + 1
    order = np.argsort(x, kind="stable")
    x, index = x[order], index[order]

    def at(weights: NDArray[np.float64]) -> float:
        cumulative = np.cumsum(weights)
        return float(x[min(int(np.searchsorted(cumulative, q * cumulative[-1])), len(x) - 1)])

    value = at(np.ones(len(x)))
    method = f"percentile cluster bootstrap, {count} clusters, {resamples} resamples"
    notes = () if (1 - q) * len(x) >= 10 else (f"{len(x)} values are few for the {q:g} quantile",)
    if count < 2:
        return Estimate(value, None, None, len(x), method, (*notes, "one cluster: no interval can be made"), count)
    draws = rng.multinomial(count, np.full(count, 1 / count), size=resamples)
    found = [at(draw[index].astype(float)) for draw in draws]
    low, high = np.quantile(found, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(value, float(low), float(high), len(x), method, notes, count)


def wilson(successes: int, n: int, *, confidence: float) -> Estimate:
    """Wilson score interval of a proportion (Wilson 1927)."""
    if n == 0:
        return Estimate(None, None, None, 0, "Wilson score", ("no items",))
    low, high = stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    return Estimate(successes / n, float(low), float(high), n, "Wilson score")


def paired_difference(both: int, lost: int, won: int, neither: int, *, confidence: float) -> Estimate:
    """Difference of two proportions on the same items, (won - lost) / n, with Newcombe's paired interval.

    both, lost, won, neither: items right in both, only in the reference, only in the variant, in none.
    Source: Newcombe 1998, Statistics in Medicine 17:2635, method 10 (square-and-add Wilson, continuity-corrected phi).
    """
    n = both + lost + won + neither
    method = "Newcombe paired interval (method 10)"
    if n == 0:
        return Estimate(None, None, None, 0, method, ("no items",))
    p_var, p_ref = (both + won) / n, (both + lost) / n
    delta = p_var - p_ref
    var, ref = wilson(both + won, n, confidence=confidence), wilson(both + lost, n, confidence=confidence)
    assert var.low is not None and var.high is not None and ref.low is not None and ref.high is not None
    phi = _phi(both, lost, won, neither)
    dl_var, du_var, dl_ref, du_ref = p_var - var.low, var.high - p_var, p_ref - ref.low, ref.high - p_ref
    low = delta - np.sqrt(max(dl_var**2 - 2 * phi * dl_var * du_ref + du_ref**2, 0.0))
    high = delta + np.sqrt(max(du_var**2 - 2 * phi * du_var * dl_ref + dl_ref**2, 0.0))
    return Estimate(delta, float(low), float(high), n, method)


def _phi(a: int, b: int, c: int, d: int) -> float:
    """Phi coefficient of a 2x2 table, pulled towards 0 by n/2 where positive, as method 10 asks."""
    product = (a + b) * (c + d) * (a + c) * (b + d)
    if product == 0:
        return 0.0
    cross = a * d - b * c
    if cross > 0:
        cross = max(cross - (a + b + c + d) / 2, 0)  # type: ignore[assignment]
    return float(cross / np.sqrt(product))


def resolvable(low: float, high: float, *, confidence: float, power: float) -> float:
    """The smallest true difference that a comparison with an interval this wide finds with probability `power`.

    Normal approximation: the half-width is z(confidence) standard errors, and z(confidence) + z(power) of them are needed.
    """
    z, z_power = stats.norm.ppf((1 + confidence) / 2), stats.norm.ppf(power)
    return float((high - low) / 2 * (z + z_power) / z)


def wider(one: Estimate, other: Estimate) -> Estimate:
    """Of two intervals for the same value the wider; one without bounds never wins."""
    if other.low is None or other.high is None:
        return one
    if one.low is None or one.high is None or other.high - other.low > one.high - one.low:
        return other
    return one


def mcnemar(lost: int, won: int) -> float | None:
    """Exact two-sided McNemar p-value of the discordant pairs; None if there are none."""
    if lost + won == 0:
        return None
    return float(stats.binomtest(lost, lost + won, 0.5).pvalue)


def geometric_mean_t(ratios: ArrayLike, *, confidence: float) -> Estimate:
    """Geometric mean of per-round ratios with a t interval on the log scale; rounds are the independent units."""
    logs = np.log(np.asarray(ratios, float))
    n = len(logs)
    method = f"t interval on log ratios, {n} rounds"
    if n == 0:
        return Estimate(None, None, None, 0, method, ("no rounds",))
    value = float(np.exp(logs.mean()))
    if n < 2:
        return Estimate(value, None, None, n, method, ("one round: no interval can be made",))
    half = stats.t.ppf((1 + confidence) / 2, n - 1) * logs.std(ddof=1) / np.sqrt(n)
    return Estimate(value, float(np.exp(logs.mean() - half)), float(np.exp(logs.mean() + half)), n, method)


def mean_t(values: ArrayLike, *, confidence: float) -> Estimate:
    """Mean with a t interval; values are independent rounds."""
    x = np.asarray(values, float)
    n = len(x)
    method = f"t interval, {n} rounds"
    if n == 0:
        return Estimate(None, None, None, 0, method, ("no values",))
    if n < 2:
        return Estimate(float(x[0]), None, None, n, method, ("one value: no interval can be made",))
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1) * x.std(ddof=1) / np.sqrt(n))
    return Estimate(float(x.mean()), float(x.mean()) - half, float(x.mean()) + half, n, method)


def items_to_settle(estimate: Estimate, threshold: float) -> int | None:
    """How many items would give an interval that no longer contains the threshold, all else equal.

    The half-width shrinks with the square root of n. None where value and threshold coincide or there is no interval.
    """
    if estimate.value is None or estimate.low is None or estimate.high is None or estimate.value == threshold:
        return None
    half = (estimate.value - estimate.low) if threshold < estimate.value else (estimate.high - estimate.value)
    return int(np.ceil(estimate.n * (half / abs(estimate.value - threshold)) ** 2))
