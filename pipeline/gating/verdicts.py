"""Results and rules -> a verdict on each variant and overall, and the same for a merge.

How often a verdict is wrong: a PASS needs all required rules to pass, so a bad value must slip through its own rule, nominally in
(1 - confidence) / 2 of runs (2 to 3.5 % in tests/bench/simulations.py), whatever the number of rules (intersection-union; Berger
1982). A FAIL needs only one rule, so more rules would fail more good variants: it must hold after Holm's correction over the
variant's required rules, else it is INCONCLUSIVE. The family is one variant's, whose verdict must not depend on other variants.
Rules on exact values (sizes, counts) or missing ones do not count in it: they do not fail by chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.core import artifacts, records
from pipeline.core.errors import ArtifactError
from pipeline.core.explain import some
from pipeline.core.params import Params, Rule, Variant
from pipeline.core.records import Family, Metric, RuleVerdict, VariantResult, VariantVerdict, Verdict
from pipeline.gating import baseline, freshness, policy
from pipeline.gating.baseline import Changes, VariantChanges
from pipeline.gating.policy import Loosening
from pipeline.gating.rules import Bound, Judgement, applies, bound_of, judge, judge_above, neutral_of, of_class, worst, would_settle
from pipeline.gating.sequential import early
from pipeline.metrics.builder import unknown
from pipeline.metrics.definitions import FLOORS, definition
from pipeline.serving import results as server_results
from pipeline.stats.intervals import Estimate, holm, items_to_settle

OPEN_ENDED = ("ms", "s", "bytes", "tok/s", "req/s", "bits", "ppl")  # units in which only the baseline shows how wide a margin is
UNJUDGED = "judged where a merge names the commit it goes into: `quantgate gate --enforce --baseline REV`"


@dataclass(frozen=True)
class Merge:
    """changes: None without a baseline; absent: files not here and so not compared with dvc.lock."""

    verdict: Verdict
    results: dict[str, VariantResult] = field(default_factory=dict)
    changes: Changes | None = None
    loosened: list[Loosening] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)


def load_results(settings: Params) -> dict[str, VariantResult]:
    """Results by variant, without missing ones."""
    paths = {name: artifacts.metrics(name) for name in settings.variants}
    results = {name: records.read(path, VariantResult) for name, path in paths.items() if path.exists()}
    server_results.add(results, settings)
    return results


def for_merge(settings: Params, rev: str | None = None) -> Merge:
    """Judge the results on file for a merge. rev: the commit merged into; else QUANTGATE_BASELINE or gate.baseline. Raises
    `ArtifactError` for stale results or a missing baseline."""
    if rev is not None and not rev.strip():
        raise ArtifactError("no baseline: --baseline is empty; name the commit merged into, or leave it out")
    absent, results = freshness.check(settings), load_results(settings)
    changes, loosened = None, []
    if (named := baseline.wanted(rev, settings)) is not None:
        base = baseline.read(named)
        changes = baseline.compare(base, results, settings)
        loosened = policy.compare(settings, base.params, results)
    elif any(rule.against == "baseline" for rule in settings.gate.rules):
        name = f"name the commit: --baseline, {baseline.VARIABLE} or gate.baseline"
        raise ArtifactError(f"no baseline: params.yaml has rules against it; {name}")
    verdict: Verdict = artifacts.jsonable(of(results, settings, changes))
    return Merge(policy.hold(verdict, loosened), results, changes, loosened, absent)


def of(results: dict[str, VariantResult], settings: Params, changes: Changes | None = None) -> Verdict:
    """Judge every variant except the reference. changes: since the baseline."""
    results = {name: _as_asked(result, settings.compare.confidence) for name, result in results.items()}
    reference = results.get(settings.reference)
    variants: dict[str, VariantVerdict] = {}
    for name, variant in settings.variants.items():
        if name == settings.reference:
            continue
        result, change = results.get(name), changes.variants[name] if changes else None
        floors = _floors(result, reference, settings.compare.confidence)
        rules = [_apply(rule, result, floors, change) for rule in settings.gate.rules if applies(rule, name)]
        family = _hold_fails(rules, settings.compare.confidence)
        for rule in rules:
            if not result or not (ended := early(result, rule["metric"])):
                continue
            if rule["verdict"] == "PASS" and rule["low"] == rule["high"]:
                rule["verdict"], rule["reason"] = "INCONCLUSIVE", "a count so far says nothing about the rest"
            rule["reason"] += ended if rule["verdict"] == "INCONCLUSIVE" else ""
        verdict, reason = _verdict(result, rules, variant, settings.reference)
        if change and change.lost and verdict != "UNSUPPORTED":  # a lost metric may have got worse
            lost = f"lost since the baseline, which has them: {some(change.lost, 5)}"
            verdict, reason = "FAIL", f"{lost}; {reason}" if verdict == "FAIL" else lost
        required = name in settings.gate.required
        variants[name] = {"verdict": verdict, "reason": reason, "required": required, "rules": rules, "family": family}
    # a listed variant without results always counts
    deciding = [v["verdict"] for name, v in variants.items() if v["required"] or name not in results]
    metrics = reference["metrics"] if reference else {}
    return {
        "verdict": worst(["FAIL" if word == "UNSUPPORTED" else word for word in deciding]),
        "reference": settings.reference,
        "inconclusive": settings.gate.inconclusive,
        "floor": {name: metrics.get(name) for names in FLOORS.values() for name in names},
        "variants": variants,
    }


def _as_asked(result: VariantResult, confidence: float) -> VariantResult:
    """A variant's results without intervals of another confidence or unit."""
    metrics = dict(result["metrics"])
    for name, metric in metrics.items():
        what = definition(name)
        if what is None or metric["low"] is None:
            continue
        pairs = (("confidence", metric["confidence"], confidence), ("unit", metric["unit"], what.unit))
        if faults := [f"its {key} is {has}, not {asked}" for key, has, asked in pairs if has != asked]:
            metrics[name] = {**metric, "low": None, "high": None, "warnings": faults}
    return {**result, "metrics": metrics}


def _floors(result: VariantResult | None, reference: VariantResult | None, confidence: float) -> dict[str, Metric]:
    """The reference's metrics, with a null noise floor if the variant's results were made with another."""
    if reference is None:
        return {}
    file = str(artifacts.FLOOR)
    made_with = reference["inputs"].get(file)
    if result is not None and made_with is not None and result["inputs"].get(file) == made_with:
        return reference["metrics"]
    why = f"the results were not made with the {file} of the reference; run `dvc repro`"
    nothing = {name: unknown(name, why, confidence) for names in FLOORS.values() for name in names}
    return reference["metrics"] | nothing


def _apply(rule: Rule, result: VariantResult | None, floors: Mapping[str, Metric], change: VariantChanges | None) -> RuleVerdict:
    metric = result["metrics"].get(rule.metric) if result else None
    if rule.above is not None:
        bound, judgement = judge_above(rule, metric, floors)
    elif rule.against == "baseline":
        bound = bound_of(rule)
        metric, judgement = _against_baseline(rule, bound, metric, change)
    else:
        bound = bound_of(rule)
        judgement = of_class(rule, judge(bound, metric))
    what = definition(rule.metric)
    assert what is not None  # bound_of has refused unknown metrics
    m = metric or unknown(rule.metric, "", 0.0)
    return {
        "metric": rule.metric, "against": rule.against, "bound": bound.text, "threshold": bound.threshold, "better": bound.better,
        "neutral": neutral_of(rule, what), "unit": what.unit, "required": rule.required,
        "verdict": judgement.verdict, "reason": judgement.reason,
        "settle": judgement.settle, "p_fail": judgement.p_fail, "p_fail_holm": judgement.p_fail,
        "value": m["value"], "low": m["low"], "high": m["high"], "n": m["n"] if metric else None,
        "clusters": m["clusters"], "between": m["between"],
    }  # fmt: skip


def _against_baseline(
    rule: Rule, bound: Bound, metric: Metric | None, change: VariantChanges | None
) -> tuple[Metric | None, Judgement]:
    """(difference to the baseline, its judgement); never a PASS without a baseline."""
    if change is None:
        return None, Judgement("INCONCLUSIVE", UNJUDGED)
    if rule.metric in change.lost:
        return None, judge(bound, None)
    if metric is None or metric["value"] is None:
        return None, judge(bound, metric)
    before, difference = change.before.get(rule.metric), change.differences.get(rule.metric)
    if before is None or difference is None:
        why = f" ({'; '.join(before['warnings']).partition('; run')[0]})" if before and before["warnings"] else ""
        return None, Judgement("INCONCLUSIVE", f"no baseline: {rule.metric} is new, or had no value there{why}")
    had = before["value"]
    if rule.margin and difference["unit"] in OPEN_ENDED and had is not None and abs(bound.threshold) >= had:
        why = f"{bound.text} is as much as all the baseline has, {had:.3g}, so it protects nothing"
        return difference, Judgement("FAIL", why)
    return difference, judge(bound, difference)


def _hold_fails(rules: list[RuleVerdict], confidence: float) -> Family:
    """Turn each FAIL that Holm's correction rejects into INCONCLUSIVE, in place; returns the family's record."""
    level = round((1 - confidence) / 2, 12)
    family = [(r, r["p_fail"]) for r in rules if r["required"] and r["p_fail"] is not None and r["low"] != r["high"]]
    for (rule, p), adjusted in zip(family, holm([p for _, p in family])):
        rule["p_fail_holm"] = adjusted
        if rule["verdict"] == "FAIL" and adjusted > level:
            estimate = Estimate(rule["value"], rule["low"], rule["high"], rule["n"] or 0, "", between=rule["between"])
            settle = items_to_settle(estimate, rule["threshold"], confidence=confidence, family=adjusted / p)
            rule["settle"], rule["verdict"] = settle, "INCONCLUSIVE"
            rule["reason"] += (
                f", but not far enough for one of {len(family)} rules tried at once: by chance alone one of them would be "
                f"as far past its bound in up to {100 * adjusted:.2g} % of runs (Holm; the limit is {100 * level:.3g} %)"
                f"{would_settle(settle, rule)}"
            )
    return {"rules": len(family), "correction": "Holm 1979", "level": level, "sided": "one"}


def _verdict(result: VariantResult | None, rules: list[RuleVerdict], variant: Variant, reference: str) -> tuple[str, str]:
    """A variant's verdict and its reason in words."""
    if result is None:
        return "FAIL", "there are no results for this variant"
    made = (result["reference"], result["quantizer"], result["engine"], result["asked"], result["engine_options"])
    if made != (reference, variant.quantizer, variant.engine, variant.options, variant.engine_options):
        return "FAIL", "its results were made for other params; run `dvc repro`"
    if result["status"] == "unsupported":
        return "UNSUPPORTED", result["reason"] or "no reason given"
    if result["status"] != "ok":
        return "FAIL", f"{result['status']}: {result['reason']}"
    required = [r for r in rules if r["required"]]
    if not required:
        return "FAIL", "no required rule applies to this variant"
    verdict = worst([r["verdict"] for r in required])
    if verdict == "PASS":
        return verdict, f"all {len(required)} required rules pass"
    return verdict, "; ".join(f"{r['metric']}: {r['reason']}" for r in required if r["verdict"] == verdict)
