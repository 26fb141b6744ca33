"""Rows -> metrics with intervals. Every difference is paired, item by item or token by token, with the reference's rows.

No files and no models: what a metric means stands in metrics.py, how sure it is in stats.py. Token rows and timings have
files of their own, token_figures.py and speed_figures.py.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from pipeline.errors import ArtifactError
from pipeline.metrics import bounds_of, definition
from pipeline.params import Compare
from pipeline.stats import (
    Estimate,
    cluster_bootstrap,
    mcnemar,
    outer,
    paired_difference,
    quantile_interval,
    wilson,
)

Metrics = dict[str, dict[str, Any]]
Row = dict[str, Any]


class Builder:
    """Collects metrics under one confidence, one number of resamples and one seed.

    Each metric gets a generator of its own from the seed and its name, so that adding a metric moves no other's interval.
    """

    def __init__(self, setup: Compare, seed: int) -> None:
        self.confidence, self.resamples, self.seed = setup.confidence, setup.resamples, seed
        self.metrics: Metrics = {}
        self.curves: dict[str, Any] = {}  # what is drawn and not judged
        self.bounds: dict[str, Any] = {}  # what bounds the phases of a request, in words

    def add(self, name: str, estimate: Estimate, scale: float = 1.0) -> None:
        what = definition(name)
        assert what is not None, f"{name} has no definition in pipeline/metrics.py"
        fields = asdict(estimate)
        for key in ("value", "low", "high"):
            fields[key] = None if fields[key] is None else fields[key] * scale
        self.metrics[name] = fields | {"unit": what.unit, "confidence": self.confidence}

    def exact(self, name: str, value: float | None, n: int, method: str, *warnings: str) -> None:
        """A count or a size: it has no sampling error, so its interval is itself."""
        self.add(name, Estimate(value, value, value, n, method, warnings))

    def bare(self, name: str, value: float | None, n: int, method: str, *warnings: str) -> None:
        """A figure for which no interval is made; the warnings say why."""
        self.add(name, Estimate(value, None, None, n, method, warnings))

    def mean(self, name: str, num: Any, den: Any, clusters: Any, transform: str = "mean", scale: float = 1.0) -> None:
        self.add(name, self.resampled(name, num, den, clusters, transform), scale)

    def resampled(self, name: str, num: Any, den: Any, clusters: Any, transform: str = "mean") -> Estimate:
        return cluster_bootstrap(
            num, den, clusters, confidence=self.confidence, resamples=self.resamples, rng=self.rng(name),
            transform=transform, bounds=bounds_of(name, transform),
        )  # fmt: skip

    def quantile(self, name: str, values: Any, clusters: Any, q: float) -> None:
        self.add(name, quantile_interval(values, clusters, q, confidence=self.confidence))

    def rng(self, name: str) -> np.random.Generator:
        """A metric's own generator."""
        return np.random.default_rng([self.seed, *name.encode()])


# --- answers -----------------------------------------------------------------------------------------------------


def pair(rows: list[Row], reference: list[Row]) -> list[tuple[Row, Row]]:
    """The same items in both, in order; raises if they are not the same items asked in the same way."""
    asked = [(r["task"], r["doc_id"], r["filter"]) for r in rows]
    if len(set(asked)) < len(asked):
        raise ArtifactError("an item was answered twice; it would count as two")
    if len(rows) != len(reference):
        raise ArtifactError(f"{len(rows)} answers cannot be paired with the reference's {len(reference)}; `dvc repro` them")
    for ours, theirs in zip(rows, reference):
        for key in ("task", "doc_id", "filter", "doc_hash", "prompt_hash", "target_hash", "first_token_ids"):
            if ours[key] != theirs[key]:
                raise ArtifactError(
                    f"task {ours['task']} item {ours['doc_id']}: {key} is {ours[key]!r}, the reference's {theirs[key]!r}; "
                    "they were not asked the same thing"
                )
    return list(zip(rows, reference))


def answer_metrics(b: Builder, pairs: list[tuple[Row, Row]], allow_truncated: bool) -> str | None:
    """Scores, paired differences and flips per task; returns why the variant is invalid, or None."""
    tasks: dict[str, list[tuple[Row, Row]]] = {}
    first = {ours["task"]: ours["filter"] for ours, _ in reversed(pairs)}
    for ours, theirs in pairs:  # a task with several filters scores each item several times: the first one counts
        if ours["filter"] == first[ours["task"]]:
            tasks.setdefault(ours["task"], []).append((ours, theirs))
    pairs = [p for own in tasks.values() for p in own]
    cut = sum(ours["truncated"] for ours, _ in pairs)
    b.exact("truncated", cut, len(pairs), "count")
    for task, own in tasks.items():
        b.exact(f"truncated/{task}", sum(ours["truncated"] for ours, _ in own), len(own), "count")
    b.exact("empty_outputs", sum(ours["empty"] for ours, _ in pairs), len(pairs), "count")
    for task, own in tasks.items():
        if own[0][0]["kind"] == "loglikelihood_rolling":
            _rolling(b, task, own)
        elif own[0][0]["acc"] is not None:
            _accuracy(b, task, own)
    scored = [p for p in pairs if p[0]["acc"] is not None]
    if scored:
        _accuracy(b, "all", scored)
    if cut and not allow_truncated:
        return f"{cut} items are longer than the model's window (evaluate.allow_truncated is false)"
    return None


def _accuracy(b: Builder, task: str, pairs: list[tuple[Row, Row]]) -> None:
    ours, theirs = np.array([p[0]["acc"] for p in pairs]), np.array([p[1]["acc"] for p in pairs])
    right, right_ref = ours > 0.5, theirs > 0.5
    n, lost, won = len(pairs), int((right_ref & ~right).sum()), int((right & ~right_ref).sum())
    both = int((right & right_ref).sum())
    score = wilson(int(right.sum()), n, confidence=b.confidence)
    delta = paired_difference(both, lost, won, n - both - lost - won, confidence=b.confidence)
    clusters = [f"{p[0]['task']}/{p[0]['cluster']}" for p in pairs]
    if len(set(clusters)) < n:  # items of one family rise and fall together: take the outer limits
        change = right.astype(float) - right_ref
        delta = outer(delta, b.resampled(f"acc_delta/{task}", change, np.ones(n), clusters))
        score = outer(score, b.resampled(f"acc/{task}", right, np.ones(n), clusters))
    b.add(f"acc/{task}", score)
    b.add(f"acc_delta/{task}", delta, 100.0)
    b.exact(f"flips_to_wrong/{task}", lost, n, "count")
    b.exact(f"flips_to_right/{task}", won, n, "count")
    note = () if lost + won else ("no item changed: there is nothing to test",)
    b.bare(f"p_mcnemar/{task}", mcnemar(lost, won), lost + won, "exact McNemar, two-sided", *note)
    if right_ref.any():
        b.mean(f"recovery/{task}", right, right_ref, clusters)


def _rolling(b: Builder, task: str, pairs: list[tuple[Row, Row]]) -> None:
    ours = np.array([p[0]["loglikelihoods"][0] for p in pairs])
    theirs = np.array([p[1]["loglikelihoods"][0] for p in pairs])
    size, docs = [p[0]["bytes"] for p in pairs], [p[0]["cluster"] for p in pairs]
    b.mean(f"byte_ppl/{task}", -ours, size, docs, transform="exp")
    b.mean(f"byte_ppl_ratio/{task}", theirs - ours, size, docs, transform="exp")


# --- sizes -------------------------------------------------------------------------------------------------------


def size_metrics(b: Builder, manifest: Row, reference: Row) -> None:
    size = manifest["weight_bytes"]
    b.exact("weight_bytes", size, 1, "file headers")
    notes = manifest.get("warnings") or []
    b.exact("bits_per_weight", manifest["bits_per_weight"], 1, "file headers over the base's weights", *notes)
    b.exact("size_ratio", size / reference["weight_bytes"], 1, "file headers")
