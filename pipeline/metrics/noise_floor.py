"""The noise floor: which differences are too small to be told from none."""

from __future__ import annotations

from typing import Any

from pipeline.metrics.definitions import FLOORS, definition

Metrics = dict[str, dict[str, Any]]
MARK = "floor-limited"
TIMES = 2  # below so many times what "no difference" measures, a difference may be all noise


def limit(name: str, floors: Metrics) -> float | None:
    """Distance from "no difference" below which a metric is floor-limited: twice the larger of floor and rounding."""
    known = [floors[f]["value"] for f in FLOORS[name] if f in floors and floors[f]["value"] is not None]
    return TIMES * max(known) if known else None


def mark(metrics: Metrics, floors: Metrics) -> None:
    """Add a warning to every metric of a variant whose distance from "no difference" is below the limit."""
    for name in FLOORS.keys() & metrics.keys():
        value, most, what = metrics[name]["value"], limit(name, floors), definition(name)
        assert what is not None and what.neutral is not None  # FLOORS names metrics that have both
        if value is None:
            continue
        if most is None:
            warning = "the noise floor is unknown"
        elif abs(value - what.neutral) < most:
            warning = f"{MARK}: below {TIMES} times what no difference measures here ({most / TIMES:.3g})"
        else:
            continue
        metrics[name]["warnings"] = [*metrics[name]["warnings"], warning]
