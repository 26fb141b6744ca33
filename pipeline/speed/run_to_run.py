"""A figure of one run, and how sure it is of the next one. Pure: no files, no clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy import stats

from pipeline.stats.intervals import Estimate


def whole_runs(found: Estimate, between: float | None, *, confidence: float) -> Estimate:
    """A positive figure of one run with the interval that it has for the next: the run's own and what whole runs differ by
    (log standard deviation; None: not known), independent and so added by their squares, on the log scale, side by side."""
    if not found.value or found.low is None or found.high is None:
        return found
    if between is None:
        return replace(found, method=f"{found.method}, one run: how far whole runs differ is not known (compare.between_runs)")
    half = deviations(confidence) * between
    low = found.value * np.exp(-np.hypot(np.log(found.value / found.low), half)) if found.low > 0 else 0.0
    high = found.value * np.exp(np.hypot(np.log(found.high / found.value), half))
    told = f"{found.method}, and {100 * between:g} % between whole runs"
    return replace(found, low=float(low), high=float(high), method=told, between=between)


def deviations(confidence: float) -> float:
    """How many standard deviations a two-sided interval of the normal distribution reaches."""
    return float(stats.norm.ppf((1 + confidence) / 2))
