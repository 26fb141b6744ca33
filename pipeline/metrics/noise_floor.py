"""The noise floor: which differences are too small to be told from none."""

from __future__ import annotations

from pipeline.core.records import Metrics
from pipeline.metrics.definitions import FLOORS, definition

MARK = "floor-limited"
TIMES = 2  # below so many times what "no difference" measures, a difference may be all noise


def limit(name: str, floors: Metrics) -> float | None:
    """Distance from "no difference" below which a metric is floor-limited: twice the larger of floor and rounding."""
    known = [value for f in FLOORS[name] if f in floors and (value := floors[f]["value"]) is not None]
    return TIMES * max(known) if known else None


def mark(metrics: Metrics, floors: Metrics) -> None:
    """Add a warning to every metric of a variant whose distance from "no difference" is below the limit."""
    for name in FLOORS.keys() & metrics.keys():
        value, smallest, what = metrics[name]["value"], limit(name, floors), definition(name)
        assert what is not None and what.neutral is not None  # FLOORS names metrics that have both
        if value is None:
            continue
        if smallest is None:
            metrics[name]["warnings"].append("the noise floor is unknown")
        elif abs(value - what.neutral) < smallest:
            warning = f"{MARK}: below {TIMES} times what no difference measures here ({smallest / TIMES:.3g})"
            metrics[name]["warnings"].append(warning)
