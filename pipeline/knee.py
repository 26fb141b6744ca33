"""The knee of a server: where more requests at once stop paying for themselves. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.numbers.replies import e2e
from pipeline.numbers.serving_figures import Row, nothing, shown, walls
from pipeline.numbers.stats import Estimate


def knee(levels: Mapping[int, list[Row]], confidence: float) -> dict[str, Any]:
    """The concurrency at which throughput over median latency is greatest: beyond it, one percent more throughput costs
    more than one percent more latency.

    levels: {concurrency: its rows}. low and high are the least and greatest knee of single rounds. Null where the
    greatest level tried is still the best one, or the least is (but for one at once: nothing is below), or fewer than
    three can be compared. Source: Kleinrock 1979, "Power and deterministic rules of thumb for probabilistic problems in
    computer communications".
    """
    power = {c: p for c, rows in sorted(levels.items()) if (p := _power([r for r in rows if not r["warmup"]]))}
    rounds = sorted(set.intersection(*(set(p) for p in power.values()))) if power else []
    if len(power) < 3 or not rounds:
        reason = f"{len(power)} levels have complete requests in every round; a knee needs three"
        return shown("knee", nothing(reason, len(rounds)), confidence)
    single = [max(power, key=lambda c, k=k: power[c][k]) for k in rounds]  # type: ignore[misc]
    best = max(power, key=lambda c: float(np.mean(np.log([power[c][k] for k in rounds]))))
    method = f"greatest throughput / median latency over {len(power)} levels, {len(rounds)} rounds; interval: single rounds' own"
    unsettled = {
        max(power): f"throughput still pays for latency at {best} at once, the most that was tried",
        min(power): f"throughput over latency is best at {best} at once, and nothing lower was tried",
    }
    if best in unsettled and best > 1:
        return shown("knee", nothing(unsettled[best], len(rounds), method), confidence)
    notes = () if len(set(single)) == 1 else (f"rounds disagree: {single}",)
    return shown("knee", Estimate(best, min(single), max(single), len(rounds), method, notes), confidence)


def _power(counted: list[Row]) -> dict[int, float]:
    """{round: complete requests a second over median end-to-end seconds}, where there are any."""
    found = {}
    for k, seconds in walls(counted).items():
        times = [x for r in counted if r["round"] == k and r["ok"] and (x := e2e(r)) is not None]
        if times:
            found[k] = len(times) / seconds / float(np.median(times))
    return found
