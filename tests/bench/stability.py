"""Do speed figures repeat? One variant timed again and again on this machine, each time with fresh processes.

    python tests/bench/stability.py [VARIANT] [--times N] [--rounds N]     -> reports/stability.json

Two runs, one after the other; each is the variant's benchmark N times over. On a machine with neighbours the minutes differ
more than the rounds within one, so that a run's interval is of its N benchmarks (t, log scale), not of its rounds.

Judged: the runs' intervals of speed_ratio overlap, and its medians over all rounds are within 5 %. PASS: both; FAIL: not both.
Shown: by how much TPOT and TTFT moved (absolute times carry the machine's minutes; only ratios are of one moment); how far
whole benchmarks differ (the two lines of `compare.between_runs` in params.yaml), and how many pairs of single benchmarks have
intervals that overlap as the pipeline makes them, with that and without.

The variant and the reference must be built (`dvc repro`). Exit code: 0 PASS, 1 FAIL.
"""

from __future__ import annotations

import itertools
import sys
from typing import Annotated, Any

import numpy as np
import typer
from scipy import stats

from pipeline import benchmark
from pipeline.core import artifacts, cli, params
from pipeline.core.params import Params
from pipeline.speed import hardware, rounds
from pipeline.speed.rounds import tpot, ttft, whole_runs
from pipeline.stats.intervals import geometric_mean_t

REPORT = artifacts.REPORTS / "stability.json"
WITHIN = 0.05
CONFIDENCE = 0.95
RATIO = "speed_ratio"
Benchmarks = list[list[float]]  # a figure's value in each round of each benchmark


def once(settings: Params, variant: str, count: int) -> dict[str, list[float]]:
    """One benchmark: fresh processes, so many rounds, no sweeps. Per round: the decode ratio, the variant's TPOT and TTFT."""
    alone: dict[str, Any] = {"rounds": count, "max_rounds": None, "contexts": [], "batches": []}
    tier = settings.amount.model_copy(update={"benchmark": settings.amount.benchmark.model_copy(update=alone)})
    settings = settings.model_copy(update={"tiers": {**settings.tiers, settings.tier: tier}})
    rows = benchmark.timed(settings, variant, settings.thread_count, {})
    requests = [request for request, _ in rounds.pairs(rows)]
    return {
        RATIO: rounds.decode_ratios(rows),
        "tpot_ms": [1000 * (tpot(r["t_tokens"]) or float("nan")) for r in requests],
        "ttft_ms": [1000 * (ttft(float(r["t_submit"] or "nan"), r["t_tokens"]) or float("nan")) for r in requests],
    }


def between(benchmarks: Benchmarks) -> float:
    """Standard deviation of what whole benchmarks' log means differ by, their rounds' own spread taken out (one-way
    analysis of variance; 0 where the rounds explain it all)."""
    logs = [np.log(b) for b in benchmarks]
    within = np.mean([x.var(ddof=1) / len(x) for x in logs])
    return float(np.sqrt(max(np.var([x.mean() for x in logs], ddof=1) - within, 0.0)))


def interval(benchmarks: Benchmarks) -> tuple[float, float]:
    """Of one run: its benchmarks' geometric means are its independent values."""
    mean = geometric_mean_t([stats.gmean(b) for b in benchmarks], confidence=CONFIDENCE)
    assert mean.low is not None and mean.high is not None  # two of them at least
    return mean.low, mean.high


def moved(first: Benchmarks, second: Benchmarks) -> float:
    """Relative change of the median over all rounds."""
    return float(np.median(np.concatenate(second)) / np.median(np.concatenate(first))) - 1


def apart(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[1] < other[0] or other[1] < one[0]


def judge(first: Benchmarks, second: Benchmarks) -> dict[str, Any]:
    """Two runs of a ratio."""
    spans, change = (interval(first), interval(second)), moved(first, second)
    passed = not apart(*spans) and abs(np.log1p(change)) <= -np.log1p(-WITHIN)
    medians = [float(np.median(np.concatenate(run))) for run in (first, second)]
    return {
        "medians": medians, "moved": change, "intervals": spans, "overlap": not apart(*spans), "benchmarks": len(first),
        "rounds": len(first[0]), "verdict": "PASS" if passed else "FAIL",
    }  # fmt: skip


def overlapping(benchmarks: Benchmarks, sd: float | None) -> tuple[int, int]:
    """(pairs of single benchmarks whose intervals overlap, all pairs): intervals as the pipeline makes them."""
    each = [whole_runs(geometric_mean_t(b, confidence=CONFIDENCE), sd, confidence=CONFIDENCE) for b in benchmarks]
    pairs = list(itertools.combinations([(e.low, e.high) for e in each if e.low is not None and e.high is not None], 2))
    return sum(not apart(*pair) for pair in pairs), len(pairs)


def main(
    variant: Annotated[str, typer.Argument()] = "int8",
    times: Annotated[int, typer.Option(min=2, help="Benchmarks of each run.")] = 6,
    count: Annotated[int, typer.Option("--rounds", min=3, help="Rounds of each benchmark.")] = 5,
) -> None:
    """Time VARIANT in two runs and hold them against each other."""
    settings = params.load()
    benchmarks = [once(settings, variant, count) for _ in range(2 * times)]
    by = {name: [b[name] for b in benchmarks] for name in benchmarks[0]}
    ratio = judge(by[RATIO][:times], by[RATIO][times:])
    changes = {name: moved(by[name][:times], by[name][times:]) for name in ("tpot_ms", "ttft_ms")}
    sds = {"ratio": between(by[RATIO]), "time": max(between(by[name]) for name in changes)}
    known = settings.compare.between_runs.ratio
    pairs = {f"with compare.between_runs ({known})": overlapping(by[RATIO], known), "without": overlapping(by[RATIO], None)}
    artifacts.write_json(REPORT, {
        "variant": variant, "ratio": ratio, "moved": changes, "between": sds, "overlapping": pairs, "rounds": by,
        "machine": hardware.describe(settings.thread_count),
    })  # fmt: skip
    for median, (low, high) in zip(ratio["medians"], ratio["intervals"]):
        print(f"{RATIO}: median {median:.3f}, interval [{low:.3f}, {high:.3f}], {times} benchmarks of {count} rounds each")
    print("not judged: " + ", ".join(f"{name} moved by {100 * change:+.1f} %" for name, change in changes.items()))
    print(f"between whole benchmarks (log sd): ratio {sds['ratio']:.3f}, time {sds['time']:.3f}")
    for name, (good, n) in pairs.items():
        print(f"single benchmarks whose intervals overlap, {name}: {good} of {n} pairs")
    cli.say("stability", f"{variant}: medians {100 * ratio['moved']:+.1f} % apart: {ratio['verdict']}")
    sys.exit(0 if ratio["verdict"] == "PASS" else 1)


if __name__ == "__main__":
    cli.run(main)
