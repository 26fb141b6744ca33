"""When rounds are enough: looks planned from rules, an interval that holds the bound, and the promise kept all the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.core import params
from pipeline.core.params import Compare, Requests, Rule
from pipeline.gating.rules import looks_of
from pipeline.speed import rounds
from pipeline.speed.rounds import Looks
from pipeline.stats.intervals import geometric_mean_t

ROOT = Path(__file__).resolve().parent.parent


def rows(ratios: Any) -> list[dict[str, Any]]:
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


def test_rounds_are_unsettled_while_the_interval_holds_a_bound() -> None:
    near, far = [0.88, 0.93, 0.90, 0.91, 0.89], [0.70, 0.71, 0.69, 0.70, 0.70]
    looks = Looks(2, (0.9,))
    assert looks.unsettled(rows(near), 0.95) and not looks.unsettled(rows(far), 0.95)
    assert looks.unsettled(rows([]), 0.95), "no rounds settle nothing"
    assert Looks(2, (0.9, 0.7)).unsettled(rows(far), 0.95)


def test_no_more_rounds_are_taken_where_whole_runs_differ_by_more_than_is_left_to_the_bound() -> None:
    near, farther = [0.88, 0.93, 0.90, 0.91, 0.89], [0.60, 0.80, 0.72, 0.85, 0.69]
    assert not Looks(2, (0.9,), between=0.05).unsettled(rows(near), 0.95), "its interval holds the bound, and always would"
    assert Looks(2, (0.9,), between=0.05).unsettled(rows(farther), 0.95), "its own rounds leave it open"
    assert Looks(2, (0.9,), between=0.0).unsettled(rows(near), 0.95)


def test_looking_twice_keeps_the_promised_coverage() -> None:
    """The worst case for a stopping rule: the truth is the bound itself, so that going on is likeliest when it is covered."""
    rng = np.random.default_rng(0)
    looks, missed, trials = Looks(2, (1.0,)), 0, 4000
    for _ in range(trials):
        ratios = np.exp(rng.normal(0.0, 0.05, 10))
        first = rows(ratios[:5])
        seen = rows(ratios) if looks.unsettled(first, 0.95) else first
        found = geometric_mean_t(rounds.decode_ratios(seen), confidence=looks.level(0.95))
        missed += not found.low < 1.0 < found.high  # type: ignore[operator]
    assert missed / trials < 0.05 + 2 * np.sqrt(0.05 * 0.95 / trials)


def test_drift_needs_three_rounds() -> None:
    two = rows([1.0, 1.05])
    found = rounds.drift(two, confidence=0.95)
    assert found.value is None and "fewer than three" in found.warnings[0] and rounds.drift_in_words(found, two) == ()


def test_a_step_of_the_machine_without_a_trend_is_said_too() -> None:
    stepped = rows([1.0, 1.2, 1.0, 1.21, 1.0, 1.19, 1.0])
    told = rounds.drift_in_words(rounds.drift(stepped, confidence=0.95), stepped)
    assert told == ("the machine was not steady: the reference's time per token went from 1e+03 to 1.21e+03 ms within 7 rounds",)
