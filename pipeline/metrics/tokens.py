"""Token rows -> divergence metrics with intervals, by domain, position and class, and curves by position.

Whole documents are resampled, since tokens of one document are not independent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.core.errors import ArtifactError
from pipeline.core.records import Span
from pipeline.divergence.distributions import TOP
from pipeline.metrics.builder import Builder, as_metric
from pipeline.metrics.definitions import POSITIONS, TOKEN_CLASSES, definition, position_parts
from pipeline.stats.intervals import FEW, Estimate, wilson

NEEDED = (
    "set", "document", "window", "token_class", "position", "kld", "kld_reverse", "jsd", "tv", "logp_ref", "logp",
    "top1_ref", "top1", "top5_overlap",
)  # fmt: skip
TRAJECTORY = "trajectory"
TOKEN = ("set", "document", "window", "position", "token_id")  # equal in two rows of the same token in the same place
QUANTILES = {"kld_median": 0.5, "kld_p90": 0.9, "kld_p95": 0.95, "kld_p99": 0.99, "kld_p999": 0.999}
DRAFTED = range(1, 9)  # tokens guessed by a draft per pass
STEPS = 16  # most points in a trajectory's curve

Columns = dict[str, NDArray[Any]]


def moved(c: Columns) -> NDArray[np.float64]:
    """Change of each true token's probability."""
    return np.asarray(np.exp(c["logp"]) - np.exp(c["logp_ref"]))


# Metrics that are means over tokens: the value of each token (`ppl_ratio`: exp of the mean, over texts only).
PER_TOKEN: dict[str, Callable[[Columns], NDArray[Any]]] = {
    "kld_mean": lambda c: c["kld"],
    "jsd_mean": lambda c: c["jsd"],
    "kld_reverse_mean": lambda c: c["kld_reverse"],
    "top1_agreement": lambda c: c["top1"] == c["top1_ref"],
    "top5_agreement": lambda c: c["top5_overlap"] / TOP,
    "delta_p_mean": moved,
    "moved_10pct": lambda c: np.abs(moved(c)) > 0.1,
    "ppl_ratio": lambda c: c["logp_ref"] - c["logp"],
}
METRICS = (
    *PER_TOKEN, *QUANTILES, "kld_infinite", "kld_max", "delta_p_rms", "ppl", "first_departure", "never_departs",
    "draft_overlap", "draft_step", "draft_step_sampled",
)  # fmt: skip


def of_same_documents(rows: dict[str, list[Any]], reference: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The reference's rows of the documents of `rows`, which may have ended early."""
    same = np.flatnonzero(np.isin(reference["document"], np.unique(rows["document"])))
    return {name: [values[k] for k in same] for name, values in reference.items()}


def refuse_other_tokens(rows: dict[str, list[Any]], reference: dict[str, list[Any]]) -> None:
    """Raise `ArtifactError` unless both hold the same tokens in the same order: metrics over fewer would measure something else."""
    counts = [len(columns["kld"]) for columns in (rows, reference)]
    if counts[0] != counts[1]:
        raise ArtifactError(f"{counts[0]} token rows cannot be paired with the reference's {counts[1]}; `dvc repro` them")
    for name in TOKEN:
        if (other := np.flatnonzero(np.asarray(rows[name]) != np.asarray(reference[name]))).size:
            raise ArtifactError(f"token row {other[0]}: {name} is another than the reference's; they are not the same tokens")


def token_metrics(b: Builder, rows: dict[str, list[Any]]) -> str | None:
    """Divergence metrics. Returns why the variant is invalid, or None. rows: columns of artifacts/tokens."""
    columns = {name: np.asarray(rows[name]) for name in NEEDED}
    kld = columns["kld"].astype(float)
    n, infinite, nan = len(kld), int(np.isinf(kld).sum()), int(np.isnan(kld).sum())
    b.exact("kld_infinite", infinite, n, "count")
    if not n:
        return "no token was scored"
    if nan:
        return f"{nan} of {n} tokens have logits that are not finite"
    if infinite:
        return f"{infinite} of {n} tokens have infinite divergence: the variant rules out what the reference allows"
    _divergence(b, columns)
    _parts(b, columns)
    _perplexity(b, columns)
    if kld.any():
        _as_draft(b, columns)
    trajectories = _trajectories(columns)
    if trajectories:
        _departures(b, [columns["top1"][rows] != columns["top1_ref"][rows] for rows in trajectories])
    if not kld.any():  # all distributions are the reference's own: "no difference" is exact
        for name, metric in b.metrics.items():
            what = definition(name)
            if what is not None and what.neutral is not None and metric["value"] == what.neutral:
                metric |= {"low": what.neutral, "high": what.neutral, "method": "equal distributions at every token"}
    text = columns["set"] != TRAJECTORY
    corpus = _curve(b, "corpus", columns["position"][text], columns, text, [1 << k for k in range(31)])
    b.curves["kld_by_position"] = {"corpus": corpus, TRAJECTORY: _trajectory_curve(b, columns, trajectories)}
    names, of = np.unique(columns["document"], return_inverse=True)
    sums = zip(names.tolist(), np.bincount(of).tolist(), np.bincount(of, kld).tolist())
    b.curves["kld_by_document"] = {name: {"tokens": n, "kld": total} for name, n, total in sums}
    return None


def _divergence(b: Builder, c: Columns) -> None:
    """Metrics over all tokens."""
    kld, documents = c["kld"], c["document"]
    for name, values in PER_TOKEN.items():
        unbounded = int((~np.isfinite(c["kld_reverse"])).sum()) if name == "kld_reverse_mean" else 0
        if unbounded:
            why = f"infinite in {unbounded} of {len(kld)} tokens: the variant allows what the reference rules out"
            b.bare(name, None, len(kld), "mean", why)
        elif name != "ppl_ratio":
            b.mean(name, values(c), 1, documents)
        if name == "kld_mean":
            for quantile, q in QUANTILES.items():
                b.quantile(quantile, kld, documents, q)
            b.bare("kld_max", float(kld.max()), len(kld), "maximum", "an interval of a maximum says nothing")
        elif name == "delta_p_mean":
            b.mean("delta_p_rms", moved(c) ** 2, 1, documents, transform="sqrt")


def _parts(b: Builder, c: Columns) -> None:
    """Mean divergence and agreement by domain, position and class; a part without tokens has no metric."""
    parts = {str(name): c["set"] == name for name in np.unique(c["set"])}
    where = position_parts(c["position"])
    parts |= {f"position:{name}": where == name for name in POSITIONS}
    parts |= {f"class:{name}": c["token_class"] == name for name in TOKEN_CLASSES}
    for name, inside in parts.items():
        if inside.any():
            for stem in ("kld_mean", "top1_agreement"):
                b.mean(f"{stem}/{name}", PER_TOKEN[stem](c)[inside], 1, c["document"][inside])


def _perplexity(b: Builder, c: Columns) -> None:
    """Perplexity on texts only: the reference wrote the trajectories, so its perplexity on them means nothing."""
    text = c["set"] != TRAJECTORY
    if not text.any():
        return
    documents, loss, loss_ref = c["document"][text], -c["logp"][text], -c["logp_ref"][text]
    b.mean("ppl", loss, 1, documents, transform="exp")
    b.mean("ppl_ratio", loss - loss_ref, 1, documents, transform="exp")


def _as_draft(b: Builder, c: Columns) -> None:
    """The variant as the reference's draft: a guess is accepted if both have the same likeliest token (temperature 0), or with
    probability sum of min(p, q) = 1 - TV (temperature 1; Leviathan et al. 2023)."""
    b.mean("draft_overlap", 1 - c["tv"], 1, c["document"])
    for name, share in (("draft_step", "top1_agreement"), ("draft_step_sampled", "draft_overlap")):
        m = b.metrics[share]
        for k in DRAFTED:
            value, low, high = (None if a is None else sum(a**i for i in range(k + 1)) for a in (m["value"], m["low"], m["high"]))
            method = f"(1 - a^{k + 1}) / (1 - a), a = {share}: guesses taken as independent; {m['method']}"
            b.add(f"{name}/{k}", Estimate(value, low, high, m["n"], method, tuple(m["warnings"]), m["clusters"]))


def _trajectories(c: Columns) -> list[NDArray[np.intp]]:
    """Row indices of each of the reference's continuations, by position."""
    in_set = c["set"] == TRAJECTORY
    rows = [np.flatnonzero(in_set & (c["window"] == window)) for window in np.unique(c["window"][in_set])]
    return [r[np.argsort(c["position"][r])] for r in rows]


def _departures(b: Builder, trajectories: list[NDArray[np.bool_]]) -> None:
    """Where along a trajectory the likeliest token first differs. trajectories: whether it differs, by token."""
    departed = np.array([differs.any() for differs in trajectories])
    at = np.array([differs.argmax() + 1 if differs.any() else len(differs) for differs in trajectories])
    b.add("never_departs", wilson(int((~departed).sum()), len(departed), confidence=b.confidence))
    b.add("first_departure", median_departure(b, at, departed))


def median_departure(b: Builder, at: NDArray[np.int64], departed: NDArray[np.bool_]) -> Estimate:
    """Median position of the first departure (product-limit; Kaplan and Meier 1958), with a percentile interval over resampled
    trajectories. at: [n] position of the first departure, or the length of a trajectory without one (departed False), which is
    censored there: it might have departed later."""
    n, value = len(at), _product_limit_median(at, departed)
    method = f"Kaplan-Meier median, {n} trajectories, percentile bootstrap, {b.resamples} resamples"
    rng = b.rng("first_departure")
    draws = (rng.integers(0, n, n) for _ in range(b.resamples))
    medians = [_product_limit_median(at[d], departed[d]) for d in draws]
    low, high = np.quantile(medians, [(1 - b.confidence) / 2, (1 + b.confidence) / 2], method="inverted_cdf")
    notes = () if n >= FEW else (f"{n} trajectories are few for an interval",)
    if not np.isfinite(value):
        return Estimate(None, None, None, n, method, (*notes, "fewer than half of the trajectories depart before they end"), n)
    if not np.isfinite(high):
        notes = (*notes, "no upper bound: the trajectories end before it")
    return Estimate(float(value), float(low), float(high) if np.isfinite(high) else None, n, method, notes, n)


def _product_limit_median(at: NDArray[np.int64], departed: NDArray[np.bool_]) -> float:
    """First position at which at most half have not departed; infinite if there is none."""
    times = np.unique(at[departed])
    at_risk = (at[:, None] >= times).sum(0)
    leaving = ((at[:, None] == times) & departed[:, None]).sum(0)
    left = np.cumprod(1 - leaving / at_risk)
    return float(times[np.argmax(left <= 0.5 + 1e-12)]) if (left <= 0.5 + 1e-12).any() else np.inf


def _trajectory_curve(b: Builder, c: Columns, trajectories: list[NDArray[np.intp]]) -> list[Span]:
    """Mean divergence by position in the continuation, in equal steps."""
    if not trajectories:
        return []
    longest = max(map(len, trajectories))
    step = max(4, -(-longest // STEPS))
    index = np.concatenate([np.arange(1, len(rows) + 1) for rows in trajectories])
    return _curve(b, TRAJECTORY, index, c, np.concatenate(trajectories), list(range(1, longest + 1 + step, step)))


def _curve(b: Builder, name: str, index: NDArray[Any], c: Columns, rows: NDArray[Any], edges: list[int]) -> list[Span]:
    """Mean divergence for each step between edges that has tokens. index: position of each of `rows`."""
    kld, documents, points = c["kld"][rows], c["document"][rows], list[Span]()
    for first, after in pairwise(edges):
        here = (index >= first) & (index < after)
        if here.any():
            e = b.resampled(f"curve/{name}/{first}", kld[here], 1, documents[here])
            m = as_metric("kld_mean", e if e.low is None else replace(e, low=max(e.low, 0.0)), b.confidence)
            points.append({
                "from": first, "to": after - 1, "n": e.n, "clusters": e.clusters, "value": m["value"], "low": m["low"],
                "high": m["high"], "unit": m["unit"], "confidence": b.confidence, "method": e.method, "warnings": m["warnings"],
            })  # fmt: skip
    return points
