"""Gate rules: a bound with a unit, and the verdict of an interval against it.

PASS: the whole interval is on the good side of the bound. FAIL: the whole interval is on the bad side. Else INCONCLUSIVE.
A metric that is missing, not a number or without an interval never passes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pipeline.core.errors import ParamsError
from pipeline.core.explain import did_you_mean
from pipeline.core.params import Params, Rule
from pipeline.core.records import Metric, RuleVerdict
from pipeline.metrics.definitions import DEFINITIONS, FLOORS, LOWER_BOUNDS, Definition, bounds_of, definition, timed
from pipeline.reporting.text import UNITS, number, unit_of
from pipeline.speed import hardware
from pipeline.speed.rounds import Looks
from pipeline.stats.intervals import FEW, Estimate, items_to_settle, one_sided_p

Word = Literal["PASS", "FAIL", "INCONCLUSIVE"]

# Metrics that are shown and not judged -> the metric to judge instead.
CENSORED = {"first_departure": "never_departs", "free_departure": "free_same", "free_same_floor": "free_same"}
FARTHEST = {"nats": 2.0, "ratio": 1.0}  # widest margins in unbounded units: a wider one protects nothing
MIN_CLUSTERS = FEW  # fewer are too few for a verdict on a resampled interval
QUANTITY = re.compile(r"^\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S.*?)\s*$")


@dataclass(frozen=True)
class Bound:
    """threshold: in the metric's own unit; text: as in the rule."""

    metric: str
    threshold: float
    better: Literal["lower", "higher"]
    text: str


@dataclass(frozen=True)
class Judgement:
    """settle: number of items that would decide; p_fail: one-sided p-value of "not past the bound", None without an interval."""

    verdict: Word
    reason: str
    settle: int | None = None
    p_fail: float | None = None


def applies(rule: Rule, variant: str) -> bool:
    return rule.variants is None or variant in rule.variants


def units_of(what: Definition) -> Mapping[str, float]:
    """{unit allowed in a rule: factor to the metric's own unit}."""
    return UNITS[what.unit].rule


def bound_of(rule: Rule) -> Bound:
    """A rule's bound in the metric's own unit.

    margin: how far past "no difference" the metric may be; gain: how far it must be on the good side; limit: an
    absolute bound. Against the baseline, the difference to it is bounded. Raises `ParamsError` for an unknown metric, a
    wrong unit, a negative or non-finite number, and a bound that nothing could fail or meet.
    """
    what = definition(rule.metric)
    if what is None:
        raise ParamsError(f"gate rule: metric {rule.metric!r} is not known{did_you_mean(rule.metric, list(DEFINITIONS))}")
    stem, kind, neutral = rule.metric.split("/")[0], rule.kind, neutral_of(rule, what)
    where, to_baseline = f"gate rule on {rule.metric}", rule.against == "baseline"
    for wrong, why in (
        (any(stem in names for names in FLOORS.values()), "it is a metric of the reference, which is not judged; use above: floor"),
        (rule.metric in CENSORED, f"it has no value if most never depart; use {CENSORED.get(rule.metric)}"),
        (rule.metric in LOWER_BOUNDS and to_baseline, "the change of a lower bound bounds no change; leave out against: baseline"),
        (rule.above and rule.metric not in FLOORS, f"only {' and '.join(FLOORS)} have a measured {rule.above}; leave out above"),
        (rule.machine and not timed(rule.metric), "it is the same on any machine; leave out machine"),
        (kind != "limit" and neutral is None, f"it has no value that means 'no difference'; use limit, not {kind}"),
    ):
        if wrong:
            raise ParamsError(f"{where}: {why}")
    amount = quantity(getattr(rule, kind), what, f"{where}: {kind}")
    text = f"{kind} {getattr(rule, kind)}" + (" against the baseline" if to_baseline else "")
    text += f" on machine {rule.machine}" if rule.machine else ""
    if kind == "margin" and amount > FARTHEST.get(what.unit, math.inf):
        unit, factor = next(iter(units_of(what).items()))
        raise ParamsError(f"{where}: {text} protects nothing; the widest margin is {FARTHEST[what.unit] / factor:g} {unit}")
    shift = amount if (kind == "margin") == (what.better == "lower") else -amount
    threshold = amount if neutral is None or kind == "limit" else neutral + shift
    bound = Bound(rule.metric, threshold, what.better, text)
    _refuse_meaningless(rule, what, bound)
    return bound


def neutral_of(rule: Rule, what: Definition) -> float | None:
    """The value that means "no difference": to the reference as defined, to the baseline 1 for a ratio, else 0."""
    if rule.against == "baseline":
        return None if what.unit == "p" else 1.0 if what.unit == "ratio" else 0.0
    return what.neutral


def _refuse_meaningless(rule: Rule, what: Definition, bound: Bound) -> None:
    """Raise `ParamsError` if all possible values are on one side of the bound."""
    low, high = _range(rule, what)
    least, most = (low, high) if bound.better == "lower" else (-high, -low)  # negated so that less is better
    edge = bound.threshold if bound.better == "lower" else -bound.threshold
    if edge >= most or edge < least:
        extent = f"lies between {low:g} and {high:g}" if high < math.inf else f"is at least {low:g}"
        never = "fail" if edge >= most else "be met"
        raise ParamsError(f"gate rule on {rule.metric}: {bound.text} can never {never} (it {extent} {what.unit})")


def _range(rule: Rule, what: Definition) -> tuple[float, float]:
    """Possible values of a metric, or of its difference to the baseline, in its own unit."""
    low, high = bounds_of(rule.metric)
    if what.unit == "pp":
        return -100.0, 100.0
    if rule.against == "baseline" and what.unit != "ratio":
        return (-1.0, 1.0) if what.unit == "fraction" else (-math.inf, math.inf)
    return max(low, 0.0) if low == -math.inf else low, min(high, 1.0) if what.unit in ("p", "fraction") else high


def quantity(text: str, what: Definition, where: str) -> float:
    """A text such as `1 pp`, `0.5 %` or `2 ms` in the metric's own unit."""
    units = units_of(what)
    match = QUANTITY.match(text)
    if not match or match.group(2) not in units:
        raise ParamsError(f"{where} = {text!r}: write a number and a unit ({', '.join(units)}), such as '1 {next(iter(units))}'")
    amount = float(match.group(1)) * units[match.group(2)]
    if not math.isfinite(amount) or amount < 0:
        raise ParamsError(f"{where} = {text!r}: must be a finite number that is not negative")
    return amount


def judge(bound: Bound, metric: Metric | None) -> Judgement:
    """Judge one metric against a bound."""
    if metric is None:
        return Judgement("FAIL", f"{bound.metric} is missing from the results")
    value, low, high, n = metric["value"], metric["low"], metric["high"], metric["n"]
    warnings = "; ".join(metric["warnings"])
    if value is None or not math.isfinite(value):
        return Judgement("FAIL", f"{bound.metric} has no value: {warnings or 'not a number'}")
    if n <= 0:
        return Judgement("FAIL", f"{bound.metric} rests on no items")
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return Judgement("INCONCLUSIVE", f"{bound.metric} has no interval: {warnings or 'unknown'}")
    near = 1e-9 * max(map(abs, (value, low, high)))  # a quotient and its logarithm round differently
    if not low - near <= value <= high + near:
        why = f"an interval that does not contain its value: {value:.4g} is not in [{low:.4g}, {high:.4g}]"
        return Judgement("INCONCLUSIVE", f"{bound.metric} has {why}")
    clusters = metric["clusters"]
    independent = metric["weight"] or clusters
    if independent is not None and independent < MIN_CLUSTERS - 0.5:
        few = f"{clusters} documents or item families"
        few += f" that weigh as {independent:.0f} equal ones" if clusters and independent < clusters - 0.5 else ""
        why = f"{bound.metric} rests on {few}; at least {MIN_CLUSTERS} are needed to judge it: ask for more in the tier"
        return Judgement("INCONCLUSIVE", why)
    sign = 1 if bound.better == "lower" else -1
    best, worst = sorted((sign * low, sign * high))
    edge, here = sign * bound.threshold, sign * value
    what = definition(bound.metric)
    factor = unit_of(what.unit if what else "").factor
    side = "at most" if bound.better == "lower" else "at least"
    asked = f"{side} {number(bound.threshold * factor, '.4g')} ({bound.text})"
    note = f" ({warnings})" if warnings else ""
    confidence = metric["confidence"]
    half = here - best if here > edge else worst - here
    p = one_sided_p(here - edge, half, df=max((independent or n) - 1, 1), confidence=confidence)
    if best > edge:
        return Judgement("FAIL", f"the whole interval is past the bound: {asked}{note}", p_fail=p)
    if bound.metric in LOWER_BOUNDS:
        return Judgement("INCONCLUSIVE", f"a lower bound cannot pass: the value is at least this; asked: {asked}{note}", p_fail=p)
    if worst <= edge:
        return Judgement("PASS", f"the whole interval is {asked}{note}", p_fail=p)
    estimate = Estimate(value, low, high, n, "", between=metric["between"])
    settle = items_to_settle(estimate, bound.threshold, confidence=confidence)
    return Judgement("INCONCLUSIVE", f"the interval contains the bound: {asked}{would_settle(settle, metric)}{note}", settle, p)


def of_class(rule: Rule, judgement: Judgement) -> Judgement:
    """Name the class of machine in the verdict of a limit on times; on a class other than the rule's it decides nothing."""
    if rule.limit is None or not timed(rule.metric):
        return judgement
    name, processor = hardware.of_timings()
    machine = f"machine {name} ({processor})" if name else f"a machine that {hardware.MACHINE} does not name"
    if rule.machine == name:
        return judgement
    if rule.machine is None:
        return replace(judgement, reason=f"{judgement.reason}, on {machine}")
    return Judgement("INCONCLUSIVE", f"timed on {machine}, and the limit is for {rule.machine}")


def would_settle(settle: int | None, metric: Metric | RuleVerdict) -> str:
    """How many more items would decide."""
    between = metric["between"]
    if settle is None and between:
        return f"; more rounds will not help: whole runs differ by {100 * between:g} % (compare.between_runs)"
    more = " (documents or families in proportion)" if metric["clusters"] else ""
    return f"; about {settle} in place of {metric['n']}{more} would settle it in 80 % of runs" if settle else ""


def judge_above(rule: Rule, metric: Metric | None, floors: Mapping[str, Metric]) -> tuple[Bound, Judgement]:
    """Judge a metric against a margin above the floor (or rounding), and return the bound of a PASS too. floors: the reference's.
    The floor is an estimate too: a PASS must hold above its lower limit, a FAIL above its upper one. Nothing passes without one."""
    name = FLOORS[rule.metric][0 if rule.above == "floor" else 1]
    floor = floors.get(name)
    usable = judge(Bound(name, math.inf, "lower", ""), floor)
    bound = bound_of(rule)
    bound = replace(bound, text=f"{bound.text} above {name}")
    if usable.verdict != "PASS" or floor is None or floor["low"] is None or floor["high"] is None:
        return bound, replace(usable, reason=f"nothing to count from: {usable.reason}")
    sign = 1 if bound.better == "lower" else -1
    loose = replace(bound, threshold=bound.threshold + sign * floor["high"])
    strict = replace(
        bound,
        threshold=bound.threshold + sign * floor["low"],
        text=f"{bound.text} {floor['value']:.3g} [{floor['low']:.3g}, {floor['high']:.3g}]",
    )
    judged, beyond = judge(strict, metric), judge(loose, metric)
    if judged.verdict == "FAIL" and beyond.verdict != "FAIL":
        reason = f"past the bound above {name}'s lower end, not above its upper: {judged.reason}"
        return strict, replace(beyond, verdict="INCONCLUSIVE", reason=reason)
    return strict, replace(judged, p_fail=beyond.p_fail)  # a FAIL and its p-value are claimed against the upper end


def looks_of(settings: Params, variant: str) -> Looks:
    """Two looks if rounds may be added and a gate rule bounds this variant's decode rate, else one. Rules decide when to stop and
    not what a round measures, so `benchmark` does not depend on them in dvc.yaml."""
    setup = settings.amount.benchmark
    rules = [r for r in settings.gate.rules if r.metric == "speed_ratio" and applies(r, variant)]
    bounds = tuple(bound_of(r).threshold for r in rules) if variant != settings.reference else ()
    return Looks(2 if bounds and (setup.max_rounds or 0) > setup.rounds else 1, bounds, settings.compare.between_runs.ratio)


def worst(verdicts: Collection[str]) -> Word:
    """FAIL before INCONCLUSIVE before PASS; FAIL for none at all."""
    words: tuple[Word, ...] = ("FAIL", "INCONCLUSIVE", "PASS")
    return next((word for word in words if word in verdicts), "FAIL")
