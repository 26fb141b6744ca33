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
    assert f"- ttft_ms {written} ms, n = 9: PASS" in variant_note(judged("PASS", ttft))
    assert or_why(metric(None) | {"warnings": ["why"]}) == "unknown (why)" and with_unit(metric(0.0, unit="ms")) == "0 ms"
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
    assert text.brief(many) == "KLD 0.1 nats (at most 0.02), size 2 × (at most 0.7)"


def test_a_value_near_its_bound_is_not_rounded_into_it() -> None:
    near = rule("ppl_ratio", "PASS", value=1.00545, low=0.99996, high=1.01098, threshold=1.02, unit="ratio")
    assert text.judged_value(near) == "1.005 [1, 1.011] ×"
    past = rule("kld_mean", "FAIL", value=0.020004, low=0.020001, high=0.020007)
    assert text.brief(judged("FAIL", past)) == "KLD 0.020004 nats (at most 0.02)"


def test_a_rule_without_a_value_is_unknown_in_brief_and_a_variant_without_rules_keeps_its_reason() -> None:
    unknown = rule("kld_mean", "FAIL", value=None, low=None, high=None)
    assert text.brief(judged("FAIL", unknown)) == "KLD unknown (at most 0.02)"
    assert text.brief(judged("UNSUPPORTED", reason="no kernel")) == "no kernel"
    assert len(text.brief(judged("FAIL", reason="x" * 1000))) < 200


def test_an_unsettled_rule_in_brief_has_interval_and_sample() -> None:
    brief = text.brief(judged("INCONCLUSIVE", rule("kld_mean", "INCONCLUSIVE", settle=9000)))
    assert brief == "KLD 0.1 [0.09, 0.11] nats (at most 0.02; about 9000 tokens in place of 4914 would settle it)"


def test_a_failed_advisory_rule_stands_beside_a_pass() -> None:
    ratio: dict[str, Any] = {"unit": "ratio", "better": "higher", "threshold": 0.9, "value": 0.836, "low": 0.8, "high": 0.87}
    failed = rule("speed_ratio", "FAIL", required=False, **ratio)
    assert text.aside(judged("PASS", failed)) == "advisory, fails: decode rate 0.836 × (at least 0.9)"
    assert text.aside(judged("PASS", failed | {"required": True}, failed | {"verdict": "PASS"})) == ""


def test_what_failed_or_is_unknown_is_listed_with_its_reason() -> None:
    unsupported = result("int4", 2.0, 0.1, 143, status="unsupported", reason="no kernel", metrics={})
    results = {"int8": result("int8", 2.0, 0.1, 143), "int4": unsupported}
    results["int8"]["metrics"] |= {"ppl": metric(None) | {"warnings": ["no texts"]}, "failure_rate": around(0.4, n=5)}
    lines = text.unmeasured(results)
    assert "int4: unsupported: no kernel" in lines and "int8: no value for ppl: no texts" in lines
    results["int4"]["metrics"] = {k: metric(None) | {"warnings": ["no texts"]} for k in ("ppl", "acc/a", "acc/b")}
    results["int8"]["metrics"] |= {k: metric(None) | {"warnings": ["no texts"]} for k in ("acc/a", "acc/b")}
    assert "int8, int4: no value for ppl, acc/(a, b): no texts" in text.unmeasured(results), "one line for both"
    assert any("of 5 requests failed" in line for line in lines) and len(lines) == 3


def test_what_bounds_a_phase_is_a_share_a_short_sentence_and_the_rest_at_a_second_look() -> None:
    decode = {"decode": "decode is overhead-bound: it reads 1 MB", "against": "int8 is slower: why"}
    variant = result("int8", 2.0, 0.1, 143, bounds=decode | {"rates": "of the machine", "cliffs": []})
    (unknown,) = text.bounds(variant)
    assert (unknown.words, unknown.memory) == ("decode is overhead-bound", None)
    assert unknown.full == "decode is overhead-bound: it reads 1 MB; int8 is slower: why"
    variant["metrics"] |= {"mbu": metric(0.4), "mfu/decode": metric(0.01)}
    assert [(b.memory, b.arithmetic) for b in text.bounds(variant)] == [(40.0, 1.0)]


def test_warnings_and_cliffs_are_said_once_with_their_variants_and_the_range_of_their_numbers() -> None:
    results = {name: result(name, 2.0, 0.1, 143, bounds={"cliffs": ["a cliff: one"]}) for name in ("int8", "int4")}
    for name, ms in (("int8", "22.7"), ("int4", "9.5")):
        results[name]["metrics"]["speed_ratio"]["warnings"] = [f"it went from {ms} to 40 ms in int8", "measured once: no interval"]
    assert text.cautions(results) == ["it went from 9.5–22.7 to 40 ms in int8: int8, int4", "a cliff: one: int8, int4"]
    assert text.grouped([("3 {odd} rows", "a/x"), ("5 {odd} rows", "a/y")]) == ["3–5 {odd} rows: a/(x, y)"]
    few = ["12 values are few for the 0.5 quantile", "12 values are few for the 0.99 quantile"]
    assert len(text.grouped((line, "x") for line in few)) == 2, "another quantile is another warning"


def test_the_second_look_has_n_interval_and_method_or_why_there_is_none() -> None:
    value = metric(0.25, 0.2, 0.3, n=7, unit="fraction") | {"method": "Wilson", "confidence": 0.9, "warnings": ["few"]}
    assert text.about(value) == "25 %, n = 7; 90 % interval [20, 30]; Wilson; few"
    assert text.about(metric(3.0, n=1, unit="ms")) == "3 ms, n = 1; no interval"
    assert text.about(metric(3.0, 3.0, 3.0, n=1, unit="ms")) == "3 ms, n = 1; exact"
    assert text.about(metric(None) | {"warnings": ["no wheel"]}) == "unknown: no wheel" and text.about(None) == "not measured"


def test_decode_against_the_own_engine_s_16_bits_is_a_quotient_with_the_outer_interval() -> None:
    results = {"bf16": result("bf16", 1.0, 0.0, 269), "int8": result("int8", 2.0, 0.1, 143)}
    for name, bits, speed in (("f16", 16, 3.0), ("q8", 8, 6.0)):
        results[name] = result(name, speed, 0.01, 143, engine="llamacpp", options={"type": f"F{bits}"})
    results["alone"] = result("alone", 6.0, 0.01, 143, engine="onnxruntime")
    ratio = text.own_ratio(results, "q8")
    assert ratio is not None and ratio["value"] == pytest.approx(2.0)
    assert (ratio["low"], ratio["high"]) == (pytest.approx(5.88 / 3.06), pytest.approx(6.12 / 2.94))
    assert text.own_ratio(results, "int8") == results["int8"]["metrics"]["speed_ratio"], "the reference is its engine's own"
    assert [text.own_ratio(results, name) for name in ("bf16", "f16", "alone")] == [None, None, None]


def test_a_variant_that_fails_by_its_size_alone_says_so() -> None:
    size = rule("size_ratio", "FAIL", **metric(1.0, 1.0, 1.0), bound="gain 30 %")
    kld = rule("kld_mean", "FAIL", **metric(0.3, 0.2, 0.4), bound="margin 0.02 nats")
    advisory = {**judged("FAIL", size), "required": False}
    assert text.verdict_word(judged("FAIL", size)) == "FAIL on size" and text.verdict_word(advisory) == "FAIL on size (advisory)"
    assert text.verdict_word(judged("FAIL", size, kld)) == "FAIL"
