"""Results and rules -> each variant's verdict, and the one that decides.

How often a verdict is wrong: PASS needs all required rules to pass, so that a bad figure must slip through its own rule,
nominally (1 - confidence) / 2 of the time (2 to 3.5 % in tests/bench/simulations.py), however many rules there are
(intersection-union; Berger 1982). FAIL needs only one, so more rules would fail more good variants: a FAIL must hold after
Holm's correction over the required rules of its variant, else it is INCONCLUSIVE. The family is one variant's: its verdict must
not depend on the other variants. Rules on exact figures (sizes, counts) and on missing ones are not counted: they do not fail by
chance.
"""

from __future__ import annotations

from typing import Any

from pipeline.core import artifacts
from pipeline.core.explain import some
from pipeline.core.params import Params, Rule, Variant
from pipeline.gating.rules import Bound, Judgement, Verdict, bound_of, judge, judge_above, neutral_of, worst, would_settle
from pipeline.metrics.definitions import FLOORS, definition
from pipeline.stats.intervals import Estimate, holm, items_to_settle

OWN_SIZE = ("ms", "s", "bytes", "tok/s", "req/s", "bits", "ppl")  # only the baseline's value says how wide a margin is
UNJUDGED = "judged where a merge names the commit it goes into: `python -m pipeline.gate --enforce --baseline REV`"


def of(results: dict[str, dict[str, Any]], settings: Params, beside: dict[str, Any] | None = None) -> dict[str, Any]:
    """Judge every variant but the reference. results: {variant: its metrics/<variant>.json}; beside: see `baseline.beside`."""
    variants: dict[str, dict[str, Any]] = {}
    results = {name: _as_asked(result, settings.compare.confidence) for name, result in results.items()}
    for name, variant in settings.variants.items():
        if name == settings.reference:
            continue
        result = results.get(name)
        floors, then = _floors(result, results.get(settings.reference)), beside and beside["variants"][name]
        own = [rule for rule in settings.gate.rules if rule.variants is None or name in rule.variants]
        rules = [_apply(rule, result, floors, then) for rule in own]
        family = _hold_fails(rules, settings.compare.confidence)
        verdict, reason = _verdict(result, rules, variant, settings.reference)
        verdict, reason = _hold_lost(verdict, reason, then)
        required = name in settings.gate.required
        variants[name] = {"verdict": verdict, "reason": reason, "required": required, "rules": rules, "family": family}
    deciding: list[Verdict] = [
        "FAIL" if v["verdict"] == "UNSUPPORTED" else v["verdict"]
        for name, v in variants.items()
        if v["required"] or name not in results  # what is listed and was lost is no advisory matter
    ]
    overall = worst(deciding)
    metrics = results.get(settings.reference, {}).get("metrics", {})
    floor = {name: metrics.get(name) for names in FLOORS.values() for name in names}
    policy = {"reference": settings.reference, "inconclusive": settings.gate.inconclusive}
    return {"verdict": overall, **policy, "floor": floor, "variants": variants}


def _as_asked(result: dict[str, Any], confidence: float) -> dict[str, Any]:
    """A variant's results, without intervals of another confidence or unit."""
    metrics = dict(result["metrics"])
    for name, m in metrics.items():
        what = definition(name)
        if m is None or what is None or m.get("low") is None:
            continue
        faults = [f"it is of {m.get('confidence')!r} confidence, not {confidence}"] * (m.get("confidence") != confidence)
        faults += [f"its unit is {m.get('unit')}, not {what.unit}"] * (m.get("unit", what.unit) != what.unit)
        if faults:
            metrics[name] = m | {"low": None, "high": None, "confidence": None, "warnings": faults}
    return result | {"metrics": metrics}


def _floors(result: dict[str, Any] | None, reference: dict[str, Any] | None) -> dict[str, Any]:
    """The reference's metrics; the noise floor null if the variant's results were made with another."""
    made = [(r or {}).get("inputs", {}).get(str(artifacts.FLOOR)) for r in (result, reference)]
    metrics: dict[str, Any] = (reference or {}).get("metrics", {})
    if made[0] is None or made[0] != made[1]:
        why = f"the results were not made with the {artifacts.FLOOR} of the reference; run `dvc repro`"
        metrics = metrics | {name: {"value": None, "reason": why} for names in FLOORS.values() for name in names}
    return metrics


def _apply(rule: Rule, result: dict[str, Any] | None, floors: dict[str, Any], then: dict[str, Any] | None = None) -> dict[str, Any]:
    what = definition(rule.metric)
    bound = bound_of(rule)
    assert what is not None  # bound_of has refused unknown metrics
    metric = (result or {}).get("metrics", {}).get(rule.metric)
    judgement: Judgement = judge(bound, metric)
    if rule.above is not None:
        bound, judgement = judge_above(rule, metric, floors)
    if rule.against == "baseline":
        metric, judgement = _beside(rule, bound, metric, then)
    return {
        "metric": rule.metric, "against": rule.against, "bound": bound.text, "threshold": bound.threshold, "better": bound.better,
        "neutral": neutral_of(rule, what), "unit": what.unit, "required": rule.required,
        "verdict": judgement.verdict, "reason": judgement.reason,
        "settle": judgement.settle, "p_fail": judgement.p_fail, "p_fail_holm": judgement.p_fail,
        **{k: (metric or {}).get(k) for k in ("value", "low", "high", "n", "clusters", "between")},
    }  # fmt: skip


def _beside(
    rule: Rule, bound: Bound, metric: dict[str, Any] | None, then: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, Judgement]:
    """(difference to the baseline, its judgement); without a baseline never a PASS."""
    if then is None:
        return None, Judgement("INCONCLUSIVE", UNJUDGED)
    if rule.metric in then["lost"] or metric is None or metric.get("value") is None:
        return None, judge(bound, None if rule.metric in then["lost"] else metric)
    theirs = then["values"].get(rule.metric, {})
    figure, had = then["figures"].get(rule.metric), theirs.get("value")
    if figure is None:
        why = f" ({theirs['reason'].partition('; run')[0]})" if theirs.get("reason") else ""
        return None, Judgement("INCONCLUSIVE", f"no baseline: {rule.metric} is new, or had no value there{why}")
    if rule.margin and figure["unit"] in OWN_SIZE and had is not None and abs(bound.threshold) >= had:
        return figure, Judgement("FAIL", f"{bound.text} is as much as all the baseline has, {had:.3g}, so it protects nothing")
    return figure, judge(bound, figure)


def _hold_lost(verdict: Verdict | str, reason: str, then: dict[str, Any] | None) -> tuple[Verdict | str, str]:
    """FAIL where this run lacks metrics of the baseline: they may have got worse."""
    lost = then["lost"] if then else []
    if not lost or verdict == "UNSUPPORTED":
        return verdict, reason
    why = f"lost since the baseline, which has them: {some(lost, 5)}"
    return "FAIL", f"{why}; {reason}" if verdict == "FAIL" else why


def _hold_fails(rules: list[dict[str, Any]], confidence: float) -> dict[str, Any]:
    """Turn each FAIL that does not hold after Holm's correction into INCONCLUSIVE, in place; returns the family's facts."""
    level = round((1 - confidence) / 2, 12)
    family = [r for r in rules if r["required"] and r["p_fail"] is not None and r["low"] != r["high"]]
    for rule, adjusted in zip(family, holm([r["p_fail"] for r in family])):
        rule["p_fail_holm"] = adjusted
        if rule["verdict"] == "FAIL" and adjusted > level:
            estimate = Estimate(rule["value"], rule["low"], rule["high"], rule["n"], "", between=rule["between"])
            strict = adjusted / rule["p_fail"]
            rule["settle"] = items_to_settle(estimate, rule["threshold"], confidence=confidence, family=strict)
            rule["verdict"] = "INCONCLUSIVE"
            rule["reason"] += (
                f", but not by enough for one of {len(family)} rules tried at once: by chance alone one of them would be "
                f"as far past its bound in up to {100 * adjusted:.2g} % of runs (Holm; at most {100 * level:.3g} % is asked)"
                f"{would_settle(rule['settle'], rule)}"
            )
    return {"rules": len(family), "correction": "Holm 1979", "level": level, "sided": "one"}


def _verdict(
    result: dict[str, Any] | None, rules: list[dict[str, Any]], variant: Variant, reference: str
) -> tuple[Verdict | str, str]:
    """A variant's verdict and its reason in words."""
    if result is None:
        return "FAIL", "there are no results for this variant"
    made = (result["reference"], result["quantizer"], result["engine"], result["asked"], result["engine_options"])
    if made != (reference, variant.quantizer, variant.engine, variant.options, variant.engine_options):
        return "FAIL", "its results were made for other params; run `dvc repro`"
    if result["status"] == "unsupported":
        return "UNSUPPORTED", result["reason"]
    if result["status"] != "ok":
        return "FAIL", f"{result['status']}: {result['reason']}"
    needed = [r for r in rules if r["required"]]
    if not needed:
        return "FAIL", "no required rule applies to this variant, so nothing vouches for it"
    verdict = worst([r["verdict"] for r in needed])
    deciding = [r for r in needed if r["verdict"] == verdict]
    if verdict == "PASS":
        return verdict, f"all {len(needed)} required rules pass"
    return verdict, "; ".join(f"{r['metric']}: {r['reason']}" for r in deciding)
