"""Intervals and tests. Pure: NumPy and SciPy only; randomness comes in as a generator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats


@dataclass(frozen=True)
class Estimate:
    """A value with its interval; where `low` and `high` are None, `warnings` says why."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    method: str
    warnings: tuple[str, ...] = ()
    clusters: int | None = None  # independent units behind n, where they are fewer than n
    weight: float | None = None  # number of equal clusters that would carry as much information
    between: float | None = None  # standard deviation of the logarithm that a larger n does not reduce


TRANSFORMS: dict[str, Callable[..., Any]] = {"mean": np.asarray, "exp": np.exp, "sqrt": np.sqrt}
FEW = 10  # fewer clusters than this (as equal ones) carry a warning, and the gate does not judge by them
AGREEING = 30  # if this many clusters all agree, the value counts as certain
POWER = 0.8  # probability with which a comparison should find a true difference


def cluster_bootstrap(
    numerator: ArrayLike, denominator: ArrayLike, clusters: ArrayLike, *, confidence: float, resamples: int,
    rng: np.random.Generator, transform: str = "mean", bounds: tuple[float, float] = (-np.inf, np.inf),
) -> Estimate:  # fmt: skip
    """Interval of sum(numerator) / sum(denominator), whole clusters drawn with replacement.

    numerator, denominator: [n] per item (denominator 1 gives the mean); clusters: [n] labels. Items of one cluster (tokens of a
    document) are not independent. transform: a key of TRANSFORMS, applied to ratio and limits. bounds: values that
    the ratio cannot pass; a share, (0, 1), in which all clusters agree has Wilson's interval over clusters.

    Each limit is the outer one of two: bootstrap-t (Efron and Tibshirani 1993, 12.5; quantiles of (ratio* - ratio) / error*), and
    Student's t with the clusters' weight - 1 degrees of freedom. Both use the linearized standard error of a ratio (Cochran 1977,
    6.4). Together they cover 94 to 97 %; bootstrap-t alone is too short for counts of a few changed items, t alone for skewed
    values, and BCa covered 86 to 91 % at 11 to 30 heavy-tailed documents (tests/bench/simulations.py).
    """
    num = np.asarray(numerator, float)
    den = np.broadcast_to(np.asarray(denominator, float), num.shape)
    nums, dens = _by_cluster(clusters, num, den)
    count, ratio = len(nums), nums.sum() / dens.sum()
    shape: Callable[..., Any] = TRANSFORMS[transform]
    value = float(shape(ratio))
    method = f"outer limits of cluster bootstrap-t and t, {count} clusters, {resamples} resamples"
    if count < 2:
        return Estimate(value, None, None, len(num), method, ("one cluster: no interval can be made",), count)
    weight = _weight(dens)
    equal = f", which weigh as {weight:.0f}," if weight < count - 0.5 else ""
    notes = () if weight >= FEW - 0.5 else (f"{count} clusters{equal} are few",)
    bare = Estimate(value, None, None, len(num), method, notes, count, weight)
    if (nums * dens.sum() == dens * nums.sum()).all():  # all clusters agree: resampling cannot vary
        if bounds == (0, 1) and ratio in bounds:
            share = wilson(int(ratio) * count, count, confidence=confidence)
            return replace(bare, low=share.low, high=share.high, method=f"Wilson score, {count} clusters")
        if count < AGREEING and value != {"mean": 0.0, "exp": 1.0, "sqrt": 0.0}[transform]:
            return replace(bare, warnings=(*notes, f"{count} clusters, and all of them agree"))
        return replace(bare, low=value, high=value)
    error = _ratio_error(nums, dens, ratio)
    t = stats.t.ppf((1 + confidence) / 2, max(weight - 1, 1))
    below, above = _studentized(nums, dens, confidence, resamples, rng)
    if not (np.isfinite(below) and np.isfinite(above)):  # too few clusters differ: many resamples have no variance
        below, above, method = -t, t, f"t over clusters, {count} clusters (too few of them differ to resample)"
    low, high = max(ratio - max(above, t) * error, bounds[0]), min(ratio + max(-below, t) * error, bounds[1])
    with np.errstate(over="ignore"):
        limits = float(shape(low)), float(shape(high))
    if not np.isfinite(limits).all():  # half an interval must not be judged as a whole one
        return replace(bare, method=method, warnings=(*notes, "a limit is past all numbers: no interval"))
    return replace(bare, low=limits[0], high=limits[1], method=method)


def _by_cluster(clusters: ArrayLike, *values: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Sums by cluster, [number of clusters] each."""
    _, index = np.unique(np.asarray(clusters), return_inverse=True)
    return [np.bincount(index, v).astype(float) for v in values]


def _weight(dens: NDArray[np.float64]) -> float:
    """Effective number of clusters (Kish 1965, (sum w)^2 / sum w^2)."""
    return float(dens.sum() ** 2 / (dens**2).sum())


def _ratio_error(nums: NDArray[np.float64], dens: NDArray[np.float64], ratio: float) -> float:
    """Standard error of sum(nums) / sum(dens), linearized: residuals nums - ratio * dens of whole clusters."""
    count = len(nums)
    return float(np.sqrt(count / (count - 1) * ((nums - ratio * dens) ** 2).sum()) / dens.sum())


def _studentized(
    nums: NDArray[np.float64], dens: NDArray[np.float64], confidence: float, resamples: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Both tail quantiles of (ratio* - ratio) / error*; infinite if resamples without variance reach into them."""
    count, ratio = len(nums), nums.sum() / dens.sum()
    drawn = rng.multinomial(count, np.full(count, 1 / count), size=resamples).astype(float)
    with np.errstate(all="ignore"):
        sums = drawn @ dens
        ratios = drawn @ nums / sums
        squares = drawn @ nums**2 - 2 * ratios * (drawn @ (nums * dens)) + ratios**2 * (drawn @ dens**2)
        errors = np.sqrt(np.maximum(count / (count - 1) * squares, 0)) / sums
        pivots = np.where(errors > 1e-9 * _ratio_error(nums, dens, ratio), (ratios - ratio) / errors, np.inf)
    pivots = np.where(np.isfinite(pivots), pivots, np.copysign(np.inf, np.nan_to_num(ratios - ratio)))
    low = np.quantile(pivots, (1 - confidence) / 2, method="lower")  # no interpolation towards an infinite neighbour
    return float(low), float(np.quantile(pivots, (1 + confidence) / 2, method="higher"))


def quantile_interval(values: ArrayLike, clusters: ArrayLike, q: float, *, confidence: float) -> Estimate:
    """Interval of a quantile, by inverting that of the share of values below it (Woodruff 1952); whole clusters vary.

    values: [n]; the estimate is the inverse of the empirical distribution function (no interpolation). The share's limits
    are the outer ones of t on the plain and on the logit scale, with the clusters' weight - 1 degrees of freedom. Limits past
    the smallest or largest value give no interval (resampled percentiles covered 70 to 80 % at the 95th and 99th percentile).
    """
    x = np.asarray(values, float)
    n = len(x)
    ordered = np.sort(x)

    def at(share: float) -> float:
        return float(ordered[min(max(int(np.ceil(share * n - 1e-9)) - 1, 0), n - 1)])

    value = at(q)
    counts, below = _by_cluster(clusters, np.ones(n), (x <= value).astype(float))
    count = len(counts)
    method = f"Woodruff interval, t over {count} clusters"
    notes = () if (1 - q) * n >= 10 else (f"{n} values are few for the {q:g} quantile",)
    bare = Estimate(value, None, None, n, method, notes, count)
    if count < 2:
        return replace(bare, warnings=(*notes, "one cluster: no interval can be made"))
    half = stats.t.ppf((1 + confidence) / 2, max(_weight(counts) - 1, 1)) * _ratio_error(below, counts, below.sum() / n)
    odds = np.log(q / (1 - q)) + np.array([-1, 1]) * half / (q * (1 - q))
    shares = min(q - half, 1 / (1 + np.exp(-odds[0]))), max(q + half, 1 / (1 + np.exp(-odds[1])))
    if shares[0] <= 0 or shares[1] > 1 - 1 / n:
        return replace(bare, warnings=(*notes, f"its interval reaches past the {n} values"))
    return replace(bare, low=at(shares[0]), high=at(shares[1]))


def wilson(successes: float, n: int, *, confidence: float) -> Estimate:
    """Wilson score interval of a proportion (Wilson 1927)."""
    if n == 0:
        return Estimate(None, None, None, 0, "Wilson score", ("no items",))
    share, z = successes / n, stats.norm.ppf((1 + confidence) / 2)
    centre, half = share + z * z / (2 * n), z * np.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    low = 0.0 if successes == 0 else float((centre - half) / (1 + z * z / n))  # without the last digit's rounding
    high = 1.0 if successes == n else float((centre + half) / (1 + z * z / n))
    return Estimate(share, low, high, n, "Wilson score")


def paired_difference(both: float, lost: float, won: float, neither: float, *, confidence: float) -> Estimate:
    """Difference of two proportions on the same items, (won - lost) / n, with Newcombe's paired interval.

    both, lost, won, neither: items right in both, only in the reference, only in the variant, in none; an item that is right in
    one of two arithmetics counts half in two of them.
    Source: Newcombe 1998, Statistics in Medicine 17:2635, method 10 (square-and-add Wilson, continuity-corrected phi).
    """
    n = round(both + lost + won + neither)
    p_var, p_ref = (both + won) / n, (both + lost) / n
    delta = p_var - p_ref
    var, ref = wilson(both + won, n, confidence=confidence), wilson(both + lost, n, confidence=confidence)
    assert var.low is not None and var.high is not None and ref.low is not None and ref.high is not None
    phi = _phi(both, lost, won, neither)
    dl_var, du_var, dl_ref, du_ref = p_var - var.low, var.high - p_var, p_ref - ref.low, ref.high - p_ref
    low = delta - np.sqrt(max(dl_var**2 - 2 * phi * dl_var * du_ref + du_ref**2, 0.0))
    high = delta + np.sqrt(max(du_var**2 - 2 * phi * du_var * dl_ref + dl_ref**2, 0.0))
    return Estimate(delta, float(low), float(high), n, "Newcombe paired interval (method 10)")


def _phi(a: float, b: float, c: float, d: float) -> float:
    """Phi coefficient of a 2x2 table with method 10's continuity correction, n/2 towards 0 if positive."""
    product = (a + b) * (c + d) * (a + c) * (b + d)
    if product == 0:
        return 0.0
    cross = a * d - b * c
    if cross > 0:
        cross = max(cross - (a + b + c + d) / 2, 0)
    return float(cross / np.sqrt(float(product)))  # a product of whole numbers outgrows 64 bits at 100 000 items


def standard_errors(*, confidence: float) -> float:
    """How many standard errors a true difference must be for a two-sided interval to find it with probability POWER."""
    return float(stats.norm.ppf((1 + confidence) / 2) + stats.norm.ppf(POWER))


def resolvable(low: float, high: float, *, confidence: float) -> float:
    """Smallest true difference that a comparison with an interval this wide finds with probability POWER (normal approximation).
    It is also the smallest margin that a variant without any loss passes with that probability."""
    error = (high - low) / 2 / stats.norm.ppf((1 + confidence) / 2)
    return float(error * standard_errors(confidence=confidence))


def outer(one: Estimate, other: Estimate) -> Estimate:
    """The outer limit on each side of two intervals for the same value; one without limits adds nothing. Conservative."""
    if other.low is None or other.high is None:
        return one
    if one.low is None or one.high is None:
        return other
    method = f"outer limits of: {one.method}; {other.method}"
    return replace(other, low=min(one.low, other.low), high=max(one.high, other.high), method=method)


def arithmetic_error(twice: ArrayLike, size: float) -> float:
    """Half the difference of two equivalent arithmetics, as standard error of sum(mean of both) / size. twice: [2, n], the items'
    values in both. Independent changes are already in their spread; a shift of all at once, as by another processor, is not."""
    first, second = np.asarray(twice, float)
    return float(abs(first.sum() - second.sum()) / 2 / size)


def widened(estimate: Estimate, error: float, *, confidence: float, bounds: tuple[float, float]) -> Estimate:
    """An interval with an independent standard error added in quadrature on both sides, inside `bounds`."""
    if not error or estimate.value is None or estimate.low is None or estimate.high is None:
        return estimate
    more = stats.norm.ppf((1 + confidence) / 2) * error
    low = estimate.value - np.hypot(estimate.value - estimate.low, more)
    high = estimate.value + np.hypot(estimate.high - estimate.value, more)
    method = f"{estimate.method}; with the arithmetic's own error"
    return replace(estimate, low=float(max(low, bounds[0])), high=float(min(high, bounds[1])), method=method)


def mcnemar(lost: int, won: int) -> float | None:
    """Exact two-sided McNemar p-value of the discordant pairs; None if there are none."""
    if lost + won == 0:
        return None
    return float(stats.binomtest(lost, lost + won, 0.5).pvalue)


def paired_p(change: ArrayLike, error: float) -> float:
    """Two-sided p-value of "no change on average": McNemar's normal approximation with an extra error of the sum.
    change: [n] per item, -1 .. 1; error: standard error of their sum beyond that of the items."""
    x = np.asarray(change, float)
    spread = np.hypot(np.sqrt((x**2).sum()), error)
    return float(2 * stats.norm.sf(abs(x.sum()) / spread)) if spread else 1.0


def geometric_mean_t(ratios: ArrayLike, *, confidence: float) -> Estimate:
    """Geometric mean of independent per-round ratios with a t interval on the log scale."""
    logs = mean_t(np.log(np.asarray(ratios, float)), confidence=confidence, method="t interval on log ratios", unit="round")
    value, low, high = (None if x is None else float(np.exp(x)) for x in (logs.value, logs.low, logs.high))
    return replace(logs, value=value, low=low, high=high)


def mean_t(values: ArrayLike, *, confidence: float, method: str = "t interval", unit: str = "value") -> Estimate:
    """Mean of independent values (one a round, or one a document) with a t interval."""
    x = np.asarray(values, float)
    n = len(x)
    method = f"{method}, {n} {unit}s"
    if n == 0:
        return Estimate(None, None, None, 0, method, (f"no {unit}s",))
    mean = float(x.mean())
    if n < 2:
        return Estimate(mean, None, None, n, method, (f"one {unit}: no interval can be made",))
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1) * x.std(ddof=1) / np.sqrt(n))
    return Estimate(mean, mean - half, mean + half, n, method)


def items_to_settle(estimate: Estimate, threshold: float, *, confidence: float = 0.95, family: float = 1) -> int | None:
    """Number of items with which a share POWER of runs would settle on which side of the threshold the value lies, if the measured
    value is the true one and all of the error but `between` shrinks with the square root of n. family: factor by which Holm's
    correction tightens the level. None if no number would, or without an interval."""
    if estimate.value is None or estimate.low is None or estimate.high is None or estimate.value == threshold:
        return None
    half = (estimate.value - estimate.low) if threshold < estimate.value else (estimate.high - estimate.value)
    error = half / stats.norm.ppf((1 + confidence) / 2)
    needed = standard_errors(confidence=1 - (1 - confidence) / family)
    stays = ((estimate.between or 0.0) * estimate.value) ** 2
    allowed = ((estimate.value - threshold) / needed) ** 2 - stays
    return int(np.ceil(estimate.n * max(error**2 - stays, 0.0) / allowed)) if allowed > 0 else None


def one_sided_p(distance: float, half: float, *, df: float, confidence: float) -> float:
    """p-value of "the true value is not past the bound", read off an interval.

    distance: how far the value is past the bound (negative: on its good side); half: from the value to its limit on the
    bound's side. Approximation: the error is t-distributed with df degrees of freedom, scaled so that p is exactly
    (1 - confidence) / 2 where the limit touches the bound. An exact value (half 0) gives 0 or 1.
    """
    if half == 0:
        return 0.0 if distance > 0 else 1.0
    return float(stats.t.sf(stats.t.ppf((1 + confidence) / 2, df) * distance / half, df))


def holm(p_values: list[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given (Holm 1979, Scandinavian Journal of Statistics 6:65). Rejecting those
    at or below a level makes even one false rejection with at most that probability, however the tests depend on each other."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, k in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[k]))
        adjusted[k] = largest
    return adjusted
