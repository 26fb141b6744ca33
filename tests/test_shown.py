"""A figure is written in one way: in the report, in a comment, in MLflow."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.figures import noise
from pipeline.judging import comment
from pipeline.numbers.shown import number, show
from pipeline.pages import words
from pipeline.runs.run_content import variant_note


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


def test_report_floor_comment_and_mlflow_write_the_same_figure_alike() -> None:
    found = figure(1234.0, 1100.0, 1300.0, unit="ms", n=9)
    text = "1234 [1100, 1300]"
    assert words.told(found, "ms") == comment._interval(found) == f"{text} ms" and noise.shown(found) == text
    rule = found | {"metric": "ttft_ms", "verdict": "PASS", "bound": "limit 2 s"}
    assert f"- ttft_ms {text} ms, n = 9: PASS" in variant_note("x", {"variants": {"x": {"rules": [rule]}}}, "bf16")
    assert (
        noise.shown(figure(None, reason="why")) == "unknown (why)" and comment._interval(figure(0.0, 0.0, 0.0, unit="ms")) == "0 ms"
    )
