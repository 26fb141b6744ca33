"""Times of requests in rounds: their ratios, whether those settle the gate's question, variation between runs, drift of the
machine. Rounds of one run share its conditions, so an interval includes run-to-run variation. Continuing after a look at an
interval would raise its error: that is divided between the two planned looks (Bonferroni)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from scipy import stats

from pipeline.core.params import Params
from pipeline.core.records import TimingRow
from pipeline.stats.intervals import Estimate, geometric_mean_t

UNSTEADY = 1.1  # ratio of the reference's slowest round to its fastest that gives a warning


def ttft(t_submit: float, t_tokens: list[float]) -> float | None:
    return t_tokens[0] - t_submit if t_tokens else None


def tpot(t_tokens: list[float], t_last: float | None = None, n: int | None = None) -> float | None:
    """Seconds per output token after the first; None for fewer than two tokens, or if all came at once. t_last, n: time of the last
    of `n` tokens, where a server's events (t_tokens) do not hold one token each."""
    last, n = t_tokens[-1] if t_last is None and t_tokens else t_last, len(t_tokens) if n is None else n
    return (last - t_tokens[0]) / (n - 1) if last is not None and n > 1 and len(t_tokens) > 1 else None


def itl(t_tokens: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(t_tokens)]


def whole_runs(run: Estimate, between: float | None, *, confidence: float) -> Estimate:
    """Widen a positive estimate's interval by run-to-run variation (log standard deviation; None: unknown). Both errors are
    independent: their squares add on the log scale, on each side."""
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
    """Standard deviations to each side of a two-sided interval of the normal distribution."""
    return float(stats.norm.ppf((1 + confidence) / 2))


@dataclass(frozen=True)
class Looks:
    """Planned looks at the rounds, the gate's bounds on their ratio, and run-to-run variation (log standard deviation; None:
    unknown)."""

    planned: int
    bounds: tuple[float, ...]
    between: float | None = None

    def unsettled(self, rows: Sequence[TimingRow], confidence: float) -> bool:
        """Whether there is no interval yet, or it contains a bound that more rounds could exclude."""
        ratio = self.ratio(rows, confidence)
        if ratio.value is None or ratio.low is None or ratio.high is None:
            return True
        stays = deviations(self.level(confidence)) * (self.between or 0.0)
        return any(ratio.low < bound < ratio.high and abs(np.log(bound / ratio.value)) > stays for bound in self.bounds)

    def ratio(self, rows: Sequence[TimingRow], confidence: float) -> Estimate:
        """The decode ratio with the interval of each look."""
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
    """Confidence of the intervals that decide on more rounds. `benchmark` does not depend on it: a change invalidates no timing."""
    return settings.compare.confidence


def pairs(rows: Sequence[TimingRow], other: str = "reference") -> list[tuple[TimingRow, TimingRow]]:
    """(the variant's row, the other's) of every round that both answered."""
    good = [r for r in rows if r["scenario"] == "single" and not r["warmup"] and r["ok"]]
    reference = {r["round"]: r for r in good if r["who"] == other}
    return [(r, reference[r["round"]]) for r in good if r["who"] == "variant" and r["round"] in reference]


def decode_ratios(rows: Sequence[TimingRow], other: str = "reference") -> list[float]:
    """The variant's decode rate over the other's, round by round."""
    times = [(tpot(reference["t_tokens"]), tpot(variant["t_tokens"])) for variant, reference in pairs(rows, other)]
    return [reference / variant for reference, variant in times if reference and variant]


def drift(rows: Sequence[TimingRow], *, confidence: float) -> Estimate:
    """Relative change of the reference's time per token per round, which is the machine's: slope of its logarithm against the
    round, t interval."""
    times = _reference_times(rows)
    method = f"slope of log time against round, least squares, t interval, {len(times)} rounds"
    if len(times) < 3:
        return Estimate(None, None, None, len(times), method, ("fewer than three rounds show no drift",))
    line = stats.linregress(np.array([*times], float), np.log([*times.values()]))
    half = float(stats.t.ppf((1 + confidence) / 2, len(times) - 2) * line.stderr)
    low, value, high = (float(np.expm1(line.slope + d)) for d in (-half, 0.0, half))
    return Estimate(value, low, high, len(times), method)


def _reference_times(rows: Sequence[TimingRow]) -> dict[int | None, float]:
    return {row["round"]: t for _, row in pairs(rows) if (t := tpot(row["t_tokens"]))}


def drift_in_words(drift: Estimate, rows: Sequence[TimingRow]) -> tuple[str, ...]:
    """A warning if the drift's interval excludes 0, or the reference's time varied without a trend."""
    if drift.value is None or drift.low is None or drift.high is None or drift.low <= 0 <= drift.high:
        times = _reference_times(rows).values()
        if not times or max(times) < UNSTEADY * min(times):
            return ()
        span = f"{1000 * min(times):.3g} to {1000 * max(times):.3g} ms"
        return (f"the machine was not steady: the reference's time per token went from {span} within {len(times)} rounds",)
    return (
        f"the machine drifted: the reference's time per token changed by {100 * drift.value:+.2g} % a round "
        f"[{100 * drift.low:+.2g}, {100 * drift.high:+.2g}]; ratios are taken within rounds, absolute times are not",
    )
