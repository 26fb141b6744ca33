"""A value, a verdict and a reason are written in one way: in the report, in a comment, in MLflow."""

from __future__ import annotations

from typing import Any

import pytest
from reported import around, judged, metric, result, rule

from pipeline.gating.rules import UNITS
from pipeline.metrics.definitions import DEFINITIONS
from pipeline.reporting import text
from pipeline.reporting.text import difference, digits_apart, number, or_why, show, with_unit
from pipeline.tracking.runs import variant_note


@pytest.mark.parametrize(
    "value, written", [(1234.5, "1234"), (0.00012345, "0.000123"), (0.0, "0"), (-0.0, "0"), (1e7, "1e+07"), (-12345.0, "-12345")]
)
def test_numbers_people_read_have_no_exponent_and_zero_no_sign(value: float, written: str) -> None:
    assert number(value) == written


def test_an_interval_of_no_width_or_with_an_unknown_end_is_not_written() -> None:
    assert show(metric(1.0, 1.0, 1.0)) == show(metric(1.0)) == show(metric(1.0, 0.5, None)) == "1"
    assert show(None) == show(metric(None)) == "–" and show(metric(1.0, -1.0, 2.0), sign=True) == "+1 [-1, +2]"


@pytest.mark.parametrize(
    "values, digits", [([1.005, 0.99996, 1.011, 1.02], 4), ([0.1, 0.2], 3), ([0.95, 0.95], 3), ([1.0, 1.0 + 1e-12], 8)]
)
def test_a_value_has_the_digits_that_tell_it_from_what_it_is_judged_by(values: list[float], digits: int) -> None:
    assert digits_apart(values) == digits


def test_report_floor_comment_and_mlflow_write_the_same_value_alike() -> None:
    ms, written = metric(1234.0, 1100.0, 1300.0, n=9, unit="ms"), "1234 [1100, 1300]"
    assert with_unit(ms) == f"{written} ms" and or_why(ms) == written
    ttft = rule("ttft_ms", "PASS", **ms, bound="limit 2 s")
    assert f"- ttft_ms {written} ms, n = 9: PASS" in variant_note("x", {"variants": {"x": {"rules": [ttft]}}}, "bf16")
    assert or_why(metric(None) | {"reason": "why"}) == "unknown (why)" and with_unit(metric(0.0, unit="ms")) == "0 ms"
    share = metric(0.25, 0.2, 0.3, unit="fraction")
    assert (with_unit(share), with_unit(share, sign=True)) == ("25 [20, 30] %", "+25 [+20, +30] pp")


def test_every_unit_has_one_entry_for_the_page_the_gate_and_the_power_lines() -> None:
    assert {d.unit for d in DEFINITIONS.values()} == text.UNITS.keys() == UNITS.keys()
    units = {unit: difference(unit) for unit in ("pp", "fraction", "ratio", "nats")}
    assert units == {"pp": (1.0, "pp"), "fraction": (100.0, "pp"), "ratio": (100.0, "%"), "nats": (1.0, "nats")}


# --- a verdict in brief ------------------------------------------------------------------------------------------


def test_a_verdict_in_brief_names_only_the_rules_that_decided_it() -> None:
    many = judged(
        "FAIL", rule("kld_mean", "FAIL"), rule("top1_agreement", "INCONCLUSIVE"), rule("speed_ratio", "FAIL", required=False),
        rule("size_ratio", "FAIL", unit="ratio", threshold=0.7, value=2.0),
    )  # fmt: skip
    assert text.brief(many) == "kld_mean 0.1 nats (at most 0.02), size_ratio 2 × (at most 0.7)"


def test_a_value_near_its_bound_is_not_rounded_into_it() -> None:
    near = rule("ppl_ratio", "PASS", value=1.00545, low=0.99996, high=1.01098, threshold=1.02, unit="ratio")
    assert text.judged_value(near) == "1.005 [1, 1.011] ×"
    past = rule("kld_mean", "FAIL", value=0.020004, low=0.020001, high=0.020007)
    assert text.brief(judged("FAIL", past)) == "kld_mean 0.020004 nats (at most 0.02)"


def test_a_rule_without_a_value_is_unknown_in_brief_and_a_variant_without_rules_keeps_its_reason() -> None:
    unknown = rule("kld_mean", "FAIL", value=None, low=None, high=None)
    assert text.brief(judged("FAIL", unknown)) == "kld_mean unknown (at most 0.02)"
    assert text.brief(judged("UNSUPPORTED", reason="no kernel")) == "no kernel"
    assert len(text.brief(judged("FAIL", reason="x" * 1000))) < 200


def test_an_unsettled_rule_in_brief_has_interval_and_sample() -> None:
    brief = text.brief(judged("INCONCLUSIVE", rule("kld_mean", "INCONCLUSIVE", settle=9000)))
    assert brief == "kld_mean 0.1 [0.09, 0.11] nats (at most 0.02; about 9000 tokens in place of 4914 would settle it)"


def test_a_failed_advisory_rule_stands_beside_a_pass() -> None:
    ratio: dict[str, Any] = {"unit": "ratio", "better": "higher", "threshold": 0.9, "value": 0.836, "low": 0.8, "high": 0.87}
    failed = rule("speed_ratio", "FAIL", required=False, **ratio)
    assert text.aside(judged("PASS", failed)) == "advisory, fails: speed_ratio 0.836 × (at least 0.9)"
    assert text.aside(judged("PASS", failed | {"required": True}, failed | {"verdict": "PASS"})) == ""


def test_what_failed_or_is_unknown_is_listed_with_its_reason() -> None:
    results = {
        "int8": result("int8", 2.0, 0.1, 143),
        "int4": result("int4", 2.0, 0.1, 143, status="unsupported", reason="no kernel"),
    }
    results["int4"]["metrics"] = {}
    results["int8"]["metrics"] |= {"ppl": metric(None) | {"reason": "no texts"}, "failure_rate": around(0.4, n=5)}
    lines = text.unmeasured(results)
    assert "int4: unsupported: no kernel" in lines and "int8: no value for ppl: no texts" in lines
    assert any("of 5 requests failed" in line for line in lines) and len(lines) == 3


def test_sentences_of_several_cliffs_and_of_a_ratio_s_warnings_are_one_list() -> None:
    bounds = {"cliffs": ["a cliff: one", "a cliff: two"], "decode": "decode is overhead-bound", "rates": ""}
    variant = result("int8", 2.0, 0.1, 143, bounds=bounds)
    variant["metrics"]["speed_ratio"]["warnings"] = ["the machine drifted"]
    assert text.speed_bounds(variant) == ["a cliff: one", "a cliff: two", "decode is overhead-bound", "the machine drifted"]
