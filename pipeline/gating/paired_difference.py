"""Differences between a variant's metrics and the baseline's.

They are paired by item or token if the rows of both commits are available. Else they come from the two intervals as if these were
independent, which makes them wider. Ratios are compared by quotient, all else by difference.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.core.errors import ArtifactError
from pipeline.core.params import Compare
from pipeline.core.records import AnswerRow, Metric
from pipeline.metrics.answers import PAIRED, answer_metrics, pair
from pipeline.metrics.builder import Builder, as_metric
from pipeline.metrics.definitions import definition, position_parts, timed
from pipeline.metrics.tokens import PER_TOKEN, TOKEN, Columns
from pipeline.stats.intervals import Estimate


class Difference(Metric):
    """how: `paired by token`, `paired by item`, `unpaired`, `exact` or `unchanged`."""

    how: str


def by_item(name: str) -> bool:
    """Whether a metric's difference is paired by item."""
    return name.split("/")[0] in ("acc", *PAIRED)


def tokens_paired(b: Builder, name: str, now: dict[str, list[Any]], before: dict[str, list[Any]]) -> Difference | None:
    """Paired difference of a token metric over the tokens of both; None without common tokens or for any other metric. now, before:
    columns of artifacts/tokens. Whole documents are resampled, as for the metric itself."""
    stem, _, part = name.partition("/")
    if stem not in PER_TOKEN:
        return None
    shared, shared_before = _shared(now, before)
    in_part = _part(shared, part, stem)
    values, values_before = (np.asarray(PER_TOKEN[stem](columns), float) for columns in (shared, shared_before))
    change = (values - values_before)[in_part]
    if not len(change) or not np.isfinite(change).all():
        return None
    documents, transform = shared["document"][in_part], "exp" if stem == "ppl_ratio" else "mean"
    estimate = b.resampled(f"baseline/{name}", change, 1, documents, transform)
    left = len(now["kld"]) - len(shared["kld"])
    return _difference(estimate, name, b.confidence, "paired by token", *_unmatched(left, "tokens"))


def _shared(now: dict[str, list[Any]], before: dict[str, list[Any]]) -> tuple[Columns, Columns]:
    """The rows of both with the same token in the same place, in one order."""
    keys, keys_before = (list(zip(*(columns[k] for k in TOKEN))) for columns in (now, before))
    index = {key: k for k, key in enumerate(keys_before)}
    if len(index) < len(keys_before) or len(set(keys)) < len(keys):
        raise ArtifactError("a token stands twice in the rows and would count as two")
    both = [(k, index[key]) for k, key in enumerate(keys) if key in index]
    rows, rows_before = np.array(both, int).reshape(-1, 2).T
    return {k: np.asarray(v)[rows] for k, v in now.items()}, {k: np.asarray(v)[rows_before] for k, v in before.items()}


def _part(c: Columns, part: str, stem: str) -> NDArray[np.bool_]:
    """Mask of the tokens of a metric's part: a domain, positions or a class; perplexity is over texts only."""
    kind, _, name = part.rpartition(":")
    if kind == "position":
        return np.asarray(position_parts(c["position"]) == name)
    if kind == "class":
        return np.asarray(c["token_class"] == name)
    if part:
        return np.asarray(c["set"] == part)
    return np.asarray(c["set"] != "trajectory") if stem == "ppl_ratio" else np.ones(len(c["kld"]), bool)


def _item(row: AnswerRow) -> tuple[Any, ...]:
    """The key of a row's question: equal for the same item asked in the same words."""
    return row["task"], row["doc_id"], row["filter"], row["doc_hash"], row["prompt_hash"], row["target_hash"]


def items_paired(b: Builder, now: list[AnswerRow], before: list[AnswerRow]) -> dict[str, Difference]:
    """{metric: paired difference} of accuracy and byte perplexity over the items of both, computed as to the reference."""
    rows_before = {_item(row): row for row in before}
    shared = [row for row in now if _item(row) in rows_before]
    if not shared:
        return {}
    builder = Builder(Compare(confidence=b.confidence, resamples=b.resamples), b.seed)
    answer_metrics(builder, pair(shared, [rows_before[_item(row)] for row in shared]), allow_truncated=True)
    notes = _unmatched(len(now) - len(shared), "items")
    differences: dict[str, Difference] = {}
    for name, metric in builder.metrics.items():
        stem, _, part = name.partition("/")
        if stem in PAIRED:
            difference: Difference = {**metric, "how": "paired by item", "warnings": [*metric["warnings"], *notes]}
            differences[name] = difference
            if stem == "acc_delta":
                value, low, high = (x if x is None else x / 100 for x in (metric["value"], metric["low"], metric["high"]))
                differences[f"acc/{part}"] = {**difference, "value": value, "low": low, "high": high, "unit": "fraction"}
    return differences


def _unmatched(count: int, what: str) -> tuple[str, ...]:
    return (f"{count} {what} of this run have no baseline",) if count else ()


def _is_ratio(name: str) -> bool:
    what = definition(name)
    return what is not None and what.unit == "ratio"


def unpaired(name: str, now: Metric, before: Metric, why: str, *, same_machine: bool) -> Difference:
    """Difference of two values with intervals, taken as independent. The limits add by their squares (Zou and Donner 2008,
    Statistics in Medicine 27:1693), on the log scale for a ratio. If an interval is missing, or timings are of two machines, the
    difference has no interval and never passes. why: reason why pairing was lost."""
    ratio, both = _is_ratio(name), (now, before)
    ends = np.array([[m["value"], m["low"], m["high"]] for m in both], float)  # nan where there is none
    value = ends[0, 0] / ends[1, 0] if ratio and ends[:, 0].min() > 0 else None if ratio else ends[0, 0] - ends[1, 0]
    method = "limits added by their squares (Zou and Donner 2008)"
    estimate = Estimate(value, None, None, min(m["n"] for m in both), method)
    for wrong, why_not in (
        (timed(name) and not same_machine, "the baseline was timed on another machine"),
        (now["confidence"] != before["confidence"], f"intervals of {now['confidence']} and {before['confidence']} confidence"),
        (np.isnan(ends).any(), "one of the two values has no interval"),
        (ratio and ends.min() <= 0, "an interval that reaches down to zero has no quotient"),
    ):
        if wrong:
            return _difference(estimate, name, now["confidence"], "unpaired", why_not)
    (middle, low, high), (middle_before, low_before, high_before) = np.log(ends) if ratio else ends
    limits = np.array([
        middle - middle_before - math.hypot(middle - low, high_before - middle_before),
        middle - middle_before + math.hypot(high - middle, middle_before - low_before),
    ])  # fmt: skip
    between = np.array([m["between"] or 0.0 for m in both])  # more rounds do not reduce it
    if not ratio and value:
        between *= ends[:, 0] / value
    low, high = (float(x) for x in (np.exp(limits) if ratio else limits))
    estimate = replace(
        estimate, low=low, high=high, between=math.hypot(*between) or None,
        clusters=min((c for m in both if (c := m["clusters"])), default=None),
        weight=min((w for m in both if (w := m["weight"])), default=None),
    )  # fmt: skip
    if low == high:  # sizes and counts have no rows to pair
        return _difference(estimate, name, now["confidence"], "exact")
    notes = () if timed(name) else (f"pairing was lost: {why}",)
    return _difference(estimate, name, now["confidence"], "unpaired", *notes)


def unchanged(name: str, now: Metric) -> Difference:
    """The difference between equal results."""
    neutral = 1.0 if _is_ratio(name) else 0.0
    return _difference(Estimate(neutral, neutral, neutral, now["n"], "the same results"), name, now["confidence"], "unchanged")


def of_another_reference(name: str, difference: Difference, note: str) -> Difference:
    """A difference without its interval if it depends on a reference that has changed: a worse one brings variants nearer. Answers
    paired by item do not depend on the reference."""
    what = definition(name)
    noted: Difference = {**difference, "warnings": [*difference["warnings"], note]}
    if what is not None and what.neutral is not None and difference["how"] != "paired by item":
        noted["low"] = noted["high"] = None
    return noted


def _difference(estimate: Estimate, name: str, confidence: float, how: str, *notes: str) -> Difference:
    metric = as_metric(name, estimate, confidence)
    return {**metric, "warnings": [*estimate.warnings, *notes], "how": how}
