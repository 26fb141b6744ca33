"""The bench script that holds two runs against each other: equal ones pass, a shift fails, noise is no verdict."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

NEAR = np.exp(np.random.default_rng(0).normal(0, 0.005, (2, 10)))
FAR = np.exp(np.random.default_rng(1).normal(0, 0.3, (2, 10)))


@pytest.fixture(scope="module")
def stability() -> Any:
    spec = importlib.util.spec_from_file_location("stability", Path(__file__).resolve().parent / "bench/stability.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "first, second, verdict",
    [
        (NEAR[0], NEAR[1], "PASS"),
        (NEAR[0], 1.04 * NEAR[1], "PASS"),
        (NEAR[0], 1.12 * NEAR[1], "FAIL"),
        (1.12 * NEAR[0], NEAR[1], "FAIL"),
        (FAR[0], FAR[1], "INCONCLUSIVE"),
        (NEAR[0], 1.05 * NEAR[1], "INCONCLUSIVE"),
    ],
)
def test_medians_are_judged_with_their_interval(stability: Any, first: np.ndarray, second: np.ndarray, verdict: str) -> None:
    found = stability.compare(first.tolist(), second.tolist())
    assert found["verdict"] == verdict
    assert found["low"] < np.median(second) / np.median(first) - 1 < found["high"]


def test_intervals_that_lie_apart_fail_and_too_few_rounds_say_nothing(stability: Any) -> None:
    assert stability.overlap(NEAR[0].tolist(), NEAR[1].tolist())["verdict"] == "PASS"
    assert stability.overlap(NEAR[0].tolist(), (1.2 * NEAR[1]).tolist())["verdict"] == "FAIL"
    assert stability.overlap([1.0], [1.0])["verdict"] == "INCONCLUSIVE"


@pytest.mark.parametrize(
    "verdicts, verdict",
    [("PASS PASS", "PASS"), ("PASS INCONCLUSIVE", "INCONCLUSIVE"), ("INCONCLUSIVE FAIL", "FAIL")],
)
def test_the_worst_verdict_counts(stability: Any, verdicts: str, verdict: str) -> None:
    assert stability.judge({str(k): {"verdict": v} for k, v in enumerate(verdicts.split())}) == verdict
