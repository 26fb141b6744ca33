"""A figure is written in one way: in the report, in a comment, in MLflow."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.reporting.text import digits_apart, known, number, show, with_unit
from pipeline.tracking.views import variant_note


def figure(value: float | None, low: float | None = None, high: float | None = None, **more: Any) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, **more}


@pytest.mark.parametrize(
    "value, text", [(1234.5, "1234"), (0.00012345, "0.000123"), (0.0, "0"), (-0.0, "0"), (1e7, "1e+07"), (-12345.0, "-12345")]
)
def test_numbers_people_read_have_no_exponent_and_zero_no_sign(value: float, text: str) -> None:
    assert number(value) == text


def test_an_interval_of_no_width_or_with_an_unknown_end_is_not_shown() -> None:
    assert show(figure(1.0, 1.0, 1.0)) == show(figure(1.0)) == show(figure(1.0, 0.5, None)) == "1"
    assert show(None) == show(figure(None)) == "–" and show(figure(1.0, -1.0, 2.0), sign=True) == "+1 [-1, +2]"


@pytest.mark.parametrize(
    "values, digits", [([1.005, 0.99996, 1.011, 1.02], 4), ([0.1, 0.2], 3), ([0.95, 0.95], 3), ([1.0, 1.0 + 1e-12], 8)]
)
def test_a_figure_has_the_digits_that_tell_it_from_what_it_is_judged_by(values: list[float], digits: int) -> None:
    assert digits_apart(values) == digits


def test_report_floor_comment_and_mlflow_write_the_same_figure_alike() -> None:
    found = figure(1234.0, 1100.0, 1300.0, unit="ms", n=9)
    text = "1234 [1100, 1300]"
    assert with_unit(found) == f"{text} ms" and known(found) == text
    rule = found | {"metric": "ttft_ms", "verdict": "PASS", "bound": "limit 2 s", "required": True}
    assert f"- ttft_ms {text} ms, n = 9: PASS" in variant_note({"verdict": "PASS", "reason": "r", "rules": [rule]})
    assert known(figure(None, reason="why")) == "unknown (why)" and with_unit(figure(0.0, 0.0, 0.0, unit="ms")) == "0 ms"
    share = figure(0.25, 0.2, 0.3, unit="fraction")
    assert (with_unit(share), with_unit(share, sign=True)) == ("25 [20, 30] %", "+25 [+20, +30] pp")
