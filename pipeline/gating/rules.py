"""Gate rules: a bound with a unit, and the verdict of an interval against it.

PASS: the whole interval is on the good side of the bound. FAIL: the whole interval is on the bad side. Else INCONCLUSIVE.
What is missing, not a number, or without an interval is never a PASS.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipeline.core.errors import ParamsError
from pipeline.core.explain import did_you_mean
from pipeline.core.params import Params, Rule
from pipeline.metrics.definitions import DEFINITIONS, FLOORS, Definition, bounds_of, definition
from pipeline.reporting.text import UNITS as READ
from pipeline.reporting.text import number, unit_of
from pipeline.speed.rounds import Looks
from pipeline.stats.intervals import FEW, Estimate, items_to_settle, one_sided_p

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]

UNITS = {unit: read.rule for unit, read in READ.items()}  # unit of a metric -> {unit a rule may use: factor}
# shown, but not to be judged -> what says the same of every variant
CENSORED = {"first_departure": "never_departs", "free_departure": "free_same", "free_same_floor": "free_same"}
FARTHEST = {"nats": 2.0, "ratio": 1.0}  # the widest margin of a metric that has no end: past it nothing is left to protect
MIN_CLUSTERS = FEW  # below this a resampled interval is not to be trusted with a verdict
QUANTITY = re.compile(r"^\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S.*?)\s*$")


@dataclass(frozen=True)
class Bound:
    """threshold: in the metric's own unit; text: as the rule says it."""

    metric: str
    threshold: float
    better: Literal["lower", "higher"]
    text: str


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    reason: str
    settle: int | None = None
    p_fail: float | None = None  # one-sided, of "not past the bound"; None where the verdict rests on no interval


def bound_of(rule: Rule) -> Bound:
    """A rule's bound in the metric's own unit.

    margin: how far past "no difference" the metric may be; gain: how far it must be on the good side; limit: an
    absolute bound. Against the baseline, what is bounded is `difference` to it. Raises `ParamsError` for an unknown
    metric, a wrong unit, a negative or non-finite number, and for a bound that nothing could fail or nothing could meet.
    """
    what = definition(rule.metric)
    if what is None:
        raise ParamsError(f"gate rule: metric {rule.metric!r} is not known{did_you_mean(rule.metric, list(DEFINITIONS))}")
    if any(rule.metric.split("/")[0] in own for own in FLOORS.values()):
        raise ParamsError(f"gate rule: {rule.metric!r} is a figure of the reference, which is not judged; use above: floor")
    if rule.metric in CENSORED:
        raise ParamsError(f"gate rule: {rule.metric!r} has no value where most never depart; use {CENSORED[rule.metric]}")
    if rule.above and rule.metric not in FLOORS:
        raise ParamsError(f"gate rule on {rule.metric}: only {' and '.join(FLOORS)} have a measured {rule.above}; leave out above")
    kind = next(k for k in ("margin", "gain", "limit") if getattr(rule, k) is not None)
    amount = quantity(getattr(rule, kind), what, f"gate rule on {rule.metric}: {kind}")
    text = f"{kind} {getattr(rule, kind)}" + (" against the baseline" if rule.against == "baseline" else "")
    if kind == "limit":
        return _meaningful(rule, what, Bound(rule.metric, amount, what.better, text))
    neutral = neutral_of(rule, what)
    if neutral is None:
        raise ParamsError(f"gate rule on {rule.metric}: it has no value that means 'no difference'; use limit, not {kind}")
    if kind == "margin" and amount > FARTHEST.get(what.unit, math.inf):
        most = f"{FARTHEST[what.unit] / UNITS[what.unit][(unit := next(iter(UNITS[what.unit])))]:g} {unit}"
        raise ParamsError(f"gate rule on {rule.metric}: {text} protects nothing; the widest margin is {most}")
    away = amount if kind == "margin" else -amount
    threshold = neutral + (away if what.better == "lower" else -away)
    return _meaningful(rule, what, Bound(rule.metric, threshold, what.better, text))


def neutral_of(rule: Rule, what: Definition) -> float | None:
    """What means "no difference": of a metric to the reference its own value; to the baseline 1 for a ratio, else 0."""
    if rule.against == "baseline":
        return None if what.unit == "p" else 1.0 if what.unit == "ratio" else 0.0
    return what.neutral


def _meaningful(rule: Rule, what: Definition, bound: Bound) -> Bound:
    """The bound. Raises `ParamsError` if all possible values are on one side of it."""
    low, high = _range(rule, what)
    least, most = (low, high) if bound.better == "lower" else (-high, -low)  # turned so that less is better
    edge = bound.threshold if bound.better == "lower" else -bound.threshold
    if edge >= most or edge < least:
        extent = f"lies between {low:g} and {high:g}" if high < math.inf else f"is at least {low:g}"
        never = "fail" if edge >= most else "be met"
        raise ParamsError(f"gate rule on {rule.metric}: {bound.text} can never {never} (it {extent} {what.unit})")
    return bound


def _range(rule: Rule, what: Definition) -> tuple[float, float]:
    """Possible values of a metric, or of its difference to the baseline, in its own unit."""
    low, high = bounds_of(rule.metric)
    if what.unit == "pp":
        return -100.0, 100.0
    if rule.against == "baseline" and what.unit != "ratio":
        return (-1.0, 1.0) if what.unit == "fraction" else (-math.inf, math.inf)
    return max(low, 0.0) if low == -math.inf else low, min(high, 1.0) if what.unit in ("p", "fraction") else high


def quantity(text: str, what: Definition, where: str) -> float:
    """`1 pp`, `0.5 %`, `2 ms` in the metric's own unit."""
    units = UNITS[what.unit]
    match = QUANTITY.match(text)
    if not match or match.group(2) not in units:
        raise ParamsError(f"{where} = {text!r}: write a number and a unit ({', '.join(units)}), such as '1 {next(iter(units))}'")
    amount = float(match.group(1)) * units[match.group(2)]
    if not math.isfinite(amount) or amount < 0:
        raise ParamsError(f"{where} = {text!r}: must be a finite number that is not negative")
    return amount


def judge(bound: Bound, metric: dict[str, Any] | None) -> Judgement:
    """Verdict of one metric (as in metrics/<variant>.json) against a bound."""
    if metric is None:
        return Judgement("FAIL", f"{bound.metric} is missing from the results")
    value, low, high = metric.get("value"), metric.get("low"), metric.get("high")
    if not _number(value):
        why = metric.get("reason") or "; ".join(metric.get("warnings") or []) or "not a number"
        return Judgement("FAIL", f"{bound.metric} has no value: {why}")
    n = metric.get("n")
    if n is None or not hasattr(n, "__index__") or isinstance(n, bool) or n <= 0:
        return Judgement("FAIL", f"{bound.metric} rests on no items" + (f" (n = {n!r})" if n else ""))
    if low is None or high is None or not (_number(low) and _number(high)):
        return Judgement("INCONCLUSIVE", f"{bound.metric} has no interval: {'; '.join(metric.get('warnings') or ['unknown'])}")
    near = 1e-9 * max(map(abs, (value, low, high)))  # a quotient is rounded in another way than its logarithm
    if not low - near <= value <= high + near:
        why = f"an interval that does not contain its value: {value:.4g} is not in [{low:.4g}, {high:.4g}]"
        return Judgement("INCONCLUSIVE", f"{bound.metric} has {why}")
    independent = metric.get("weight") or metric.get("clusters")
    if independent is not None and independent < MIN_CLUSTERS - 0.5:
        few = f"{metric['clusters']} documents or item families"
        few += f" that weigh as {independent:.0f} equal ones" if independent < metric["clusters"] - 0.5 else ""
        why = f"{bound.metric} rests on {few}; at least {MIN_CLUSTERS} are needed to judge it: ask for more in the tier"
        return Judgement("INCONCLUSIVE", why)
    sign = 1 if bound.better == "lower" else -1
    best, worst = sorted((sign * low, sign * high))
    edge = sign * bound.threshold
    side = "at most" if bound.better == "lower" else "at least"
    what = definition(bound.metric)
    asked = f"{side} {number(bound.threshold * unit_of(what.unit if what else '').factor, '.4g')} ({bound.text})"
    here, df = sign * float(value or 0), max((independent or metric["n"]) - 1, 1)
    confidence = metric.get("confidence") or 0.95
    p = one_sided_p(here - edge, here - best if here > edge else worst - here, df=df, confidence=confidence)
    if worst <= edge:
        return Judgement("PASS", f"the whole interval is {asked}{_notes(metric)}", p_fail=p)
    if best > edge:
        return Judgement("FAIL", f"the whole interval is past the bound: {asked}{_notes(metric)}", p_fail=p)
    estimate = Estimate(value, low, high, int(metric["n"]), "", between=metric.get("between"))
    settle = items_to_settle(estimate, bound.threshold, confidence=confidence)
    reason = f"the interval contains the bound: {asked}{would_settle(settle, metric)}{_notes(metric)}"
    return Judgement("INCONCLUSIVE", reason, settle, p)


def would_settle(settle: int | None, metric: dict[str, Any]) -> str:
    """How many more items would decide."""
    if settle is None and metric.get("between"):
        return f"; more rounds will not help: whole runs differ by {100 * metric['between']:g} % (compare.between_runs)"
    more = " (documents or families in proportion)" if metric.get("clusters") else ""
    return f"; about {settle} in place of {metric['n']}{more} would settle it in 80 % of runs" if settle else ""


def _notes(metric: dict[str, Any]) -> str:
    warnings = metric.get("warnings") or []
    return f" ({'; '.join(warnings)})" if warnings else ""


def judge_above(rule: Rule, metric: dict[str, Any] | None, floors: dict[str, Any]) -> tuple[Bound, Judgement]:
    """Verdict of a metric against a margin above the floor (or the rounding), and the bound that a PASS must meet. floors: metrics
    of the reference. The floor is an estimate too: a PASS must hold above its lower bound and a FAIL above its upper one. A floor
    that is missing, null or without an interval is never a PASS."""
    bound = bound_of(rule)
    name = FLOORS[rule.metric][0 if rule.above == "floor" else 1]
    floor = floors.get(name)
    usable = judge(Bound(name, math.inf, "lower", ""), floor)
    bound = replace(bound, text=f"{bound.text} above {name}")
    if floor is None or usable.verdict != "PASS":
        return bound, replace(usable, reason=f"nothing to count from: {usable.reason}")
    sign = 1 if bound.better == "lower" else -1
    strict, loose = (replace(bound, threshold=bound.threshold + sign * floor[side]) for side in ("low", "high"))
    strict = replace(strict, text=f"{bound.text} {floor['value']:.3g} [{floor['low']:.3g}, {floor['high']:.3g}]")
    judged, beyond = judge(strict, metric), judge(loose, metric)
    if judged.verdict == "FAIL" and beyond.verdict != "FAIL":
        reason = f"past the bound above {name}'s lower end, not above its upper: {judged.reason}"
        return strict, replace(beyond, verdict="INCONCLUSIVE", reason=reason)
    return strict, replace(judged, p_fail=beyond.p_fail)  # a FAIL is claimed against the upper end, and so is its p-value


def looks_of(settings: Params, variant: str) -> Looks:
    """Two looks if rounds may be added and a gate rule bounds this variant's decode rate; else one. Rules decide when to stop, not
    what a round measures: so `benchmark` does not depend on them in dvc.yaml."""
    setup = settings.amount.benchmark
    own = [r for r in settings.gate.rules if r.metric == "speed_ratio" and (r.variants is None or variant in r.variants)]
    bounds = tuple(bound_of(r).threshold for r in own) if variant != settings.reference else ()
    return Looks(2 if bounds and (setup.max_rounds or 0) > setup.rounds else 1, bounds, settings.compare.between_runs.ratio)


def worst(verdicts: list[Verdict]) -> Verdict:
    """FAIL before INCONCLUSIVE before PASS; of nothing at all: FAIL."""
    for verdict in ("FAIL", "INCONCLUSIVE", "PASS"):
        if verdict in verdicts:
            return verdict  # type: ignore[return-value]
    return "FAIL"


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
