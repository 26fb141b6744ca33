"""The bench script that times one variant twice over: whole runs are held against each other, not their rounds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

RNG = np.random.default_rng(0)


def run(times: int, center: float, between: float, within: float = 0.02, rounds: int = 5) -> list[list[float]]:
    """Benchmarks whose means differ by `between`, and their rounds by `within`."""
    return [(center * np.exp(RNG.normal(0, between) + RNG.normal(0, within, rounds))).tolist() for _ in range(times)]


@pytest.fixture(scope="module")
def stability() -> Any:
    spec = importlib.util.spec_from_file_location("stability", Path(__file__).resolve().parent / "bench/stability.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_equal_runs_pass_and_a_shift_fails(stability: Any) -> None:
    assert stability.judge(run(6, 0.9, 0.01), run(6, 0.9, 0.01))["verdict"] == "PASS"
    moved = stability.judge(run(6, 0.9, 0.01), run(6, 1.05, 0.01))
    assert moved["verdict"] == "FAIL" and moved["overlap"] is False and moved["moved"] == pytest.approx(0.167, abs=0.03)


def test_medians_more_than_five_percent_apart_fail_though_wide_intervals_overlap(stability: Any) -> None:
    for way in (1, -1):
        found = stability.judge(*[run(3, 0.9, 0.2), run(3, 1.2, 0.2)][::way])
        assert found["overlap"] and found["verdict"] == "FAIL"


def test_rounds_within_a_benchmark_do_not_narrow_a_runs_interval(stability: Any) -> None:
    """Hundred rounds that share their benchmark's shift say no more than one."""
    benchmarks = run(4, 0.9, 0.1, within=0.001, rounds=100)
    low, high = stability.interval(benchmarks)
    assert high - low > 0.05


def test_what_whole_benchmarks_differ_by_is_found_and_the_rounds_own_spread_is_not_taken_for_it(stability: Any) -> None:
    assert stability.between(run(400, 0.9, 0.05, within=0.06)) == pytest.approx(0.05, abs=0.006)
    assert stability.between(run(400, 0.9, 0.0, within=0.06)) < 0.015


def test_single_benchmarks_overlap_once_the_spread_of_whole_runs_is_in_their_intervals(stability: Any) -> None:
    benchmarks = run(12, 0.9, 0.1, within=0.01)
    without, n = stability.overlapping(benchmarks, None)
    assert n == 66 and without < 33
    assert stability.overlapping(benchmarks, 0.1)[0] >= 60
