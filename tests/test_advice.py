"""The advice: made from the figures, never more sure than they are, and never a PASS from nothing."""

from __future__ import annotations

from typing import Any

import pytest
from reported import MACHINE, around, judged, metric, result, rule, verdicts

from pipeline.core.options import nominal_bits
from pipeline.reporting import pareto, recommendation, text

PASS = judged("PASS", rule("kld_mean", "PASS"))
FAIL = judged("FAIL", rule("kld_mean", "FAIL"), rule("acc_delta/all", "PASS"))


def house(**speeds: tuple[float, float, float]) -> dict[str, dict[str, Any]]:
    """{variant: (speed, KLD, MB)} beside the reference."""
    found = {"bf16": result("bf16", 1.0, 0.0, 269)}
    return found | {n.replace("_", "-"): result(n.replace("_", "-"), *v) for n, v in speeds.items()}


def test_the_fastest_variant_that_passes_is_advised_and_not_a_faster_one_that_fails() -> None:
    results = house(int8=(2.0, 0.006, 143), int8_slow=(0.9, 0.005, 164), int4_fast=(6.0, 0.3, 90))
    said = recommendation.advice(results, verdicts(int8=PASS, int8_slow=PASS, int4_fast=FAIL), "bf16")["serve"]
    assert said.startswith("int8 is the fastest of 2 variants that pass every required rule: 2 [1.96, 2.04] times bf16's")
    assert "143 MB (47 % smaller than bf16)" in said and "KLD 0.006 [0.00588, 0.00612] nats" in said


def test_the_ladder_goes_down_by_bits_and_says_gain_cost_and_verdict_of_each_step() -> None:
    results = house(int8=(2.0, 0.006, 143), int4=(3.0, 0.3, 90))
    ladder = recommendation.advice(results, verdicts(int8=PASS, int4=FAIL), "bf16")["ladder"]
    assert [step.split(":")[0] for step in ladder] == ["bf16 (16 bits) → int8 (8 bits)", "int8 (8 bits) → int4 (4 bits)"]
    assert "1.5 [1.44, 1.56] times as fast, 90 MB (37 % smaller than int8)" in ladder[1]
    assert "KLD 0.006 to 0.3 [0.294, 0.306] nats" in ladder[1] and ladder[1].endswith("FAIL: kld_mean 0.1 nats (at most 0.02).")


def test_a_rung_stands_by_what_passes_before_what_is_fast() -> None:
    results = house(int8=(5.0, 0.1, 143), int8_slow=(0.9, 0.005, 164))
    ladder = recommendation.advice(results, verdicts(int8=FAIL, int8_slow=PASS), "bf16")["ladder"]
    assert "→ int8-slow (8 bits)" in ladder[0]


@pytest.mark.parametrize("verdict", ["FAIL", "INCONCLUSIVE", "UNSUPPORTED"])
def test_if_nothing_passes_nothing_is_advised_and_the_nearest_is_named(verdict: str) -> None:
    results = house(int8=(2.0, 0.1, 143))
    rules = () if verdict == "UNSUPPORTED" else (rule("kld_mean", verdict),)
    said = recommendation.advice(results, verdicts(int8=judged(verdict, *rules)), "bf16")["serve"]
    assert said.startswith("No variant passes every required rule") and ("nearest" in said) == bool(rules)


def test_a_variant_that_passes_without_a_speed_is_not_called_the_fastest() -> None:
    results = house(int8=(2.0, 0.1, 143))
    results["int8"]["metrics"]["speed_ratio"] = metric(None)
    said = recommendation.advice(results, verdicts(int8=PASS), "bf16")["serve"]
    assert said == "int8 pass every required rule; how fast they are is unknown."


def test_overlapping_speeds_are_not_ranked() -> None:
    results = house(int8=(2.0, 0.006, 143), int8_slow=(1.99, 0.006, 164))
    said = recommendation.advice(results, verdicts(int8=PASS, int8_slow=PASS), "bf16")["serve"]
    assert "that it is faster than int8-slow is not settled" in said


def test_speeds_of_two_machines_are_not_compared() -> None:
    results = house(int8=(2.0, 0.006, 143), int4=(3.0, 0.3, 90))
    results["int4"]["machine"] = MACHINE | {"cpu": "Another"}
    told = recommendation.advice(results, verdicts(int8=PASS, int4=PASS), "bf16")
    assert "timed on different machines" in told["serve"] and "speed not compared" in told["ladder"][1]
    assert pareto.dominated(results, "bf16") == {}


def test_what_is_not_settled_is_told_with_the_sample_that_would_settle_it() -> None:
    own = {"unit": "pp", "threshold": -2.0, "better": "higher", "value": -1.5, "low": -4, "high": 1, "settle": 2184, "n": 696}
    open_ = rule("acc_delta/all", "INCONCLUSIVE", **own)
    told = recommendation.advice(house(int8=(2.0, 0.006, 143)), verdicts(int8=judged("INCONCLUSIVE", open_)), "bf16")["open"]
    assert told == ["int8: acc_delta/all -1.5 [-4, +1] pp (at least -2); about 2184 items in place of 696 would settle it"]


def test_an_advisory_verdict_is_said_to_hold_no_merge() -> None:
    told = recommendation.advice(house(int8=(2.0, 0.006, 143)), verdicts(int8=PASS | {"required": False}), "bf16")
    assert "its verdict is advisory: add int8 to gate.required" in told["serve"]


@pytest.mark.parametrize(
    "options, bits",
    [({"dtype": "bfloat16"}, 16), ({"scheme": "int8-weight-only"}, 8), ({"type": "nf4"}, 4), ({"type": "Q4_K_M"}, 4),
     ({"type": "Q8_0"}, 8), ({"precision": "int4"}, 4), ({"bits": 3, "group_size": 64}, 3), ({"dtype": "float32"}, 32),
     ({"group_size": 64}, None), ({}, None)],
)  # fmt: skip
def test_nominal_bits_are_those_the_options_name(options: dict[str, Any], bits: int | None) -> None:
    assert nominal_bits(options) == bits


# --- who is dominated --------------------------------------------------------------------------------------------


def test_a_variant_is_dominated_only_by_one_that_is_surely_faster_surely_nearer_and_no_larger() -> None:
    base = house(int4=(1.0, 0.3, 100), int8=(2.0, 0.1, 90))
    assert pareto.dominated(base, "bf16")["int4"].sure and pareto.dominated(base, "bf16")["int4"].by == "int8"
    for change in ({"speed_ratio": around(2.0, 0.6)}, {"kld_mean": around(0.1, 2.5)}):
        results = house(int4=(1.0, 0.3, 100), int8=(2.0, 0.1, 90))
        results["int8"]["metrics"] |= change
        assert not pareto.dominated(results, "bf16")["int4"].sure, change
    larger = house(int4=(1.0, 0.3, 100), int8=(2.0, 0.1, 101))
    assert "int4" not in pareto.dominated(larger, "bf16")


def test_a_figure_without_an_interval_dominates_nothing_surely() -> None:
    results = house(int4=(1.0, 0.3, 100), int8=(2.0, 0.1, 90))
    results["int8"]["metrics"]["kld_mean"] |= {"low": None, "high": None}
    assert not pareto.dominated(results, "bf16")["int4"].sure


def test_below_the_floor_s_limit_two_variants_are_equally_near() -> None:
    results = house(int8=(0.5, 0.001, 300))
    assert "int8" in pareto.dominated(results, "bf16")  # no floor known: the reference is nearer
    results["bf16"]["metrics"] |= {"kld_floor": around(0.002)}
    found = pareto.dominated(results, "bf16")["int8"]
    assert found.sure and "both floor-limited" in found.words


def test_two_equal_variants_do_not_dominate_each_other_and_the_reference_is_never_dominated() -> None:
    results = house(int8=(2.0, 0.1, 90), int8_slow=(2.0, 0.1, 90), int4=(9.0, 0.0, 10))
    assert not {"int8", "int8-slow"} & {d.by for d in pareto.dominated(results, "bf16").values()}
    assert "bf16" not in pareto.dominated(results, "bf16")


def test_the_front_has_every_variant_that_no_other_beats_in_both_by_value() -> None:
    results = house(int8=(4.0, 0.006, 143), int8_slow=(0.5, 0.02, 1), int4=(6.0, 0.3, 90), int4_fast=(5.9, 0.31, 1))
    assert pareto.front(results) == ["int4", "int8", "bf16"]


# --- a verdict in brief ------------------------------------------------------------------------------------------


def test_a_verdict_in_brief_names_only_the_rules_that_decided_it() -> None:
    many = judged(
        "FAIL", rule("kld_mean", "FAIL"), rule("top1_agreement", "INCONCLUSIVE"), rule("speed_ratio", "FAIL", required=False),
        rule("size_ratio", "FAIL", unit="ratio", threshold=0.7, value=2.0),
    )  # fmt: skip
    assert text.brief(many) == "kld_mean 0.1 nats (at most 0.02), size_ratio 2 × (at most 0.7)"


def test_a_figure_near_its_bound_is_not_rounded_into_it() -> None:
    near = rule("ppl_ratio", "PASS", value=1.00545, low=0.99996, high=1.01098, threshold=1.02, unit="ratio")
    assert text.judged_figure(near) == "1.005 [1, 1.011] ×"
    past = rule("kld_mean", "FAIL", value=0.020004, low=0.020001, high=0.020007)
    assert text.brief(judged("FAIL", past)) == "kld_mean 0.020004 nats (at most 0.02)"


def test_a_rule_without_a_value_is_unknown_in_brief_and_a_variant_without_rules_keeps_its_reason() -> None:
    assert (
        text.brief(judged("FAIL", rule("kld_mean", "FAIL", value=None, low=None, high=None))) == "kld_mean unknown (at most 0.02)"
    )
    assert text.brief(judged("UNSUPPORTED", reason="no kernel")) == "no kernel"
    assert len(text.brief(judged("FAIL", reason="x" * 1000))) < 200


def test_an_unsettled_rule_in_brief_has_interval_and_sample() -> None:
    said = text.brief(judged("INCONCLUSIVE", rule("kld_mean", "INCONCLUSIVE", settle=9000)))
    assert said == "kld_mean 0.1 [0.09, 0.11] nats (at most 0.02; about 9000 tokens in place of 4914 would settle it)"


def test_what_failed_or_is_unknown_is_listed_with_its_reason() -> None:
    results = house(int8=(2.0, 0.1, 143))
    results["int4"] = {"status": "unsupported", "reason": "no kernel here", "metrics": {}}
    results["int8"]["metrics"] |= {"ppl": metric(None) | {"reason": "no texts"}, "failure_rate": around(0.4, n=5)}
    said = text.unmeasured(results)
    assert "int4: unsupported: no kernel here" in said and "int8: no value for ppl: no texts" in said
    assert any("of 5 requests failed" in line for line in said) and not any("bf16" in line for line in said)
