"""The next run lies in a run's interval as often as it says, once the interval knows what whole runs differ by."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.gating.rules import Bound, judge
from pipeline.speed.run_to_run import whole_runs
from pipeline.stats.intervals import Estimate, geometric_mean_t, items_to_settle

ONE = Estimate(0.9, 0.88, 0.92, 5, "t interval")


def test_the_truth_of_all_runs_is_covered_though_each_run_has_a_shift_of_its_own() -> None:
    rng, truth, trials = np.random.default_rng(0), 0.9, 3000
    hit = {True: 0, False: 0}
    for _ in range(trials):
        rounds = truth * np.exp(rng.normal(0, 0.05) + rng.normal(0, 0.05, 5))
        for known in hit:
            found = whole_runs(geometric_mean_t(rounds, confidence=0.95), 0.05 if known else None, confidence=0.95)
            hit[known] += bool(found.low < truth < found.high)  # type: ignore[operator]
    assert hit[True] / trials > 0.94, "a little more than promised: t of few rounds and a known spread together"
    assert hit[False] / trials < 0.90


def test_parts_are_added_by_their_squares_on_the_log_scale() -> None:
    found = whole_runs(ONE, 0.05, confidence=0.95)
    assert np.log(found.value / found.low) == pytest.approx(np.hypot(np.log(0.9 / 0.88), 1.959964 * 0.05))  # type: ignore[operator]
    assert found.value == 0.9 and found.between == 0.05 and "5 % between whole runs" in found.method
    nothing = whole_runs(ONE, 0.0, confidence=0.95)
    assert (nothing.low, nothing.high) == (pytest.approx(0.88), pytest.approx(0.92)), "none at all changes nothing"


def test_what_is_not_known_is_said_and_adds_nothing() -> None:
    found = whole_runs(ONE, None, confidence=0.95)
    assert (found.low, found.high, found.between) == (0.88, 0.92, None) and "is not known" in found.method


@pytest.mark.parametrize("bare", [Estimate(None, None, None, 0, ""), Estimate(0.9, None, None, 1, "")])
def test_without_an_interval_there_is_nothing_to_widen(bare: Estimate) -> None:
    assert whole_runs(bare, 0.05, confidence=0.95) == bare


def test_a_limit_at_zero_stays_there() -> None:
    found = whole_runs(Estimate(2.0, 0.0, 5.0, 3, ""), 0.1, confidence=0.95)
    assert found.low == 0.0 and found.high is not None and found.high > 5.0


def test_more_rounds_settle_only_what_rounds_leave_open() -> None:
    wide = whole_runs(Estimate(0.95, 0.70, 1.29, 5, ""), 0.01, confidence=0.95)
    settle = items_to_settle(wide, 0.9)
    assert settle is not None and settle > (items_to_settle(Estimate(0.95, 0.70, 1.29, 5, ""), 0.9) or 0), "a part stays"
    assert items_to_settle(whole_runs(wide, 0.05, confidence=0.95), 0.9) is None, "whole runs differ by more than is left"


def test_the_verdict_says_that_more_rounds_would_not_help() -> None:
    found = whole_runs(Estimate(0.93, 0.91, 0.95, 5, ""), 0.05, confidence=0.95)
    metric = {"value": found.value, "low": found.low, "high": found.high, "n": 5, "between": 0.05, "confidence": 0.95}
    judgement = judge(Bound("speed_ratio", 0.9, "higher", "loss at most 10 %"), metric)
    assert judgement.verdict == "INCONCLUSIVE" and judgement.settle is None
    assert "whole runs differ by 5 % (compare.between_runs)" in judgement.reason
