"""The advice: made from the metrics, never more sure than they are, and never a PASS from nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
from gate_house import MACHINE
from reported import around, judged, metric, result, rule, verdicts

from pipeline.core.explain import nominal_bits
from pipeline.reporting import recommendation
from pipeline.reporting.recommendation import Advice, dominated

PASS = judged("PASS", rule("kld_mean", "PASS"))
FAIL = judged("FAIL", rule("kld_mean", "FAIL"), rule("acc_delta/all", "PASS"))


def house(**speeds: tuple[float, float, float]) -> dict[str, dict[str, Any]]:
    """{variant: (speed, KLD, MB)} beside the reference."""
    names = {name.replace("_", "-"): values for name, values in speeds.items()}
    return {"bf16": result("bf16", 1.0, 0.0, 269)} | {n: result(n, *values) for n, values in names.items()}


def advice(results: dict[str, dict[str, Any]], **judged: dict[str, Any]) -> Advice:
    return recommendation.advice(results, verdicts(**judged), "bf16")


def test_the_fastest_variant_that_passes_is_advised_and_not_a_faster_one_that_fails() -> None:
    results = house(int8=(2.0, 0.006, 143), int8_slow=(0.9, 0.005, 164), int4_fast=(6.0, 0.3, 90))
    advised = advice(results, int8=PASS, int8_slow=PASS, int4_fast=FAIL)
    assert advised.serve.startswith("Ship int8: 2 [1.96, 2.04] times bf16's decode rate, 143 MB (47 % smaller than bf16)")
    assert "KLD 0.006 [0.00588, 0.00612] nats" in advised.serve
    assert advised.command is not None and advised.command.startswith("quantgate track --promote int8 ")
    assert any(re.fullmatch(r"\S+ is the fastest of the 2 that pass every required rule \(.*\)\.", note) for note in advised.notes)
    assert any("accuracy -0.5 [-1, +0.1] pp" in note for note in advised.notes), "what it loses"


def test_why_fewer_bits_do_not_pass_is_one_line_of_the_variant_nearest_to_the_reference() -> None:
    results = house(int8=(2.0, 0.006, 143), int4_fast=(6.0, 0.4, 90), int4=(3.0, 0.3, 90))
    advised = advice(results, int8=PASS, int4_fast=FAIL, int4=FAIL)
    assert advised.breaks == "Of 4 bits int4 comes nearest: KLD 0.1 nats (at most 0.02)."
    assert advised.answer == "4 bits: no, none of 2 variants passes. 8 bits: yes, int8."
    assert advice(house(int8=(2.0, 0.006, 143)), int8=PASS).breaks is None


def test_the_ladder_goes_down_by_bits_and_says_gain_cost_and_verdict_of_each_step() -> None:
    ladder = advice(house(int8=(2.0, 0.006, 143), int4=(3.0, 0.3, 90)), int8=PASS, int4=FAIL).ladder
    assert [step.split(":")[0] for step in ladder] == ["bf16 (16 bits) → int8 (8 bits)", "int8 (8 bits) → int4 (4 bits)"]
    assert "1.5 [1.44, 1.56] times as fast, 90 MB (37 % smaller than int8)" in ladder[1]
    assert "KLD 0.006 to 0.3 [0.294, 0.306] nats" in ladder[1] and ladder[1].endswith("FAIL: KLD 0.1 nats (at most 0.02).")


def test_a_rung_stands_by_what_passes_before_what_is_fast() -> None:
    ladder = advice(house(int8=(5.0, 0.1, 143), int8_slow=(0.9, 0.005, 164)), int8=FAIL, int8_slow=PASS).ladder
    assert "→ int8-slow (8 bits)" in ladder[0]


@pytest.mark.parametrize("verdict", ["FAIL", "INCONCLUSIVE", "UNSUPPORTED"])
def test_if_nothing_passes_nothing_is_advised_and_the_nearest_is_named(verdict: str) -> None:
    rules = () if verdict == "UNSUPPORTED" else (rule("kld_mean", verdict),)
    advised = advice(house(int8=(2.0, 0.1, 143)), int8=judged(verdict, *rules))
    assert advised.command is None and advised.serve.startswith("No variant passes every required rule")
    assert ("nearest" in advised.serve) == bool(rules)


def test_a_variant_that_passes_without_a_speed_is_not_called_the_fastest() -> None:
    results = house(int8=(2.0, 0.1, 143))
    results["int8"]["metrics"]["speed_ratio"] = metric(None)
    assert advice(results, int8=PASS).serve == "int8 pass every required rule; how fast they are is unknown."


def test_overlapping_speeds_are_not_ranked() -> None:
    notes = advice(house(int8=(2.0, 0.006, 143), int8_slow=(1.99, 0.006, 164)), int8=PASS, int8_slow=PASS).notes
    assert any(note.startswith("That it is faster than int8-slow is not settled") for note in notes)


def test_speeds_of_two_machines_are_not_compared() -> None:
    results = house(int8=(2.0, 0.006, 143), int4=(3.0, 0.3, 90))
    results["int4"]["machine"] = MACHINE | {"cpu": "Another"}
    advised = advice(results, int8=PASS, int4=PASS)
    assert "timed on different machines" in advised.serve and "speed not compared" in advised.ladder[1]
    assert dominated(results, "bf16") == {}


def test_what_is_not_settled_has_the_sample_that_would_settle_it() -> None:
    values = {"unit": "pp", "threshold": -2.0, "better": "higher", "value": -1.5, "low": -4, "high": 1, "settle": 2184, "n": 696}
    unsure = judged("INCONCLUSIVE", rule("acc_delta/all", "INCONCLUSIVE", **values))
    lines = advice(house(int8=(2.0, 0.006, 143)), int8=unsure).open
    assert lines == ["int8: acc_delta/all -1.5 [-4, +1] pp (at least -2); about 2184 items in place of 696 would settle it"]


def test_an_advisory_verdict_is_said_to_hold_no_merge() -> None:
    notes = advice(house(int8=(2.0, 0.006, 143)), int8=PASS | {"required": False}).notes
    assert any(note.startswith("Its verdict is advisory: add int8 to gate.required") for note in notes)


@pytest.mark.parametrize(
    "options, bits",
    [({"dtype": "bfloat16"}, 16), ({"scheme": "int8-weight-only"}, 8), ({"type": "nf4"}, 4), ({"type": "Q4_K_M"}, 4),
     ({"type": "Q8_0"}, 8), ({"precision": "int4"}, 4), ({"bits": 3, "group_size": 64}, 3), ({"dtype": "float32"}, 32),
     ({"group_size": 64}, None), ({}, None)],
)  # fmt: skip
def test_nominal_bits_are_those_the_options_name(options: dict[str, Any], bits: int | None) -> None:
    assert nominal_bits(options) == bits


# --- who is dominated --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change, sure", [
    ({}, True), ({"speed_ratio": around(2.0, 0.6)}, False), ({"kld_mean": around(0.1, 2.5)}, False),
    ({"kld_mean": metric(0.1)}, False), ({"weight_bytes": metric(101e6)}, None),
])  # fmt: skip
def test_a_variant_is_dominated_only_by_one_that_is_surely_faster_surely_nearer_and_no_larger(
    change: dict[str, Any], sure: bool | None
) -> None:
    results = house(int4=(1.0, 0.3, 100), int8=(2.0, 0.1, 90))
    results["int8"]["metrics"] |= change
    behind = dominated(results, "bf16").get("int4")
    assert (behind and (behind.by, behind.sure)) == (None if sure is None else ("int8", sure))


def test_below_the_floor_s_limit_two_variants_are_equally_near() -> None:
    results = house(int8=(0.5, 0.001, 300))
    assert "int8" in dominated(results, "bf16")  # no floor known: the reference is nearer
    results["bf16"]["metrics"] |= {"kld_floor": around(0.002)}
    behind = dominated(results, "bf16")["int8"]
    assert behind.sure and "both floor-limited" in behind.words


def test_two_equal_variants_do_not_dominate_each_other_and_the_reference_is_never_dominated() -> None:
    behind = dominated(house(int8=(2.0, 0.1, 90), int8_slow=(2.0, 0.1, 90), int4=(9.0, 0.0, 10)), "bf16")
    assert not {"int8", "int8-slow"} & {d.by for d in behind.values()} and "bf16" not in behind


def test_the_front_has_every_variant_that_no_other_beats_in_both_by_value() -> None:
    results = house(int8=(4.0, 0.006, 143), int8_slow=(0.5, 0.02, 1), int4=(6.0, 0.3, 90), int4_fast=(5.9, 0.31, 1))
    assert recommendation.front(results) == ["int4", "int8", "bf16"]
