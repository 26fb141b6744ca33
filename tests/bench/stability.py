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
from pathlib import Path
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

REPORT = Path("reports/stability.json")
WITHIN = 0.05
CONFIDENCE = 0.95
RATIO = "speed_ratio"
Figures = dict[str, list[float]]  # {figure: its value in each round}


def figures(rows: list[dict[str, Any]]) -> Figures:
    """Per round: the decode ratio, and the variant's TPOT and TTFT in ms."""
    ours = [r for r, _ in rounds.pairs(rows)]
    return {
        RATIO: rounds.decode_ratios(rows),
        "tpot_ms": [1000 * (tpot(r["t_tokens"]) or float("nan")) for r in ours],
        "ttft_ms": [1000 * (ttft(r["t_submit"], r["t_tokens"]) or float("nan")) for r in ours],
    }


def between(benchmarks: list[list[float]]) -> float:
    """Standard deviation of what whole benchmarks' log means differ by, their rounds' own spread taken out (one-way
    analysis of variance; 0 where the rounds explain it all)."""
    logs = [np.log(b) for b in benchmarks]
    own = np.mean([x.var(ddof=1) / len(x) for x in logs])
    return float(np.sqrt(max(np.var([x.mean() for x in logs], ddof=1) - own, 0.0)))


def interval(benchmarks: list[list[float]]) -> tuple[float, float]:
    """Of one run: its benchmarks' geometric means are its independent values."""
    found = geometric_mean_t([stats.gmean(b) for b in benchmarks], confidence=CONFIDENCE)
    assert found.low is not None and found.high is not None  # two of them at least
    return found.low, found.high


def apart(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[1] < other[0] or other[1] < one[0]


def judge(first: list[list[float]], second: list[list[float]]) -> dict[str, Any]:
    """Two runs of a ratio, each a list of benchmarks, each a list of rounds."""
    spans = interval(first), interval(second)
    medians = [float(np.median(np.concatenate(run))) for run in (first, second)]
    moved = medians[1] / medians[0] - 1
    passed = not apart(*spans) and abs(np.log1p(moved)) <= -np.log1p(-WITHIN)
    return {
        "medians": medians, "moved": moved, "intervals": spans, "overlap": not apart(*spans),
        "benchmarks": len(first), "rounds": len(first[0]), "verdict": "PASS" if passed else "FAIL",
    }  # fmt: skip


def overlapping(benchmarks: list[list[float]], sd: float | None) -> tuple[int, int]:
    """(pairs of single benchmarks whose intervals overlap, all pairs): intervals as the pipeline makes them."""
    found = [whole_runs(geometric_mean_t(b, confidence=CONFIDENCE), sd, confidence=CONFIDENCE) for b in benchmarks]
    spans = [(f.low, f.high) for f in found if f.low is not None and f.high is not None]
    pairs = list(itertools.combinations(spans, 2))
    return sum(not apart(*pair) for pair in pairs), len(pairs)


def show(ratio: dict[str, Any], moved: dict[str, float], sds: dict[str, float], pairs: dict[str, tuple[int, int]]) -> None:
    spans = " and ".join(f"[{low:.3f}, {high:.3f}]" for low, high in ratio["intervals"])
    medians = " and ".join(f"{m:.3f}" for m in ratio["medians"])
    each = f"{ratio['benchmarks']} benchmarks of {ratio['rounds']} rounds each"
    print(f"{RATIO}: medians {medians}, {100 * ratio['moved']:+.1f} % apart; intervals {spans}; {each}: {ratio['verdict']}")
    print("not judged: " + ", ".join(f"{name} moved by {100 * m:+.1f} %" for name, m in moved.items()))
    print(f"between whole benchmarks (log sd): ratio {sds['ratio']:.3f}, time {sds['time']:.3f}")
    for name, (good, n) in pairs.items():
        print(f"single benchmarks whose intervals overlap, {name}: {good} of {n} pairs")


def once(settings: Params, variant: str, count: int) -> Figures:
    """One benchmark: fresh processes, so many rounds, no sweeps."""
    alone: dict[str, Any] = {"rounds": count, "max_rounds": None, "contexts": [], "batches": []}
    tier = settings.amount.model_copy(update={"benchmark": settings.amount.benchmark.model_copy(update=alone)})
    settings = settings.model_copy(update={"tiers": {**settings.tiers, settings.tier: tier}})
    return figures(benchmark.timed(settings, variant, settings.thread_count, {}))


def main(
    variant: Annotated[str, typer.Argument()] = "int8",
    times: Annotated[int, typer.Option(min=2, help="Benchmarks of each run.")] = 6,
    count: Annotated[int, typer.Option("--rounds", min=3, help="Rounds of each benchmark.")] = 5,
) -> None:
    """Time VARIANT in two runs and hold them against each other."""
    settings = params.load()
    found = [once(settings, variant, count) for _ in range(2 * times)]
    by = {name: [f[name] for f in found] for name in found[0]}
    ratio = judge(by[RATIO][:times], by[RATIO][times:])
    middles = {name: [float(np.median(np.concatenate(b))) for b in (by[name][:times], by[name][times:])] for name in by}
    moved = {name: second / first - 1 for name, (first, second) in middles.items() if name != RATIO}
    sds = {"ratio": between(by[RATIO]), "time": max(between(by["tpot_ms"]), between(by["ttft_ms"]))}
    asked = settings.compare.between_runs.ratio
    pairs = {f"with compare.between_runs ({asked})": overlapping(by[RATIO], asked), "without": overlapping(by[RATIO], None)}
    machine = hardware.describe(settings.thread_count)
    artifacts.write_json(REPORT, {
        "variant": variant, "ratio": ratio, "moved": moved, "between": sds, "overlapping": pairs, "rounds": by, "machine": machine,
    })  # fmt: skip
    show(ratio, moved, sds, pairs)
    cli.say("stability", f"{variant}, two runs of {times} benchmarks: {ratio['verdict']}")
    sys.exit(0 if ratio["verdict"] == "PASS" else 1)


if __name__ == "__main__":
    cli.run(main)
