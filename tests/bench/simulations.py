"""Do the statistics keep what they say? By simulation at full size: coverage, false verdicts, items asked for.

    python tests/bench/simulations.py [RUNS [ANSWERS_FOLDER]]

RUNS (default 2000) simulated comparisons a row; each share has its Monte Carlo error. The settings are those of our own
rows: documents whose mean divergence differs by a log-sd of 0.2 to 0.45, tokens within them by 1.4, families of items.
ANSWERS_FOLDER (default artifacts/answers) holds real rows; on them, the items that a paired comparison needs are set
against those of lm-eval's, which compares two scores by their own standard errors. Some minutes; nothing is timed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import numpy as np
from scipy import stats as scipy_stats

from pipeline.core import artifacts
from pipeline.core.params import Rule
from pipeline.gating.rules import bound_of, judge
from pipeline.gating.verdicts import _hold_fails
from pipeline.stats import intervals

Estimates = Callable[[np.random.Generator], intervals.Estimate]
SURE = {"confidence": 0.95, "resamples": 1000}
TEXT, MIXED = [380] * 11, [380] * 11 + [48] * 16  # tokens a document in tier default: text; text and trajectories
CARE = 0.45


def share(count: float, runs: int) -> str:
    p = count / runs
    return f"{100 * p:5.1f} ± {100 * math.sqrt(max(p * (1 - p), 1 / runs / 4) / runs):.1f} %"


# --- rows as ours ------------------------------------------------------------------------------------------------


def divergences(sizes: list[int], spread: float, mean: float = 0.02) -> Callable[[np.random.Generator], tuple[Any, Any]]:
    doc = np.repeat(np.arange(len(sizes)), sizes)

    def draw(rng: np.random.Generator) -> tuple[Any, Any]:
        means = mean * np.exp(rng.normal(-spread * spread / 2, spread, len(sizes)))
        return means[doc] * np.exp(rng.normal(-0.98, 1.4, len(doc))), doc

    return draw


def mean_of(draw: Callable[[np.random.Generator], tuple[Any, Any]], transform: str = "mean") -> Estimates:
    def find(rng: np.random.Generator) -> intervals.Estimate:
        values, doc = draw(rng)
        return intervals.cluster_bootstrap(values, np.ones(len(values)), doc, rng=rng, transform=transform, **SURE)  # type: ignore[arg-type]

    return find


def bca(draw: Callable[[np.random.Generator], tuple[Any, Any]]) -> Estimates:
    """What was here before, for comparison."""

    def find(rng: np.random.Generator) -> intervals.Estimate:
        values, doc = draw(rng)
        sums, sizes = np.bincount(doc, values), np.bincount(doc).astype(float)
        found = scipy_stats.bootstrap(
            (sums, sizes), lambda a, b, axis=-1: a.sum(axis) / b.sum(axis), paired=True, vectorized=True, n_resamples=1000, rng=rng
        ).confidence_interval  # fmt: skip
        return intervals.Estimate(0.0, float(found.low), float(found.high), len(values), "BCa")

    return find


def losses(documents: int, shift: float = 0.005) -> Callable[[np.random.Generator], tuple[Any, Any]]:
    doc = np.repeat(np.arange(documents), 380)

    def draw(rng: np.random.Generator) -> tuple[Any, Any]:
        return shift + rng.normal(0, 0.006, documents)[doc] + 0.126 * rng.standard_t(5, len(doc)) / math.sqrt(5 / 3), doc

    return draw


def agreement(sizes: list[int], p: float, concentration: float) -> Callable[[np.random.Generator], tuple[Any, Any]]:
    doc = np.repeat(np.arange(len(sizes)), sizes)

    def draw(rng: np.random.Generator) -> tuple[Any, Any]:
        own = rng.beta(p * concentration, (1 - p) * concentration, len(sizes))
        return (rng.random(len(doc)) < own[doc]).astype(float), doc

    return draw


def accuracy(n: int, lost: float, won: float, families: int | None = None, alike: float = 0.5) -> Estimates:
    """The wider of Newcombe and cluster bootstrap, as figures.py has it; a share `alike` of a family's items moves as one."""
    cells = [0.7 - lost, lost, won, 0.3 - won]
    family = np.arange(n) % (families or n)

    def find(rng: np.random.Generator) -> intervals.Estimate:
        kind = rng.choice(4, n, p=cells)
        if families:
            kind = np.where(rng.random(n) < alike, rng.choice(4, families, p=cells)[family], kind)
        plain = intervals.paired_difference(*np.bincount(kind, minlength=4).tolist(), confidence=0.95)
        if not families:
            return plain
        change = (kind == 2).astype(float) - (kind == 1)
        return intervals.outer(plain, intervals.cluster_bootstrap(change, np.ones(n), family, rng=rng, **SURE))  # type: ignore[arg-type]

    return find


def machines(n: int, lost: float, won: float, alike: float, twice: bool = True) -> Estimates:
    """Accuracy deltas as answer_figures.py has them, each run on another machine, where reference and variant err anew.

    One item in six is within four errors of a tie, where an error is what 16-bit products move a margin by (quantizing to 8
    bits: twice that); a share `alike` of its variance is one shift of all items by the machine. twice: the reference answers
    in float32 too. A machine's right answers then vary by 3 (none alike) to 4 of 696 (standard deviation), as ours do.
    """

    def find(rng: np.random.Generator) -> intervals.Estimate:
        kind = rng.choice(4, n, p=[0.7 - lost, lost, won, 0.3 - won])
        tie, margin = rng.random(n) < 1 / 6, rng.uniform(-4, 4, n)
        errors = [math.sqrt(alike) * rng.normal() + math.sqrt(1 - alike) * rng.normal(size=n) for _ in range(2)]
        ours = np.where(tie, margin + 2 * rng.normal(size=n) + errors[0] > 0, (kind == 0) | (kind == 2)).astype(float)
        theirs, again = (np.where(tie, margin + e > 0, (kind == 0) | (kind == 1)).astype(float) for e in (errors[1], 0.0))
        second = again if twice else theirs
        x, y, family = ours, (theirs + second) / 2, np.arange(n) % (3 * n // 4)
        cells = np.minimum(x, y), np.maximum(y - x, 0), np.maximum(x - y, 0), 1 - np.maximum(x, y)
        plain = intervals.paired_difference(*(float(c.sum()) for c in cells), confidence=0.95)
        found = intervals.outer(plain, intervals.cluster_bootstrap(x - y, np.ones(n), family, rng=rng, **SURE))  # type: ignore[arg-type]
        return intervals.widened(found, intervals.arithmetic_error([theirs, second], n), confidence=0.95, bounds=(-1, 1))

    return find


def speed(rounds: int, slow: float = 0.0) -> Estimates:
    """Ratios of interleaved rounds; `slow`: how often another process makes one of the two 30 % slower."""

    def find(rng: np.random.Generator) -> intervals.Estimate:
        hit = rng.choice([-0.3, 0.0, 0.3], rounds, p=[slow / 2, 1 - slow, slow / 2])
        return intervals.geometric_mean_t(0.9 * np.exp(rng.normal(0, 0.06, rounds) + hit), confidence=0.95)

    return find


def quantile(sizes: list[int], spread: float, q: float) -> tuple[Estimates, float]:
    draw, all_of_it = divergences(sizes, spread, 1.0), math.sqrt(spread**2 + 1.4**2)
    truth = math.exp(-(spread**2) / 2 - 0.98 + all_of_it * float(scipy_stats.norm.ppf(q)))
    return (lambda rng: intervals.quantile_interval(*draw(rng), q, confidence=0.95)), truth


# --- the tables --------------------------------------------------------------------------------------------------


def coverage(runs: int) -> None:
    print(f"Coverage of 95 % intervals, {runs} runs a row: covers | truth below it | truth above it | no interval\n")
    rows: list[tuple[str, Estimates, float]] = []
    for spread in (0.25, CARE):
        for name, sizes in (("11 documents", TEXT), ("27, unequal", MIXED), ("79", [380] * 79)):
            rows.append((f"KLD, {name}, log-sd {spread}", mean_of(divergences(sizes, spread)), 0.02))
    rows += [(f"  BCa: KLD, {n}, log-sd {CARE}", bca(divergences(s, CARE)), 0.02) for n, s in (("11", TEXT), ("27", MIXED))]
    rows += [(f"PPL ratio, {n} documents", mean_of(losses(n), "exp"), math.exp(0.005)) for n in (11, 27, 79)]
    rows += [("top-1 agreement 95 %, 27 unequal", mean_of(agreement(MIXED, 0.95, 60)), 0.95)]
    rows += [("moved tokens 0.5 %, 27 unequal", mean_of(agreement(MIXED, 0.005, 100)), 0.005)]
    for q, sizes, name in ((0.5, MIXED, "27 unequal"), (0.99, TEXT, "11"), (0.99, MIXED, "27 unequal"), (0.99, [380] * 79, "79")):
        rows.append((f"KLD quantile {q:g}, {name}", *quantile(sizes, CARE, q)))
    for n in (36, 60, 240, 696):
        rows.append((f"accuracy delta, {n} items, 3 % lost, 1 % won", accuracy(n, 0.03, 0.01), -0.02))
    for n, lost, won in ((240, 0.03, 0.01), (240, 0.06, 0.02), (696, 0.01, 0.01), (696, 0.03, 0.01), (696, 0.06, 0.02)):
        name = f"accuracy delta, {n} in families of 3, {lost:.0%} lost, {won:.0%} won"
        rows.append((name, accuracy(n, lost, won, n // 3), won - lost))
    for alike in (0.0, 0.03):
        for lost, won in ((0.0, 0.0), (0.03, 0.01)):
            for how, twice in (("float32 too", True), ("  alone", False)):
                name = f"{how}: delta over machines, {alike:.0%} alike, {lost:.1%} lost"
                rows.append((name, machines(696, lost, won, alike, twice), (won - lost) * 5 / 6))
    rows += [("speed ratio, 5 rounds", speed(5), 0.9), ("speed ratio, 5 rounds, 10 % disturbed", speed(5, 0.1), 0.9)]
    for k, (name, find, truth) in enumerate(rows):
        rng = np.random.default_rng([1, k])
        found = [e for e in (find(rng) for _ in range(runs)) if e.low is not None and e.high is not None]
        below, above = sum(truth < e.low for e in found), sum(truth > e.high for e in found)  # type: ignore[operator]
        n = max(len(found), 1)
        text = f"{share(n - below - above, n)} | {share(below, n)} | {share(above, n)} | {runs - len(found)}"
        print(f"{name:<58} {text}", flush=True)


def metric(found: intervals.Estimate, scale: float = 1.0) -> dict[str, Any]:
    value, low, high = (None if v is None else scale * v for v in (found.value, found.low, found.high))
    return {"value": value, "low": low, "high": high, "n": found.n, "clusters": found.clusters, "confidence": 0.95}


def at_the_margin() -> dict[str, tuple[dict[str, Any], Estimates, float]]:
    """{metric: (its rule, estimates whose true value is exactly the bound, scale)}."""
    return {
        "kld_mean": ({"margin": "0.02 nats"}, mean_of(divergences(MIXED, 0.35)), 1.0),
        "ppl_ratio": ({"margin": "2 %"}, mean_of(losses(11, math.log(1.02)), "exp"), 1.0),
        "acc_delta/all": ({"margin": "2 pp"}, accuracy(696, 0.035, 0.015, 536), 100.0),
        "speed_ratio": ({"margin": "10 %"}, speed(5), 1.0),
    }


def verdicts(runs: int) -> None:
    print(f"\nVerdicts of rules.judge where the truth is exactly the bound, {runs} runs: false PASS | FAIL\n")
    cases = at_the_margin()
    found: dict[str, list[dict[str, Any]]] = {}
    for k, (name, (rule, find, scale)) in enumerate(cases.items()):
        rng, bound = np.random.default_rng([2, k]), bound_of(Rule(metric=name, **rule))
        found[name] = []
        for _ in range(runs):
            figures = metric(find(rng), scale)
            judged = judge(bound, figures)
            found[name].append(figures | {"verdict": judged.verdict, "reason": "", "required": True, "p_fail": judged.p_fail,
                                          "threshold": bound.threshold})  # fmt: skip
        passed, failed = (sum(r["verdict"] == v for r in found[name]) for v in ("PASS", "FAIL"))
        print(f"{name + ', ' + next(iter(rule.values())):<30} {share(passed, runs)} | {share(failed, runs)}")
    rules = [list(r) for r in zip(*found.values())]
    any_pass = sum(all(r["verdict"] == "PASS" for r in own) for own in rules)
    plain = sum(any(r["verdict"] == "FAIL" for r in own) for own in rules)
    for own in rules:
        _hold_fails(own, 0.95)
    held = sum(any(r["verdict"] == "FAIL" for r in own) for own in rules)
    print(f"\nA variant at all {len(cases)} bounds: PASS {share(any_pass, runs)}; FAIL without correction {share(plain, runs)}")
    print(f"FAIL after Holm {share(held, runs)}")


def settling(runs: int) -> None:
    print(f"\nDo the items asked for settle it? 1000 items, 4 % lost, 3 % won, margin 2 pp, {runs} runs\n")
    rng, cells, bound = np.random.default_rng(3), np.array([0.66, 0.04, 0.03, 0.27]), -0.02
    planned = intervals.items_to_settle(intervals.paired_difference(*map(int, 1000 * cells), confidence=0.95), bound)
    settled, asked = 0, []
    assert planned is not None  # these true values can be settled
    for table in rng.multinomial(planned, cells, runs):
        settled += intervals.paired_difference(*map(int, table), confidence=0.95).low > bound  # type: ignore[operator]
    print(f"told of the true values ({planned} items): {share(settled, runs)}")
    settled = 0
    for table in rng.multinomial(1000, cells, runs):
        now = intervals.paired_difference(*map(int, table), confidence=0.95)
        n = intervals.items_to_settle(now, bound)
        if now.low > bound or now.high < bound or n is None:  # type: ignore[operator]
            continue
        again = intervals.paired_difference(*map(int, rng.multinomial(min(n, 10**7), cells)), confidence=0.95)
        asked.append(n)
        settled += not again.low <= bound <= again.high  # type: ignore[operator]
    first = f"told of an INCONCLUSIVE first run ({len(asked)}, median {np.median(asked):.0f} items)"
    print(f"{first}: {share(settled, len(asked))}")


def pairing(folder: Path) -> None:
    """Items needed for the same half-width: lm-eval's stderrs of two scores, and the paired interval of the gate."""
    files = {p.stem: p for p in sorted(folder.glob("*.jsonl"))}
    if "bf16" not in files:
        print(f"\n{folder} holds no bf16.jsonl: items needed against lm-eval's comparison are not measured")
        return
    read = {v: [r for r in artifacts.read_jsonl(p) if r["acc"] is not None] for v, p in files.items()}
    reference = read.pop("bf16")
    tasks = [*dict.fromkeys(r["task"] for r in reference), "all"]
    print("\nTimes fewer items than lm-eval's unpaired comparison, for an interval as wide: the paired interval of the gate (wider")
    print("of Newcombe and families) | the plain variances, (p(1-p) + q(1-q)) / (changed - delta^2)\n")
    for variant, rows in read.items():
        parts = []
        for task in tasks:
            own = [(a, b) for a, b in zip(rows, reference) if task in ("all", a["task"])]
            parts.append(f"{task} {_fewer(own)}")
        print(f"{variant:<10} " + ", ".join(parts))


def _fewer(own: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    ours, theirs, n = np.array([a["acc"] for a, _ in own]), np.array([b["acc"] for _, b in own]), len(own)
    lost, won, both = int((theirs > ours).sum()), int((ours > theirs).sum()), int((ours * theirs).sum())
    found = intervals.paired_difference(both, lost, won, n - both - lost - won, confidence=0.95)
    families = [f"{a['task']}/{a['cluster']}" for a, _ in own]
    if len(set(families)) < n:
        whole = intervals.cluster_bootstrap(ours - theirs, np.ones(n), families, rng=np.random.default_rng(5), **SURE)  # type: ignore[arg-type]
        found = intervals.outer(found, whole)
    unpaired = (ours.var(ddof=1) + theirs.var(ddof=1)) / n  # lm-eval's stderr of each score, squared
    half = (found.high - found.low) / 2  # type: ignore[operator]
    plain = (ours - theirs).var()
    ratio = f"{(ours.var() + theirs.var()) / plain:.0f}" if plain else "–"
    return f"{1.959964**2 * unpaired / half**2:.1f} | {ratio} (n {n}, {lost + won} changed)"


def main(runs: int, folder: Path) -> None:
    coverage(runs)
    verdicts(runs)
    settling(runs)
    pairing(folder)


if __name__ == "__main__":
    main(
        int(sys.argv[1]) if len(sys.argv) > 1 else 2000, Path(sys.argv[2]) if len(sys.argv) > 2 else artifacts.ARTIFACTS / "answers"
    )
