"""Do the statistics keep what they say? By simulation at full size: coverage, false verdicts, items needed.

    python tests/bench/simulations.py [RUNS [ANSWERS_FOLDER]]

RUNS (default 2000) simulated comparisons a row; each share has its Monte Carlo error. The settings are those of our own
rows: documents whose mean divergence differs by a log-sd of 0.2 to 0.45, tokens within them by 1.4, families of items.
ANSWERS_FOLDER (default artifacts/answers) holds real rows; on them, the items that a paired comparison needs are set
against those of lm-eval's, which compares two scores by their own standard errors. Some minutes; nothing is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import harness
import numpy as np
import typer
from numpy.typing import ArrayLike
from scipy.stats import norm

from pipeline.core import artifacts, cli, params
from pipeline.core.params import Rule
from pipeline.gating import verdicts
from pipeline.gating.rules import Bound, bound_of, judge
from pipeline.metrics.builder import as_metric
from pipeline.stats import intervals
from pipeline.stats.intervals import Estimate
from pipeline.stats.sequential import level

Rng = np.random.Generator
Rows = tuple[Any, Any]
Estimates = Callable[[Rng], Estimate]
CONFIDENCE = 0.95
TEXT, MIXED = [380] * 11, [380] * 11 + [48] * 16  # tokens a document in tier default: text; text and trajectories
SPREAD = 0.45  # log-sd of documents' means, at most


def share(count: float, runs: int) -> str:
    p = count / runs
    return f"{100 * p:5.1f} ± {100 * math.sqrt(max(p * (1 - p), 1 / runs / 4) / runs):.1f} %"


# --- rows as ours: values, and the document of each --------------------------------------------------------------


def divergences(rng: Rng, sizes: list[int], spread: float, mean: float = 0.02) -> Rows:
    doc = np.repeat(np.arange(len(sizes)), sizes)
    means = mean * np.exp(rng.normal(-spread * spread / 2, spread, len(sizes)))
    return means[doc] * np.exp(rng.normal(-0.98, 1.4, len(doc))), doc


def losses(rng: Rng, documents: int, shift: float = 0.005) -> Rows:
    doc = np.repeat(np.arange(documents), 380)
    return shift + rng.normal(0, 0.006, documents)[doc] + 0.126 * rng.standard_t(5, len(doc)) / math.sqrt(5 / 3), doc


def agreement(rng: Rng, p: float, concentration: float) -> Rows:
    doc = np.repeat(np.arange(len(MIXED)), MIXED)
    shares = rng.beta(p * concentration, (1 - p) * concentration, len(MIXED))
    return (rng.random(len(doc)) < shares[doc]).astype(float), doc


# --- estimates ---------------------------------------------------------------------------------------------------


def clustered(
    values: ArrayLike, clusters: ArrayLike, rng: Rng, transform: str = "mean", confidence: float = CONFIDENCE
) -> Estimate:
    ones = np.ones(len(np.asarray(values)))
    return intervals.cluster_bootstrap(values, ones, clusters, rng=rng, transform=transform, confidence=confidence, resamples=1000)


def mean_of(rows: Callable[..., Rows], *given: Any, transform: str = "mean") -> Estimates:
    return lambda rng: clustered(*rows(rng, *given), rng, transform)


def accuracy(rng: Rng, n: int, lost: float, won: float, families: int | None = None) -> Estimate:
    """The wider of Newcombe and bootstrap, as metrics/answers.py has it."""
    return accuracy_of(*answers(rng, n, lost, won, families), rng, CONFIDENCE)


def answers(rng: Rng, n: int, lost: float, won: float, families: int | None = None) -> Rows:
    """Cell of each item (right in both, lost, won, wrong in both), and its family; half of a family's items move as one."""
    cells = [0.7 - lost, lost, won, 0.3 - won]
    family = np.arange(n) % (families or n)
    kind = rng.choice(4, n, p=cells)
    if families:
        kind = np.where(rng.random(n) < 0.5, rng.choice(4, families, p=cells)[family], kind)
    return kind, family


def accuracy_of(kind: Any, family: Any, rng: Rng, confidence: float) -> Estimate:
    plain = intervals.paired_difference(*np.bincount(kind, minlength=4).tolist(), confidence=confidence)
    change = (kind == 2).astype(float) - (kind == 1)
    return intervals.outer(plain, clustered(change, family, rng, "mean", confidence)) if family.max() + 1 < len(kind) else plain


def machines(rng: Rng, lost: float, won: float, alike: float, twice: bool) -> Estimate:
    """Accuracy deltas as metrics/answers.py has them, each run on another machine, where reference and variant err anew.

    One item in six is within four errors of a tie, where an error is what 16-bit products move a margin by (quantizing to 8
    bits: twice that); a share `alike` of its variance is one shift of all items by the machine. twice: the reference answers
    in float32 too. A machine's right answers then vary by 3 (none alike) to 4 of 696 (standard deviation), as ours do.
    """
    n = 696
    kind = rng.choice(4, n, p=[0.7 - lost, lost, won, 0.3 - won])
    tie, margin = rng.random(n) < 1 / 6, rng.uniform(-4, 4, n)
    errors = [math.sqrt(alike) * rng.normal() + math.sqrt(1 - alike) * rng.normal(size=n) for _ in range(2)]
    x = np.where(tie, margin + 2 * rng.normal(size=n) + errors[0] > 0, (kind == 0) | (kind == 2)).astype(float)
    first, again = (np.where(tie, margin + e > 0, (kind == 0) | (kind == 1)).astype(float) for e in (errors[1], 0.0))
    second = again if twice else first
    y = (first + second) / 2
    cells = np.minimum(x, y), np.maximum(y - x, 0), np.maximum(x - y, 0), 1 - np.maximum(x, y)
    plain = intervals.paired_difference(*(float(c.sum()) for c in cells), confidence=CONFIDENCE)
    both = intervals.outer(plain, clustered(x - y, np.arange(n) % (3 * n // 4), rng))
    return intervals.widened(both, intervals.arithmetic_error([first, second], n), confidence=CONFIDENCE, bounds=(-1, 1))


def speed(rng: Rng, disturbed: float = 0.0) -> Estimate:
    """Ratios of five interleaved rounds; `disturbed`: how often another process makes one of the two 30 % slower."""
    hit = rng.choice([-0.3, 0.0, 0.3], 5, p=[disturbed / 2, 1 - disturbed, disturbed / 2])
    return intervals.geometric_mean_t(0.9 * np.exp(rng.normal(0, 0.06, 5) + hit), confidence=CONFIDENCE)


def quantile(rng: Rng, sizes: list[int], q: float) -> Estimate:
    return intervals.quantile_interval(*divergences(rng, sizes, SPREAD, 1.0), q, confidence=CONFIDENCE)


def true_quantile(q: float) -> float:
    return math.exp(-(SPREAD**2) / 2 - 0.98 + math.hypot(SPREAD, 1.4) * float(norm.ppf(q)))


# --- the tables --------------------------------------------------------------------------------------------------


def coverage(runs: int) -> None:
    print(f"Coverage of 95 % intervals, {runs} runs a row: covers | truth below it | truth above it | no interval\n")
    rows: list[tuple[str, Estimates, float]] = []
    for spread in (0.25, SPREAD):
        for name, sizes in (("11 documents", TEXT), ("27, unequal", MIXED), ("79", [380] * 79)):
            rows.append((f"KLD, {name}, log-sd {spread}", mean_of(divergences, sizes, spread), 0.02))
    rows += [(f"PPL ratio, {n} documents", mean_of(losses, n, transform="exp"), math.exp(0.005)) for n in (11, 27, 79)]
    rows += [("top-1 agreement 95 %, 27 unequal", mean_of(agreement, 0.95, 60), 0.95)]
    rows += [("moved tokens 0.5 %, 27 unequal", mean_of(agreement, 0.005, 100), 0.005)]
    for q, sizes, name in ((0.5, MIXED, "27 unequal"), (0.99, TEXT, "11"), (0.99, MIXED, "27 unequal"), (0.99, [380] * 79, "79")):
        rows.append((f"KLD quantile {q:g}, {name}", partial(quantile, sizes=sizes, q=q), true_quantile(q)))
    for n in (36, 60, 240, 696):
        rows.append((f"accuracy delta, {n} items, 3 % lost, 1 % won", partial(accuracy, n=n, lost=0.03, won=0.01), -0.02))
    for n, lost, won in ((240, 0.03, 0.01), (240, 0.06, 0.02), (696, 0.01, 0.01), (696, 0.03, 0.01), (696, 0.06, 0.02)):
        name = f"accuracy delta, {n} in families of 3, {lost:.0%} lost, {won:.0%} won"
        rows.append((name, partial(accuracy, n=n, lost=lost, won=won, families=n // 3), won - lost))
    for alike in (0.0, 0.03):
        for lost, won in ((0.0, 0.0), (0.03, 0.01)):
            for how, twice in (("float32 too", True), ("  alone", False)):
                name = f"{how}: delta over machines, {alike:.0%} alike, {lost:.1%} lost"
                rows.append((name, partial(machines, lost=lost, won=won, alike=alike, twice=twice), (won - lost) * 5 / 6))
    rows += [("speed ratio, 5 rounds", speed, 0.9), ("speed ratio, 5 rounds, 10 % disturbed", partial(speed, disturbed=0.1), 0.9)]
    for k, (name, estimates, truth) in enumerate(rows):
        rng = np.random.default_rng([1, k])
        each = [estimates(rng) for _ in range(runs)]
        limits = [(e.low, e.high) for e in each if e.low is not None and e.high is not None]
        below, above = sum(truth < low for low, _ in limits), sum(truth > high for _, high in limits)
        n = max(len(limits), 1)
        print(
            f"{name:<58} {share(n - below - above, n)} | {share(below, n)} | {share(above, n)} | {runs - len(limits)}", flush=True
        )


def false_verdicts(runs: int) -> None:
    """Of estimates whose true value is exactly the bound: one rule at a time, and a variant at all of them at once."""
    print(f"\nVerdicts where the truth is exactly the bound, {runs} runs: false PASS | FAIL\n")
    cases: dict[str, tuple[str, Estimates, float]] = {
        "kld_mean": ("0.02 nats", mean_of(divergences, MIXED, 0.35), 1.0),
        "ppl_ratio": ("2 %", mean_of(losses, 11, math.log(1.02), transform="exp"), 1.0),
        "acc_delta/all": ("2 pp", partial(accuracy, n=696, lost=0.035, won=0.015, families=536), 100.0),
        "speed_ratio": ("10 %", speed, 1.0),
    }
    rules = [Rule(metric=name, margin=margin) for name, (margin, _, _) in cases.items()]
    metrics: list[dict[str, Any]] = [{} for _ in range(runs)]
    failed = np.zeros((len(rules), runs), bool)
    for k, (rule, (margin, estimates, scale)) in enumerate(zip(rules, cases.values())):
        rng, bound, passed = np.random.default_rng([2, k]), bound_of(rule), 0
        for run in range(runs):
            e = estimates(rng)
            metrics[run][rule.metric] = as_metric(rule.metric, e, CONFIDENCE, scale)
            verdict = judge(bound, metrics[run][rule.metric]).verdict
            passed += verdict == "PASS"
            failed[k, run] = verdict == "FAIL"
        print(f"{f'{rule.metric}, {margin}':<30} {share(passed, runs)} | {share(int(failed[k].sum()), runs)}")
    settings = params.load(harness.ROOT / "params.yaml")
    name, variant = next((n, v) for n, v in settings.variants.items() if n != settings.reference)
    gate = settings.gate.model_copy(update={"rules": rules, "required": [name]})
    settings = settings.model_copy(update={"gate": gate, "variants": {name: variant}})
    result: Any = {
        "status": "ok", "reason": None, "reference": settings.reference, "quantizer": variant.quantizer, "engine": variant.engine,
        "asked": variant.options, "engine_options": variant.engine_options, "inputs": {},
    }  # fmt: skip
    both = [verdicts.of({name: result | {"metrics": m}}, settings)["verdict"] for m in metrics]
    print(f"\nA variant at all {len(rules)} bounds: PASS {share(both.count('PASS'), runs)}; FAIL without correction ", end="")
    print(f"{share(int(failed.any(axis=0).sum()), runs)}\nFAIL after Holm {share(both.count('FAIL'), runs)}")


def choosing(runs: int, candidates: int = 20) -> None:
    """False PASS of whole procedures over candidates whose true KLD is exactly the margin: any that passes (the best of what was
    listed), and the fixed sequence of `certify`. All are measured on the same documents; `alike`: how much of the documents'
    spread they share. A person who looks again and again, a commit a try, does what the first does."""
    print(f"\n{candidates} candidates exactly at the margin of 0.02 nats ({runs} runs)")
    rule = bound_of(Rule(metric="kld_mean", margin="0.02 nats"))
    looks = (1, 2, 4, 8, candidates)
    for alike in (0.0, 0.5, 0.9):
        rng = np.random.default_rng(9)
        any_of, first = dict.fromkeys(looks, 0), 0
        for _ in range(runs):
            passes = [_passes(rule, sizes_and, rng) for sizes_and in _alike(rng, candidates, alike)]
            first += passes[0]  # the sequence goes on only behind a PASS, which is false already
            for k in looks:
                any_of[k] += any(passes[:k])
        told = "; ".join(f"best of {k} {share(n, runs)}" for k, n in any_of.items())
        print(f"  {100 * alike:.0f} % of documents' spread shared: fixed sequence {share(first, runs)}; {told}")


def _alike(rng: Rng, candidates: int, alike: float) -> list[Rows]:
    """Divergences of candidates on the same documents, the mean of each 0.02."""
    doc = np.repeat(np.arange(len(TEXT)), TEXT)
    shared = rng.normal(size=len(TEXT))
    rows = []
    for _ in range(candidates):
        z = math.sqrt(alike) * shared + math.sqrt(1 - alike) * rng.normal(size=len(TEXT))
        means = 0.02 * np.exp(SPREAD * z - SPREAD * SPREAD / 2)
        rows.append((means[doc] * np.exp(rng.normal(-0.98, 1.4, len(doc))), doc))
    return rows


def _passes(rule: Any, rows: Rows, rng: Rng) -> bool:
    metric = as_metric("kld_mean", clustered(*rows, rng), CONFIDENCE)
    return judge(rule, metric).verdict == "PASS"


LOOKS, UNITS = 4, 44  # documents, in as many parts as looks


def looking(runs: int) -> None:
    """Verdicts by four O'Brien-Fleming looks beside those of one at the end (gating/sequential.py)."""
    print(f"\nFour looks, {runs} runs, truth exactly the bound: false PASS | FAIL at one look; PASS | FAIL at four | items used\n")

    def mean(values: Any, doc: Any, rng: Rng, confidence: float) -> Estimate:
        return clustered(values, doc, rng, "mean", confidence)

    def ratio(values: Any, doc: Any, rng: Rng, confidence: float) -> Estimate:
        return clustered(values, doc, rng, "exp", confidence)

    families = 464
    cases: dict[str, tuple[str, Callable[[Rng], Rows], Callable[..., Estimate], float, int]] = {
        "kld_mean, log-sd 0.25": ("0.02 nats", lambda rng: divergences(rng, [380] * UNITS, 0.25), mean, 1.0, UNITS),
        "kld_mean, log-sd 0.45": ("0.02 nats", lambda rng: divergences(rng, [380] * UNITS, SPREAD), mean, 1.0, UNITS),
        "ppl_ratio": ("2 %", lambda rng: losses(rng, UNITS, math.log(1.02)), ratio, 1.0, UNITS),
        "acc_delta/all": ("2 pp", lambda rng: answers(rng, 1392, 0.035, 0.015, families), accuracy_of, 100.0, families),
    }
    for k, (name, (margin, rows, estimate, scale, units)) in enumerate(cases.items()):
        rng, bound = np.random.default_rng([10, k]), bound_of(Rule(metric=name.split(",")[0], margin=margin))
        counts, used = [0] * 4, 0.0
        for _ in range(runs):
            drawn, part = rows(rng), 0.0
            for at, looks in ((0, 1), (2, LOOKS)):
                verdict, part = _looked(drawn, estimate, bound, scale, looks, units, rng)
                counts[at] += verdict == "PASS"
                counts[at + 1] += verdict == "FAIL"
            used += part
        told = " | ".join(share(count, runs) for count in counts)
        print(f"{name:<24} {told} | {100 * used / runs:.0f} %", flush=True)
    print("\nItems used by four looks, true value in margins; z: standard errors from half the margin to it, of all items\n")
    error, of_all = math.hypot(0.006, 0.126 / math.sqrt(380)) / math.sqrt(UNITS), max(4, runs // 4)
    for z in (3, 4, 5, 7):
        bound = bound_of(Rule(metric="ppl_ratio", margin=f"{100 * math.expm1(2 * z * error):.9f} %"))
        rng, row = np.random.default_rng([11, z]), []
        for true in (0, 0.25, 0.5, 1, 1.5):
            ends = [_looked(losses(rng, UNITS, true * 2 * z * error), ratio, bound, 1.0, LOOKS, UNITS, rng) for _ in range(of_all)]
            verdicts_of = [verdict for verdict, _ in ends]
            passed, failed = (100 * verdicts_of.count(v) / of_all for v in ("PASS", "FAIL"))
            row.append(f"{true:g}: {100 * sum(used for _, used in ends) / of_all:.0f} % (PASS {passed:.0f}, FAIL {failed:.0f})")
        print(f"z {z}: {'; '.join(row)}", flush=True)


def _looked(
    rows: Rows, estimate: Callable[..., Estimate], bound: Bound, scale: float, looks: int, units: int, rng: Rng
) -> tuple[str, float]:
    """(the verdict, the share of items that it took)."""
    verdict = ""
    for look in range(1, looks + 1):
        values, of = (column[rows[1] < units * look // looks] for column in rows)
        e = estimate(values, of, rng, level(look, looks, CONFIDENCE))
        verdict = judge(bound, as_metric(bound.metric, e, CONFIDENCE, scale)).verdict
        if verdict != "INCONCLUSIVE":
            break
    return verdict, look / looks


def pairing(folder: Path) -> None:
    """Items needed for the same half-width: lm-eval's stderrs of two scores, and the paired interval of the gate."""
    files = {p.stem: p for p in sorted(folder.glob("*.jsonl"))}
    if "bf16" not in files:
        print(f"\n{folder} holds no bf16.jsonl: items needed against lm-eval's comparison are not measured")
        return
    answers = {v: [r for r in artifacts.read_jsonl(p) if r["acc"] is not None] for v, p in files.items()}
    reference = answers.pop("bf16")
    print("\nTimes fewer items than lm-eval's unpaired comparison, for an interval as wide: the paired interval of the gate (wider")
    print("of Newcombe and families) | the plain variances, (p(1-p) + q(1-q)) / (changed - delta^2)\n")
    for variant, rows in answers.items():
        pairs = list(zip(rows, reference))
        tasks = dict.fromkeys(r["task"] for r in reference)
        parts = [f"{task} {_fewer([p for p in pairs if p[1]['task'] == task])}" for task in tasks]
        print(f"{variant:<10} " + ", ".join([*parts, f"all {_fewer(pairs)}"]))


def _fewer(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    x, y = (np.array(acc) for acc in zip(*((a["acc"], b["acc"]) for a, b in pairs)))
    n, lost, won, both = len(pairs), int((y > x).sum()), int((x > y).sum()), int((x * y).sum())
    paired = intervals.paired_difference(both, lost, won, n - both - lost - won, confidence=CONFIDENCE)
    families = [f"{a['task']}/{a['cluster']}" for a, _ in pairs]
    if len(set(families)) < n:
        paired = intervals.outer(paired, clustered(x - y, families, np.random.default_rng(5)))
    assert paired.low is not None and paired.high is not None
    unpaired = (x.var(ddof=1) + y.var(ddof=1)) / n  # lm-eval's stderr of each score, squared
    by_interval = float(norm.ppf(0.975)) ** 2 * unpaired / ((paired.high - paired.low) / 2) ** 2
    changed = (x - y).var()
    return f"{by_interval:.1f} | {f'{(x.var() + y.var()) / changed:.0f}' if changed else '–'} (n {n}, {lost + won} changed)"


def main(
    runs: Annotated[int, typer.Argument()] = 2000, folder: Annotated[Path, typer.Argument()] = artifacts.ARTIFACTS / "answers"
) -> None:
    """Simulate the coverage of intervals, false verdicts, and what choosing adds to them."""
    coverage(runs)
    false_verdicts(runs)
    choosing(max(4, runs // 4))
    looking(runs)
    pairing(folder)


if __name__ == "__main__":
    cli.run(main)
