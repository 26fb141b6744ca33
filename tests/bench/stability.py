"""Do speed figures repeat? Two benchmark runs of one variant on this machine, one after the other, each with fresh processes.

    python tests/bench/stability.py [VARIANT] [--rounds N]     -> reports/stability.json

Judged: the intervals of both runs' speed_ratio overlap, and each median (decode ratio, TPOT, TTFT, over rounds) of one run is
within 5 % of the other's. PASS: all of it, and each median's interval lies within the 5 % as well; FAIL: the ratio's intervals
are apart, or a median is off by more than 5 % with its whole interval; else INCONCLUSIVE (more rounds would tell). The interval
is of the mean log difference of rounds (Welch's t), shifted to the medians' ratio.

The variant and the reference must be built (`dvc repro`). Exit code: 0 PASS, 1 FAIL, 3 INCONCLUSIVE.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from scipy import stats

from pipeline import benchmark, hardware
from pipeline.core import artifacts, cli, params
from pipeline.numbers import rounds
from pipeline.numbers.metrics import tpot, ttft
from pipeline.numbers.stats import geometric_mean_t

REPORT = Path("reports/stability.json")
WITHIN = 0.05
CONFIDENCE = 0.95


def figures(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Per round: the decode ratio, and the variant's TPOT and TTFT in ms."""
    ours = [r for r, _ in rounds.pairs(rows)]
    return {
        "speed_ratio": rounds.decode_ratios(rows),
        "tpot_ms": [1000 * (tpot(r["t_tokens"]) or float("nan")) for r in ours],
        "ttft_ms": [1000 * (ttft(r["t_submit"], r["t_tokens"]) or float("nan")) for r in ours],
    }


def compare(first: list[float], second: list[float]) -> dict[str, Any]:
    """The second run's median over the first's, with an interval, and whether it is within the bound."""
    a, b = np.log(first), np.log(second)
    value = float(np.median(b) - np.median(a))
    spread = stats.ttest_ind(b, a, equal_var=False).confidence_interval(CONFIDENCE)
    half = float(spread.high - spread.low) / 2
    low, high = value - half, value + half
    limits = np.log1p(-WITHIN), np.log1p(WITHIN)
    inside, outside = limits[0] <= low and high <= limits[1], high < limits[0] or low > limits[1]
    return {
        "medians": [float(np.median(first)), float(np.median(second))], "apart": float(np.expm1(value)),
        "low": float(np.expm1(low)), "high": float(np.expm1(high)), "n": [len(first), len(second)],
        "verdict": "PASS" if inside else "FAIL" if outside else "INCONCLUSIVE",
    }  # fmt: skip


def overlap(first: list[float], second: list[float]) -> dict[str, Any]:
    """Whether the intervals of two runs' ratios overlap; how wide they are, `compare` judges."""
    found = [geometric_mean_t(r, confidence=CONFIDENCE) for r in (first, second)]
    if any(f.low is None or f.high is None for f in found):
        return {"intervals": None, "verdict": "INCONCLUSIVE"}
    spans = [(float(f.low or 0), float(f.high or 0)) for f in found]
    apart = spans[0][1] < spans[1][0] or spans[1][1] < spans[0][0]
    return {"intervals": spans, "verdict": "FAIL" if apart else "PASS"}


def judge(found: dict[str, dict[str, Any]]) -> str:
    verdicts = {f["verdict"] for f in found.values()}
    return next(v for v in ("FAIL", "INCONCLUSIVE", "PASS") if v in verdicts)


def show(found: dict[str, dict[str, Any]]) -> None:
    for name, f in found.items():
        if name == "overlap":
            spans = " and ".join(f"[{a:.3f}, {b:.3f}]" for a, b in f["intervals"] or []) or "not to be had"
            print(f"intervals of speed_ratio: {spans}: {f['verdict']}")
        else:
            interval = f"[{100 * f['low']:+.1f}, {100 * f['high']:+.1f}]"
            medians = " and ".join(f"{m:.4g}" for m in f["medians"])
            print(f"{name}: medians {medians}, {100 * f['apart']:+.1f} % {interval} apart, n = {f['n']}: {f['verdict']}")


def main(
    variant: Annotated[str, typer.Argument()] = "int8",
    rounds_each: Annotated[int, typer.Option("--rounds", help="Rounds of each run.")] = 10,
) -> None:
    """Time VARIANT twice and hold the runs against each other."""
    settings = params.load()
    alone: dict[str, Any] = {"rounds": rounds_each, "max_rounds": None, "contexts": [], "batches": []}
    tier = settings.amount.model_copy(update={"benchmark": settings.amount.benchmark.model_copy(update=alone)})
    settings = settings.model_copy(update={"tiers": {**settings.tiers, settings.tier: tier}})
    runs = [figures(benchmark.timed(settings, variant, settings.thread_count)[0]) for _ in range(2)]
    found = {"overlap": overlap(*(run["speed_ratio"] for run in runs))}
    found |= {name: compare(runs[0][name], runs[1][name]) for name in runs[0]}
    verdict = judge(found)
    machine = hardware.describe(settings.thread_count)
    artifacts.write_json(REPORT, {"variant": variant, "verdict": verdict, "figures": found, "machine": machine})
    show(found)
    cli.say("stability", f"{variant}, two runs of {rounds_each} rounds: {verdict}")
    sys.exit({"PASS": 0, "FAIL": 1}.get(verdict, 3))


if __name__ == "__main__":
    cli.run(main)
