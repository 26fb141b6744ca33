"""Collect metrics, each with unit, interval and method."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from pipeline.core.params import Compare
from pipeline.core.records import Bounds, Curves, Look, Metric, Metrics, ModelManifest, ShortEstimate, WholeEstimate
from pipeline.metrics.definitions import bounds_of, definition
from pipeline.stats.intervals import Estimate, cluster_bootstrap, quantile_interval
from pipeline.stats.sequential import level


def short(e: Estimate) -> ShortEstimate:
    return {"value": e.value, "low": e.low, "high": e.high, "n": e.n, "method": e.method, "warnings": list(e.warnings)}


def whole(e: Estimate) -> WholeEstimate:
    return {**short(e), "clusters": e.clusters, "weight": e.weight, "between": e.between}


def as_metric(name: str, estimate: Estimate, confidence: float, scale: float = 1.0) -> Metric:
    """An estimate as a record. scale: factor to the metric's unit."""
    what = definition(name)
    assert what is not None, f"{name} has no definition in pipeline/metrics/definitions.py"
    value, low, high = (None if x is None else x * scale for x in (estimate.value, estimate.low, estimate.high))
    return {**whole(replace(estimate, value=value, low=low, high=high)), "unit": what.unit, "confidence": confidence}


def unknown(name: str, why: str, confidence: float) -> Metric:
    """A metric without a value."""
    return as_metric(name, Estimate(None, None, None, 0, "none", (why,)), confidence)


class Builder:
    """Collects metrics with one confidence, number of resamples and seed. Each metric has its own generator, from the seed and its
    name, so that adding a metric leaves all other intervals as they are."""

    def __init__(self, setup: Compare, seed: int) -> None:
        self.confidence, self.resamples, self.seed, self.between = setup.confidence, setup.resamples, seed, setup.between_runs
        self.metrics: Metrics = {}
        self.curves: Curves = {}
        self.bounds: Bounds = {}

    def add(self, name: str, estimate: Estimate, scale: float = 1.0) -> None:
        self.metrics[name] = as_metric(name, estimate, self.confidence, scale)

    def exact(self, name: str, value: float | None, n: int, method: str, *warnings: str) -> None:
        """A count or a size: without sampling error, its interval is the value."""
        self.add(name, Estimate(value, value, value, n, method, warnings))

    def bare(self, name: str, value: float | None, n: int, method: str, *warnings: str) -> None:
        """A value without an interval; the warnings say why."""
        self.add(name, Estimate(value, None, None, n, method, warnings))

    def mean(
        self, name: str, num: ArrayLike, den: ArrayLike, clusters: ArrayLike, transform: str = "mean", scale: float = 1.0
    ) -> None:
        self.add(name, self.resampled(name, num, den, clusters, transform), scale)

    def resampled(self, name: str, num: ArrayLike, den: ArrayLike, clusters: ArrayLike, transform: str = "mean") -> Estimate:
        return cluster_bootstrap(
            num, den, clusters, confidence=self.confidence, resamples=self.resamples, rng=self.rng(name),
            transform=transform, bounds=bounds_of(name, transform),
        )  # fmt: skip

    def quantile(self, name: str, values: ArrayLike, clusters: ArrayLike, q: float) -> None:
        self.add(name, quantile_interval(values, clusters, q, confidence=self.confidence))

    @contextmanager
    def at_look(self, look: Look | None) -> Iterator[None]:
        """Metrics added here are of rows that end at a look; their intervals hold `confidence` over all looks together."""
        if look is None:
            yield
            return
        confidence, before = self.confidence, set(self.metrics)
        self.confidence = level(look["look"], look["looks"], confidence)
        yield
        for name in self.metrics.keys() - before:
            metric = self.metrics[name]
            metric["confidence"] = confidence
            if metric["low"] != metric["high"]:
                which = f"look {look['look']} of {look['looks']} (O'Brien-Fleming)"
                metric["method"] += f", at {100 * self.confidence:.4g} % for {which}"
            elif metric["unit"] == "p" and metric["value"] is not None:
                metric["warnings"].append("of one look, not corrected for several")
        self.confidence = confidence

    def rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, *name.encode()])


def size_metrics(b: Builder, manifest: ModelManifest, reference: ModelManifest) -> None:
    size = manifest["weight_bytes"]
    b.exact("weight_bytes", size, 1, "file headers")
    notes = manifest.get("warnings", [])
    b.exact("bits_per_weight", manifest["bits_per_weight"], 1, "file headers over the base's weights", *notes)
    b.exact("size_ratio", size / reference["weight_bytes"], 1, "file headers")
