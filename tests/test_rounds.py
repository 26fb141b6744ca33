"""When rounds are enough: looks planned from rules, an interval that holds the bound and knows what whole runs differ by, and the
promise kept all the same."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from gate_house import alone

from pipeline.core import params
from pipeline.core.params import Compare, Requests, Rule
from pipeline.gating.rules import Bound, judge, looks_of
from pipeline.speed import rounds
from pipeline.speed.rounds import Looks, whole_runs
from pipeline.stats.intervals import Estimate, geometric_mean_t, items_to_settle

NEAR, FAR = [0.88, 0.93, 0.90, 0.91, 0.89], [0.70, 0.71, 0.69, 0.70, 0.70]
ONE = Estimate(0.9, 0.88, 0.92, 5, "t interval")


def rows(ratios: Any) -> Any:
    """Rounds in which the variant's decode rate is so many times the reference's."""
    return [
        {"round": k, "scenario": "single", "who": who, "warmup": False, "ok": True, "t_tokens": [0.0, step, 2 * step]}
        for k, ratio in enumerate(ratios)
        for who, step in (("variant", 1.0), ("reference", float(ratio)))
    ]


def settings(rules: list[Rule], **requests: Any) -> Any:
    amount = SimpleNamespace(benchmark=Requests(rounds=5, **requests))
    return SimpleNamespace(amount=amount, gate=SimpleNamespace(rules=rules), reference="bf16", compare=Compare())


def test_ratios_pair_rounds_that_both_answered() -> None:
    given = rows([2.0, 3.0, 4.0])
    given[2]["ok"] = False
    given += [given[0] | {"scenario": "batch-4"}, given[1] | {"warmup": True}]
    assert rounds.decode_ratios(given) == pytest.approx([2.0, 4.0])


def test_a_second_look_is_planned_where_a_rule_asks_and_rounds_may_be_added() -> None:
    rule = Rule(metric="speed_ratio", margin="10 %")
    more = {"max_rounds": 10}
    assert looks_of(settings([rule], **more), "int8") == Looks(2, (0.9,))
    assert looks_of(settings([rule]), "int8").planned == 1, "no more rounds are allowed"
    assert looks_of(settings([rule], max_rounds=5), "int8").planned == 1
    assert looks_of(settings([], **more), "int8").planned == 1, "no rule asks"
    assert looks_of(settings([rule], **more), "bf16") == Looks(1, ()), "the reference is not judged"
    other = Rule(metric="speed_ratio", gain="20 %", variants=["int4"])
    assert looks_of(settings([rule, other], **more), "int4").bounds == pytest.approx((0.9, 1.2))
    assert looks_of(settings([rule, other], **more), "int8").bounds == (0.9,)


def test_the_shipped_rule_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    settings = params.load()
    assert looks_of(settings, "int8") == Looks(2, (0.9,), settings.compare.between_runs.ratio)


@pytest.mark.parametrize("ratios, looks, unsettled", [
    (NEAR, Looks(2, (0.9,)), True), (FAR, Looks(2, (0.9,)), False), (FAR, Looks(2, (0.9, 0.7)), True),
    pytest.param([], Looks(2, (0.9,)), True, id="no rounds settle nothing"),
    pytest.param(NEAR, Looks(2, (0.9,), 0.05), False, id="its interval holds the bound, and always would"),
    pytest.param([0.60, 0.80, 0.72, 0.85, 0.69], Looks(2, (0.9,), 0.05), True, id="its own rounds leave it open"),
    (NEAR, Looks(2, (0.9,), 0.0), True),
])  # fmt: skip
def test_rounds_are_unsettled_while_the_interval_holds_a_bound_and_more_rounds_could_change_that(
    ratios: list[float], looks: Looks, unsettled: bool
) -> None:
    assert looks.unsettled(rows(ratios), 0.95) is unsettled


def test_looking_twice_keeps_the_promised_coverage() -> None:
    """The worst case for a stopping rule: the truth is the bound itself, so that going on is likeliest when it is covered."""
    rng = np.random.default_rng(0)
    looks, missed, trials = Looks(2, (1.0,)), 0, 4000
    for _ in range(trials):
        ratios = np.exp(rng.normal(0.0, 0.05, 10))
        first = rows(ratios[:5])
        seen = rows(ratios) if looks.unsettled(first, 0.95) else first
        ratio = geometric_mean_t(rounds.decode_ratios(seen), confidence=looks.level(0.95))
        missed += not ratio.low < 1.0 < ratio.high  # type: ignore[operator]
    assert missed / trials < 0.05 + 2 * np.sqrt(0.05 * 0.95 / trials)


def test_drift_needs_three_rounds() -> None:
    two = rows([1.0, 1.05])
    drift = rounds.drift(two, confidence=0.95)
    assert drift.value is None and "fewer than three" in drift.warnings[0] and rounds.drift_in_words(drift, two) == ()


def test_a_step_of_the_machine_without_a_trend_is_a_warning_too() -> None:
    stepped = rows([1.0, 1.2, 1.0, 1.21, 1.0, 1.19, 1.0])
    words = rounds.drift_in_words(rounds.drift(stepped, confidence=0.95), stepped)
    assert words == ("the machine was not steady: the reference's time per token went from 1e+03 to 1.21e+03 ms within 7 rounds",)


def test_the_truth_of_all_runs_is_covered_though_each_run_has_a_shift_of_its_own() -> None:
    rng, truth, trials = np.random.default_rng(0), 0.9, 3000
    hits = {0.05: 0, None: 0}
    for _ in range(trials):
        run = geometric_mean_t(truth * np.exp(rng.normal(0, 0.05) + rng.normal(0, 0.05, 5)), confidence=0.95)
        for between in hits:
            widened = whole_runs(run, between, confidence=0.95)
            hits[between] += bool(widened.low < truth < widened.high)  # type: ignore[operator]
    assert hits[0.05] / trials > 0.94, "a little more than promised: t of few rounds and a known spread together"
    assert hits[None] / trials < 0.90


def test_parts_are_added_by_their_squares_on_the_log_scale() -> None:
    widened = whole_runs(ONE, 0.05, confidence=0.95)
    assert np.log(widened.value / widened.low) == pytest.approx(np.hypot(np.log(0.9 / 0.88), 1.959964 * 0.05))  # type: ignore[operator]
    assert widened.value == 0.9 and widened.between == 0.05 and "5 % between whole runs" in widened.method
    same = whole_runs(ONE, 0.0, confidence=0.95)
    assert (same.low, same.high) == (pytest.approx(0.88), pytest.approx(0.92)), "none at all changes nothing"


def test_unknown_variation_is_a_warning_and_without_an_interval_there_is_nothing_to_widen() -> None:
    unknown = whole_runs(ONE, None, confidence=0.95)
    assert (unknown.low, unknown.high, unknown.between) == (0.88, 0.92, None) and "is not known" in unknown.method
    for bare in (Estimate(None, None, None, 0, ""), Estimate(0.9, None, None, 1, "")):
        assert whole_runs(bare, 0.05, confidence=0.95) == bare
    limit = whole_runs(Estimate(2.0, 0.0, 5.0, 3, ""), 0.1, confidence=0.95)
    assert limit.low == 0.0 and limit.high is not None and limit.high > 5.0, "a limit at zero stays there"


def test_more_rounds_settle_only_what_rounds_leave_open_and_the_verdict_says_so() -> None:
    own = Estimate(0.95, 0.70, 1.29, 5, "")
    wide = whole_runs(own, 0.01, confidence=0.95)
    assert (items_to_settle(wide, 0.9) or 0) > (items_to_settle(own, 0.9) or np.inf), "a part stays"
    assert items_to_settle(whole_runs(wide, 0.05, confidence=0.95), 0.9) is None, "whole runs differ by more than is left"
    run = whole_runs(Estimate(0.93, 0.91, 0.95, 5, ""), 0.05, confidence=0.95)
    metric: Any = {"value": run.value, "low": run.low, "high": run.high, "n": 5, **alone(), "between": 0.05}
    judgement = judge(Bound("speed_ratio", 0.9, "higher", "loss at most 10 %"), metric)
    assert judgement.verdict == "INCONCLUSIVE" and judgement.settle is None
    assert "whole runs differ by 5 % (compare.between_runs)" in judgement.reason
