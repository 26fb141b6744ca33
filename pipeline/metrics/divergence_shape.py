"""Where a variant's divergence is: over all tokens alike, on a few of them, or on one kind of text.

The two ends have different causes. A method or a range with too few levels moves nearly every token a little: *uniform
shift*. Extremes that were clipped leave most tokens alone and ruin some: *isolated tokens*. `neither` is an answer too.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

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

ADVICE = {
    "uniform": "a matter of bits, range or method, not of a few outliers",
    "isolated": "as clipped extremes do: keep the layers they pass through, or widen the range",
    "neither": "between a uniform shift and isolated tokens",
}


def judge(
    kld: ArrayLike, documents: ArrayLike, groups: dict[str, ArrayLike], *, confidence: float, resamples: int,
    rng: np.random.Generator,
) -> dict[str, Any]:  # fmt: skip
    """How divergence is spread, with the figures behind it. kld: [n], nats; documents: [n], whole ones are resampled; groups:
    {what they are grouped by: [n] labels}. kind: uniform, isolated, neither, none (no divergence at all), too few, or not finite.
    settled: the interval of the worst tokens' share lies on one side of the bound that decided."""
    x, docs = np.asarray(kld, float), np.asarray(documents)
    n = len(x)
    shape = {"kind": "too few", "settled": False, "n": n, "worst_share": None, "median_over_mean": None, "groups": list[Any]()}
    bad = int((~np.isfinite(x)).sum())
    if bad:
        return shape | {"kind": "not finite", "words": f"{bad} of {n} tokens have no finite divergence: see those first"}
    if n and not x.any():
        return shape | {"kind": "none", "settled": True, "words": f"no divergence in any of {n} tokens"}
    if n < FEW_TOKENS:
        return shape | {"words": f"{n} tokens are too few to say how divergence is spread ({FEW_TOKENS} are needed)"}
    settings: dict[str, Any] = {"confidence": confidence, "resamples": resamples, "rng": rng}
    worst = np.zeros(n)  # which tokens are the worst stays as it is while documents are resampled
    worst[np.argsort(-x, kind="stable")[: int(np.ceil(WORST * n))]] = 1
    share = cluster_bootstrap(x * worst, x, docs, bounds=(0, 1), **settings)
    median = float(np.median(x) / x.mean())
    kind, settled = _kind(share, median)
    rows = [row for by, labels in groups.items() for row in _groups(x, docs, by, np.asarray(labels), settings)]
    return shape | {
        "kind": kind, "settled": settled, "worst_share": asdict(share), "median_over_mean": median,
        "groups": rows, "words": _words(kind, settled, share, median, rows),
    }  # fmt: skip


def _kind(share: Estimate, median: float) -> tuple[str, bool]:
    value = share.value or 0.0
    kind = "isolated" if value > ISOLATED else "uniform" if value < UNIFORM_SHARE and median >= UNIFORM_MEDIAN else "neither"
    if share.low is None or share.high is None:
        return kind, False
    inside = {"isolated": (ISOLATED, 1.0), "uniform": (0.0, UNIFORM_SHARE), "neither": (0.0, ISOLATED)}[kind]
    if kind == "neither" and median >= UNIFORM_MEDIAN:  # then the share alone kept it from being uniform
        inside = (UNIFORM_SHARE, ISOLATED)
    return kind, inside[0] <= share.low and share.high <= inside[1]


def _groups(
    x: NDArray[np.float64], docs: NDArray[Any], by: str, labels: NDArray[Any], settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """Each group's mean beside the rest's, with whether it stands out; groups of few tokens are left to the rest."""
    rows = []
    for name in sorted(set(labels.tolist())):
        own = labels == name
        if own.sum() < FEW_IN_GROUP or (~own).sum() < FEW_IN_GROUP:
            continue
        ours = cluster_bootstrap(x[own], np.ones(own.sum()), docs[own], bounds=(0, np.inf), **settings)
        rest = cluster_bootstrap(x[~own], np.ones((~own).sum()), docs[~own], bounds=(0, np.inf), **settings)
        known = None not in (ours.value, ours.low, rest.value, rest.high)
        rows.append({
            "by": by, "group": str(name), "mean": asdict(ours), "rest": asdict(rest),
            "ratio": ours.value / rest.value if ours.value is not None and rest.value else None,
            "stands_out": known and ours.value > TWICE * rest.value and ours.low > rest.high,  # type: ignore[operator]
        })  # fmt: skip
    return rows


def _words(kind: str, settled: bool, share: Estimate, median: float, rows: list[dict[str, Any]]) -> str:
    name = {"uniform": "uniform shift", "isolated": "isolated tokens", "neither": "neither uniform nor isolated"}[kind]
    limits = "" if share.low is None or share.high is None else f" [{100 * share.low:.0f}, {100 * share.high:.0f}]"
    text = (
        f"{name} ({ADVICE[kind]}): the worst 1 % of {share.n} tokens carry {100 * (share.value or 0):.0f} %{limits} of all "
        f"divergence, and the median token has {median:.2f} of the mean"
    )
    if not settled:
        open_ = "the interval reaches past the bound, so this is not settled"
        text += "; " + (open_ if share.low is not None else "no interval: not settled")
    return f"{text}. {_group_words(rows)}"


def _group_words(rows: list[dict[str, Any]]) -> str:
    out = sorted((r for r in rows if r["stands_out"]), key=lambda r: -r["ratio"])
    alone = sum(r["mean"]["low"] is None for r in rows)
    groups = "1 group" if alone == 1 else f"{alone} groups"
    note = f" (nothing is claimed of {groups} without an interval: too few documents)" if alone else ""
    if not out:
        return f"No {' or '.join(dict.fromkeys(r['by'] for r in rows)) or 'group'} stands out{note}"
    named = (
        f"{r['by']} {r['group']} ({r['mean']['value']:.3g} nats, {r['ratio']:.1f} times the rest, n = {r['mean']['n']})"
        for r in out
    )
    return f"It concentrates on {'; '.join(named)}{note}"
