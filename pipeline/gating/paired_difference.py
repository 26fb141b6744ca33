"""Differences between a variant's metrics and the baseline's.

They are paired, item by item and token by token, if both commits' rows are available. Else they come from the two intervals, as if
these were independent, which makes them wider. A ratio is compared by its quotient, all else by its difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.core.errors import ArtifactError
from pipeline.core.params import Compare
from pipeline.divergence.distributions import TOP
from pipeline.metrics.answers import answer_metrics, pair
from pipeline.metrics.builder import Builder, as_metric
from pipeline.metrics.definitions import definition, is_served, position_parts
from pipeline.metrics.tokens import TOKEN
from pipeline.stats.intervals import Estimate, cluster_bootstrap

Metric = dict[str, Any]
Row = dict[str, Any]
Columns = dict[str, NDArray[Any]]

ITEM = ("task", "doc_id", "filter", "doc_hash", "prompt_hash", "target_hash")  # the same question, asked in the same words
PER_TOKEN: dict[str, Callable[[Columns], NDArray[Any]]] = {
    "kld_mean": lambda c: c["kld"],
    "kld_reverse_mean": lambda c: c["kld_reverse"],
    "jsd_mean": lambda c: c["jsd"],
    "top1_agreement": lambda c: (c["top1"] == c["top1_ref"]).astype(float),
    "top5_agreement": lambda c: c["top5_overlap"] / TOP,
    "delta_p_mean": lambda c: np.exp(c["logp"]) - np.exp(c["logp_ref"]),
    "moved_10pct": lambda c: (np.abs(np.exp(c["logp"]) - np.exp(c["logp_ref"])) > 0.1).astype(float),
    "ppl_ratio": lambda c: c["logp_ref"] - c["logp"],
}
PER_ITEM = {"acc": "acc_delta"} | {name: name for name in ("acc_delta", "score_delta", "recovery", "byte_ppl_ratio")}
CLOCKED = ("ms", "s", "tok/s")  # units that a machine's speed is in
OF_MACHINES = (  # and what else depends on it
    "speed_ratio", "prefill_ratio", "mbu", "mfu", "reference_drift", "failure_rate", "peak_memory_bytes", "load_memory_bytes",
    "cuda_allocated_bytes", "cuda_reserved_bytes", "nvml_used_bytes",
)  # fmt: skip


def timed(name: str) -> bool:
    """Whether a metric depends on the machine, so that two machines' are never compared."""
    what = definition(name)
    return name.split("/")[0] in OF_MACHINES or is_served(name) or (what is not None and what.unit in CLOCKED)


def tokens_paired(b: Builder, name: str, now: dict[str, Any], then: dict[str, Any]) -> Metric | None:
    """Paired difference of a token metric over tokens that both have; None where they share none, or it has no such rows. now,
    then: columns of artifacts/tokens. Whole documents are resampled, as in the metric itself."""
    stem, _, part = name.partition("/")
    if stem not in PER_TOKEN:
        return None
    ours, theirs = _shared(now, then)
    own = _part(ours, part, stem)
    if not own.any():
        return None
    change = (PER_TOKEN[stem](ours) - PER_TOKEN[stem](theirs))[own]
    if not np.isfinite(change).all():
        return None
    ratio = stem == "ppl_ratio"
    estimate = cluster_bootstrap(
        change, np.ones(len(change)), ours["document"][own], confidence=b.confidence, resamples=b.resamples,
        rng=b.rng(f"baseline/{name}"), transform="exp" if ratio else "mean",
    )  # fmt: skip
    left = len(now["kld"]) - len(ours["kld"])
    return _metric(estimate, name, b.confidence, "paired by token", _left(left, "tokens"))


def _shared(now: dict[str, Any], then: dict[str, Any]) -> tuple[Columns, Columns]:
    """The rows of both that are the same token in the same place, in the same order."""
    keys = [list(zip(*(columns[k] for k in TOKEN))) for columns in (now, then)]
    at = {key: k for k, key in enumerate(keys[1])}
    if len(at) < len(keys[1]) or len(set(keys[0])) < len(keys[0]):
        raise ArtifactError("a token stands twice in the rows; it would count as two")
    both = [(k, at[key]) for k, key in enumerate(keys[0]) if key in at]
    ours, theirs = np.array(both, int).reshape(-1, 2).T
    return {k: np.asarray(v)[ours] for k, v in now.items()}, {k: np.asarray(v)[theirs] for k, v in then.items()}


def _part(c: Columns, part: str, stem: str) -> NDArray[np.bool_]:
    """Which tokens a metric is over: a domain, tokens of context, a class; perplexity over texts only."""
    if part.startswith("position:"):
        return np.asarray(position_parts(c["position"]) == part.removeprefix("position:"))
    if part.startswith("class:"):
        return np.asarray(c["token_class"] == part.removeprefix("class:"))
    if part:
        return np.asarray(c["set"] == part)
    return np.asarray(c["set"] != "trajectory") if stem == "ppl_ratio" else np.ones(len(c["kld"]), bool)


def items_paired(b: Builder, now: list[Row], then: list[Row]) -> dict[str, Metric]:
    """{metric: paired difference} of accuracy and byte perplexity over the items of both, as metrics/answers.py compares with the
    reference."""
    theirs = {tuple(row[k] for k in ITEM): row for row in then}
    ours = [row for row in now if tuple(row[k] for k in ITEM) in theirs]
    if not ours:
        return {}
    held = Builder(Compare(confidence=b.confidence, resamples=b.resamples), b.seed)
    answer_metrics(held, pair(ours, [theirs[tuple(row[k] for k in ITEM)] for row in ours]), allow_truncated=True)
    note = _left(len(now) - len(ours), "items")
    differences = {}
    for name, metric in held.metrics.items():
        stem, _, part = name.partition("/")
        if stem in PER_ITEM.values():
            differences[name] = metric | {"how": "paired by item", "warnings": [*metric["warnings"], *note]}
        if stem == "acc_delta":
            scaled = {k: None if metric[k] is None else metric[k] / 100 for k in ("value", "low", "high")}
            differences[f"acc/{part}"] = differences[name] | scaled | {"unit": "fraction"}
    return differences


def _left(count: int, what: str) -> tuple[str, ...]:
    return (f"{count} {what} of this run have no baseline",) if count else ()


def unpaired(name: str, now: Metric, then: Metric, why: str, *, same_machine: bool) -> Metric:
    """Difference of two figures from their values and intervals, as if they were independent. The limits add by their squares (Zou
    and Donner 2008, Statistics in Medicine 27:1693), on the log scale for a ratio. Without both intervals, or with timings of two
    machines, there is a value and no interval, which never passes."""
    what = definition(name)
    assert what is not None  # the caller has it from the results
    ratio = what.unit == "ratio"
    positive = now["value"] > 0 and then["value"] > 0
    value = now["value"] - then["value"] if not ratio else now["value"] / then["value"] if positive else None
    n = min(now["n"], then["n"])
    method = "limits added by their squares (Zou and Donner 2008)"
    fault = _incomparable(name, now, then, same_machine)
    confidence = now.get("confidence") or 0.95
    if value is None or fault:
        return _metric(Estimate(value, None, None, n, method), name, confidence, "unpaired", (fault or "no quotient",))
    a, b = ({k: math.log(m[k]) if ratio else m[k] for k in ("value", "low", "high")} for m in (now, then))
    middle = a["value"] - b["value"]
    low = middle - math.hypot(a["value"] - a["low"], b["high"] - b["value"])
    high = middle + math.hypot(a["high"] - a["value"], b["value"] - b["low"])
    limits = (math.exp(low), math.exp(high)) if ratio else (low, high)
    exact = low == high  # sizes and counts have no rows to pair
    clusters = [m["clusters"] for m in (now, then) if m.get("clusters")]
    weights = [m["weight"] for m in (now, then) if m.get("weight")]
    estimate = Estimate(
        value, *limits, n, method, (), min(clusters, default=None), min(weights, default=None), _between(value, now, then, ratio)
    )  # fmt: skip
    notes = () if exact or timed(name) else (f"pairing was lost: {why}",)
    return _metric(estimate, name, confidence, "exact" if exact else "unpaired", notes)


def _between(value: float, now: Metric, then: Metric, ratio: bool) -> float | None:
    """Run-to-run variation of a difference, relative to it: more rounds do not reduce it."""
    shares = [m.get("between") or 0.0 for m in (now, then)]
    if ratio or not value:
        return math.hypot(*shares) or None
    return math.hypot(*(s * m["value"] for s, m in zip(shares, (now, then)))) / abs(value) or None


def _incomparable(name: str, now: Metric, then: Metric, same_machine: bool) -> str:
    """Why the difference has no interval; empty if it has one."""
    if timed(name) and not same_machine:
        return "the baseline was timed on another machine"
    if now.get("confidence") != then.get("confidence"):
        return f"the intervals are of {now.get('confidence')} and {then.get('confidence')} confidence"
    if None in (now["low"], now["high"], then["low"], then["high"]):
        return "one of the two figures has no interval"
    what = definition(name)
    if what is not None and what.unit == "ratio" and min(now["low"], then["low"]) <= 0:
        return "an interval that reaches down to zero has no quotient"
    return ""


def unchanged(name: str, now: Metric) -> Metric:
    """The difference of equal results: none."""
    what = definition(name)
    neutral = 1.0 if what is not None and what.unit == "ratio" else 0.0
    held = {k: now.get(k) for k in ("n", "confidence", "unit")}
    same = {"value": neutral, "low": neutral, "high": neutral, "method": "the same results", "how": "unchanged", "warnings": []}
    return held | same


def another_reference(name: str, figure: Metric, notes: tuple[str, ...]) -> Metric:
    """A difference without its interval if it counts from a reference that was built again: a worse one brings variants nearer.
    Answers that are paired item by item do not count from the reference."""
    what = definition(name)
    relative = what is not None and what.neutral is not None and figure["how"] != "paired by item"
    limits: Metric = {"low": None, "high": None} if relative else {}
    return figure | limits | {"warnings": [*figure["warnings"], *notes]}


def _metric(estimate: Estimate, name: str, confidence: float, how: str, notes: tuple[str, ...]) -> Metric:
    return as_metric(name, estimate, confidence) | {"warnings": [*estimate.warnings, *notes], "how": how}
