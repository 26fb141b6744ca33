"""A figure of one run, and how sure it is of the next one. Pure: no files, no clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy import stats

from pipeline.stats.intervals import Estimate


def whole_runs(run: Estimate, between: float | None, *, confidence: float) -> Estimate:
    """Widen a positive estimate's interval by what whole runs differ by (log standard deviation; None: not known).
    Both errors are independent: their squares add, on the log scale, on each side."""
    if not run.value or run.low is None or run.high is None:
        return run
    if between is None:
        return replace(run, method=f"{run.method}, one run: how far whole runs differ is not known (compare.between_runs)")
    half = deviations(confidence) * between
    low = run.value * np.exp(-np.hypot(np.log(run.value / run.low), half)) if run.low > 0 else 0.0
    high = run.value * np.exp(np.hypot(np.log(run.high / run.value), half))
    method = f"{run.method}, and {100 * between:g} % between whole runs"
    return replace(run, low=float(low), high=float(high), method=method, between=between)


def deviations(confidence: float) -> float:
    """How many standard deviations a two-sided interval of the normal distribution reaches."""
    return float(stats.norm.ppf((1 + confidence) / 2))
