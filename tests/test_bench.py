"""The scripts of `make bench` run rarely: here the simulations go through, and stability.py's judgement of whole runs is right."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parent / "bench"))  # behind all packages, whose names some scripts share
import gpu
import simulations
import stability

from pipeline import engines, quantizers
from pipeline.core import venvs

RNG = np.random.default_rng(0)


@pytest.mark.filterwarnings("ignore")  # of figures of two runs
def test_the_simulations_go_through_at_a_tiny_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulations.main(2, tmp_path)
    printed = capsys.readouterr().out
    assert "Coverage of 95 % intervals, 2 runs" in printed and "FAIL after Holm" in printed


def run(times: int, center: float, between: float, within: float = 0.02, rounds: int = 5) -> Any:
    """Benchmarks whose means differ by `between`, and their rounds by `within`."""
    return [(center * np.exp(RNG.normal(0, between) + RNG.normal(0, within, rounds))).tolist() for _ in range(times)]


def test_equal_runs_pass_and_a_shift_fails() -> None:
    assert stability.judge(run(6, 0.9, 0.01), run(6, 0.9, 0.01))["verdict"] == "PASS"
    judged = stability.judge(run(6, 0.9, 0.01), run(6, 1.05, 0.01))
    assert judged["verdict"] == "FAIL" and judged["overlap"] is False and judged["moved"] == pytest.approx(0.167, abs=0.03)


@pytest.mark.parametrize("way", [1, -1])
def test_medians_more_than_five_percent_apart_fail_though_wide_intervals_overlap(way: int) -> None:
    judged = stability.judge(*[run(3, 0.9, 0.2), run(3, 1.2, 0.2)][::way])
    assert judged["overlap"] and judged["verdict"] == "FAIL"


def test_rounds_within_a_benchmark_do_not_narrow_a_runs_interval() -> None:
    """Hundred rounds that share their benchmark's shift say no more than one."""
    low, high = stability.interval(run(4, 0.9, 0.1, within=0.001, rounds=100))
    assert high - low > 0.05


def test_what_whole_benchmarks_differ_by_is_measured_without_the_rounds_own_spread() -> None:
    assert stability.between(run(400, 0.9, 0.05, within=0.06)) == pytest.approx(0.05, abs=0.006)
    assert stability.between(run(400, 0.9, 0.0, within=0.06)) < 0.015


def test_single_benchmarks_overlap_once_the_spread_of_whole_runs_is_in_their_intervals() -> None:
    benchmarks = run(12, 0.9, 0.1, within=0.01)
    without, n = stability.overlapping(benchmarks, None)
    assert n == 66 and without < 33
    assert stability.overlapping(benchmarks, 0.1)[0] >= 60


def test_what_wants_a_card_or_vllm_is_skipped_with_the_reason_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv(venvs.VLLM, "/none/python")
    gpu.main(dry=True, only="torchao-int4,gptq,vllm-gptq")
    rows = {
        line.split(" | ")[0][2:]: line.split(" | ")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")
    }
    assert (rows["torchao-int4"], rows["gptq"]) == ("skipped: no card here", "would run")
    assert rows["vllm-gptq"].startswith("skipped: vLLM needs its own environment")
    for tried in gpu.PATHS.values():
        quantizers.check(tried.variant.quantizer, tried.variant.options)
        quantizers.check_engine(tried.variant.quantizer, tried.variant.engine)
        engines.check(tried.variant.engine, tried.variant.engine_options)
