"""Where a variant's divergence is: over all tokens alike, on a few of them, or on one kind of text.

The two ends have different causes. A method or a range with too few levels moves nearly every token a little: *uniform
shift*. Extremes that were clipped leave most tokens alone and ruin some: *isolated tokens*. `neither` is an answer too.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeline.core.records import Group, Spread
from pipeline.metrics.builder import whole
from pipeline.stats.intervals import Estimate, cluster_bootstrap

WORST = 0.01  # the tail that is looked at: as far out as a thousand tokens can show
FEW_TOKENS = 1000  # fewer have a worst 1 % of under ten tokens: chance decides what it carries
# More than half of all divergence on a hundredth of the tokens: without them the variant would be twice as close.
ISOLATED = 0.5
# A lognormal spread, the usual shape, meets both up to sigma 1.48. The nine variants first measured here, from 8 to 4 bits
# by seven methods, had 7 to 13 % on their worst 1 % and a median of 0.59 to 0.77 of the mean.
UNIFORM_SHARE = 0.2
UNIFORM_MEDIAN = 1 / 3
TWICE = 2.0  # a group stands out if its mean is over twice the rest's, and ...
FEW_IN_GROUP = 50  # ... it has so many tokens, and the two intervals do not touch

KINDS = {
    "uniform": "uniform shift (a matter of bits, range or method, not of a few outliers)",
    "isolated": "isolated tokens (as clipped extremes do: keep the layers they pass through, or widen the range)",
    "neither": "neither uniform nor isolated (between a uniform shift and isolated tokens)",
}


def judge(
    kld: ArrayLike, documents: ArrayLike, groups: dict[str, ArrayLike], *, confidence: float, resamples: int,
    rng: np.random.Generator,
) -> Spread:  # fmt: skip
    """How divergence is spread, with the numbers behind it. kld: [n], nats; documents: [n], whole ones are resampled; groups:
    {what they are grouped by: [n] labels}. kind: uniform, isolated, neither, none (no divergence at all), too few, or not finite.
    settled: the interval of the worst tokens' share lies on one side of the bound that decided."""
    x, docs = np.asarray(kld, float), np.asarray(documents)
    n = len(x)
    shape: Spread = {
        "kind": "too few", "settled": False, "n": n, "worst_share": None, "median_over_mean": None, "groups": [],
        "words": f"{n} tokens are too few to say how divergence is spread ({FEW_TOKENS} are needed)",
    }  # fmt: skip
    infinite = int((~np.isfinite(x)).sum())
    if infinite:
        return {**shape, "kind": "not finite", "words": f"{infinite} of {n} tokens have no finite divergence: see those first"}
    if n and not x.any():
        return {**shape, "kind": "none", "settled": True, "words": f"no divergence in any of {n} tokens"}
    if n < FEW_TOKENS:
        return shape
    ratio = partial(cluster_bootstrap, confidence=confidence, resamples=resamples, rng=rng)
    worst = np.zeros(n)  # which tokens are the worst stays as it is while documents are resampled
    worst[np.argsort(-x, kind="stable")[: int(np.ceil(WORST * n))]] = 1
    share = ratio(x * worst, x, docs, bounds=(0, 1))
    median = float(np.median(x) / x.mean())
    kind, settled = _kind(share, median)

    def mean(chosen: NDArray[np.bool_]) -> Estimate:
        return ratio(x[chosen], np.ones(chosen.sum()), docs[chosen], bounds=(0, np.inf))

    rows = []
    for by, values in groups.items():
        labels = np.asarray(values)
        for name in sorted(set(labels.tolist())):
            chosen = labels == name
            if min(chosen.sum(), (~chosen).sum()) >= FEW_IN_GROUP:
                rows.append(_group(by, str(name), mean(chosen), mean(~chosen)))
    return {
        "kind": kind, "settled": settled, "n": n, "worst_share": whole(share), "median_over_mean": median,
        "groups": rows, "words": f"{_share_words(kind, settled, share, median)}. {_group_words(rows)}",
    }  # fmt: skip


def _kind(share: Estimate, median: float) -> tuple[str, bool]:
    value = share.value or 0.0
    kind = "isolated" if value > ISOLATED else "uniform" if value < UNIFORM_SHARE and median >= UNIFORM_MEDIAN else "neither"
    if share.low is None or share.high is None:
        return kind, False
    low, high = {"isolated": (ISOLATED, 1.0), "uniform": (0.0, UNIFORM_SHARE), "neither": (0.0, ISOLATED)}[kind]
    if kind == "neither" and median >= UNIFORM_MEDIAN:  # then the share alone kept it from being uniform
        low = UNIFORM_SHARE
    return kind, low <= share.low and share.high <= high


def _group(by: str, name: str, mean: Estimate, rest: Estimate) -> Group:
    ratio = mean.value / rest.value if mean.value is not None and rest.value else None
    apart = mean.low is not None and rest.high is not None and mean.low > rest.high
    return {
        "by": by, "group": name, "mean": whole(mean), "rest": whole(rest), "ratio": ratio,
        "stands_out": apart and (mean.value or 0.0) > TWICE * (rest.value or 0.0),
    }  # fmt: skip


def _share_words(kind: str, settled: bool, share: Estimate, median: float) -> str:
    limits = "" if share.low is None or share.high is None else f" [{100 * share.low:.0f}, {100 * share.high:.0f}]"
    text = (
        f"{KINDS[kind]}: the worst 1 % of {share.n} tokens carry {100 * (share.value or 0):.0f} %{limits} of all "
        f"divergence, and the median token has {median:.2f} of the mean"
    )
    if settled:
        return text
    return f"{text}; {'the interval reaches past the bound, so this is not settled' if limits else 'no interval: not settled'}"


def _group_words(rows: list[Group]) -> str:
    alone = sum(r["mean"]["low"] is None for r in rows)
    groups = "1 group" if alone == 1 else f"{alone} groups"
    note = f" (nothing is claimed of {groups} without an interval: too few documents)" if alone else ""
    outstanding = sorted((r for r in rows if r["stands_out"]), key=lambda r: -(r["ratio"] or 0.0))
    if not outstanding:
        return f"No {' or '.join(dict.fromkeys(r['by'] for r in rows)) or 'group'} stands out{note}"
    named = (
        f"{r['by']} {r['group']} ({r['mean']['value']:.3g} nats, {r['ratio']:.1f} times the rest, n = {r['mean']['n']})"
        for r in outstanding
    )
    return f"It concentrates on {'; '.join(named)}{note}"
