"""How many rounds: what their ratios say so far, whether that settles the gate's question, and whether the machine drifted.

Rounds of one run share its minutes: on a machine with neighbours their spread says too little of the next run, so what whole
runs were found to differ by is in the interval too (whole_runs.py).

Looking at an interval and then deciding to go on lets it miss the truth more often than it says. With one extra look, planned
in advance, dividing the error between the two looks (Bonferroni) keeps the promise, whatever the first look decided.
Pure: no files, no clock.
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
    """How often the rounds are looked at, the bounds that their ratio's interval should not contain, and how far whole runs
    differ (standard deviation of the logarithm; None: not known)."""

    planned: int
    bounds: tuple[float, ...]
    between: float | None = None

    def unsettled(self, rows: Sequence[Row], confidence: float) -> bool:
        """Whether the interval of the rounds so far contains a bound and more rounds could change that, or there is none."""
        found = self.ratio(rows, confidence)
        if found.value is None or found.low is None or found.high is None:
            return True
        stays = deviations(self.level(confidence)) * (self.between or 0.0)
        return any(found.low < bound < found.high and abs(np.log(bound / found.value)) > stays for bound in self.bounds)

    def ratio(self, rows: Sequence[Row], confidence: float) -> Estimate:
        """The decode ratio with the interval that each look is given."""
        level = self.level(confidence)
        found = whole_runs(geometric_mean_t(decode_ratios(rows), confidence=level), self.between, confidence=level)
        if self.planned == 1:
            return found
        told = f"at {100 * level:g} % for each of {self.planned} planned looks (Bonferroni)"
        return replace(found, method=f"{found.method}, {told}")

    def level(self, confidence: float) -> float:
        """The confidence of each look, so that all of them together have `confidence`."""
        return 1 - (1 - confidence) / self.planned


def confidence(settings: Params) -> float:
    """Of the intervals that are looked at: that of all others."""
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

    The reference is the same in every round: what changes is the machine.
    """
    found = [(r["round"], tpot(r["t_tokens"])) for _, r in pairs(rows)]
    known = [(k, t) for k, t in found if t]
    method = f"slope of log time against round, least squares, t interval, {len(known)} rounds"
    if len(known) < 3:
        return Estimate(None, None, None, len(known), method, ("fewer than three rounds show no drift",))
    x, y = np.array([k for k, _ in known], float), np.log([t for _, t in known])
    line = stats.linregress(x, y)
    half = float(stats.t.ppf((1 + confidence) / 2, len(known) - 2) * line.stderr)
    low, value, high = (float(np.expm1(line.slope + d)) for d in (-half, 0.0, half))
    return Estimate(value, low, high, len(known), method)


def drift_in_words(found: Estimate, rows: Sequence[Row]) -> tuple[str, ...]:
    """A warning where the drift's interval leaves out none at all, or where the reference's time moved without a trend."""
    if found.value is None or found.low is None or found.high is None or found.low <= 0 <= found.high:
        known = [t for _, theirs in pairs(rows) if (t := tpot(theirs["t_tokens"]))]
        if not known or max(known) < MOVED * min(known):
            return ()
        span = f"{1000 * min(known):.3g} to {1000 * max(known):.3g} ms"
        return (f"the machine was not steady: the reference's time per token went from {span} within {len(known)} rounds",)
    return (
        f"the machine drifted: the reference's time per token changed by {100 * found.value:+.2g} % a round "
        f"[{100 * found.low:+.2g}, {100 * found.high:+.2g}]; ratios are taken within rounds, absolute times are not",
    )
