"""How many rounds: their ratios so far, whether those settle the gate's question, and whether the machine drifted.

Rounds of one run share its minutes, so the interval also holds what whole runs differ by (run_to_run.py). Deciding to go on
after a look at an interval makes it miss the truth more often than it says: the error is divided between the two planned looks
(Bonferroni). Pure: no files, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from pipeline.core.params import Params
from pipeline.speed.requests import tpot
from pipeline.speed.run_to_run import deviations, whole_runs
from pipeline.stats.intervals import Estimate, geometric_mean_t

Row = dict[str, Any]
MOVED = 1.1  # of the reference's slowest round to its fastest: more is said


@dataclass(frozen=True)
class Looks:
    """How often the rounds are looked at, the gate's bounds on their ratio, and how far whole runs differ (standard deviation
    of the logarithm; None: not known)."""

    planned: int
    bounds: tuple[float, ...]
    between: float | None = None

    def unsettled(self, rows: Sequence[Row], confidence: float) -> bool:
        """Whether there is no interval yet, or it contains a bound and more rounds could change that."""
        ratio = self.ratio(rows, confidence)
        if ratio.value is None or ratio.low is None or ratio.high is None:
            return True
        stays = deviations(self.level(confidence)) * (self.between or 0.0)
        return any(ratio.low < bound < ratio.high and abs(np.log(bound / ratio.value)) > stays for bound in self.bounds)

    def ratio(self, rows: Sequence[Row], confidence: float) -> Estimate:
        """The decode ratio with the interval that each look is given."""
        level = self.level(confidence)
        ratio = whole_runs(geometric_mean_t(decode_ratios(rows), confidence=level), self.between, confidence=level)
        if self.planned == 1:
            return ratio
        method = f"{ratio.method}, at {100 * level:g} % for each of {self.planned} planned looks (Bonferroni)"
        return replace(ratio, method=method)

    def level(self, confidence: float) -> float:
        """The confidence of each look, so that all of them together have `confidence`."""
        return 1 - (1 - confidence) / self.planned


def confidence(settings: Params) -> float:
    """Of the intervals that decide on more rounds; another one makes no timing invalid, so `benchmark` does not depend on it."""
    return settings.compare.confidence


def pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """(variant's row, reference's row) of every round in which both answered."""
    good = [r for r in rows if r["scenario"] == "single" and not r["warmup"] and r["ok"]]
    theirs = {r["round"]: r for r in good if r["who"] == "reference"}
    return [(r, theirs[r["round"]]) for r in good if r["who"] == "variant" and r["round"] in theirs]


def decode_ratios(rows: Sequence[Row]) -> list[float]:
    """The variant's decode rate over the reference's, round by round."""
    spans = [(tpot(theirs["t_tokens"]), tpot(ours["t_tokens"])) for ours, theirs in pairs(rows)]
    return [theirs / ours for theirs, ours in spans if theirs and ours]


def drift(rows: Sequence[Row], *, confidence: float) -> Estimate:
    """Relative change a round of the reference's time per token: slope of its logarithm against the round, t interval.
    The reference is the same in every round: what changes is the machine."""
    known = [(r["round"], t) for _, r in pairs(rows) if (t := tpot(r["t_tokens"]))]
    method = f"slope of log time against round, least squares, t interval, {len(known)} rounds"
    if len(known) < 3:
        return Estimate(None, None, None, len(known), method, ("fewer than three rounds show no drift",))
    x, y = np.array([k for k, _ in known], float), np.log([t for _, t in known])
    line = stats.linregress(x, y)
    half = float(stats.t.ppf((1 + confidence) / 2, len(known) - 2) * line.stderr)
    low, value, high = (float(np.expm1(line.slope + d)) for d in (-half, 0.0, half))
    return Estimate(value, low, high, len(known), method)


def drift_in_words(drift: Estimate, rows: Sequence[Row]) -> tuple[str, ...]:
    """A warning where the drift's interval excludes 0, or where the reference's time moved without a trend."""
    if drift.value is None or drift.low is None or drift.high is None or drift.low <= 0 <= drift.high:
        known = [t for _, theirs in pairs(rows) if (t := tpot(theirs["t_tokens"]))]
        if not known or max(known) < MOVED * min(known):
            return ()
        span = f"{1000 * min(known):.3g} to {1000 * max(known):.3g} ms"
        return (f"the machine was not steady: the reference's time per token went from {span} within {len(known)} rounds",)
    return (
        f"the machine drifted: the reference's time per token changed by {100 * drift.value:+.2g} % a round "
        f"[{100 * drift.low:+.2g}, {100 * drift.high:+.2g}]; ratios are taken within rounds, absolute times are not",
    )
