"""Policy: a gate gets looser only with a reason.

A margin can always be widened until a variant passes. So a merge compares its params.yaml with that of the base, the commit it goes
into. What is looser needs a new `reason:`, on the rule, or under `gate` for a removed rule and for all other settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from pipeline.core.errors import ParamsError
from pipeline.core.params import BetweenRuns, Params, Rule
from pipeline.core.records import VariantResult, Verdict
from pipeline.gating.rules import QUANTITY, applies, bound_of, units_of
from pipeline.metrics.definitions import FLOORS, definition, timed
from pipeline.stats.intervals import resolvable


@dataclass(frozen=True)
class Loosening:
    """A setting looser than the base's. reason: new since the base; variants: None for all."""

    what: str
    before: str
    now: str
    reason: str | None
    noise: str | None = None
    variants: tuple[str, ...] | None = None

    def __str__(self) -> str:
        noise = f" (noise {self.noise})" if self.noise else ""
        return f"{self.what}: {self.before} → {self.now}{noise}; {f'reason: {self.reason}' if self.reason else 'no new reason'}"


def hold(verdict: Verdict, loosened: list[Loosening]) -> Verdict:
    """The verdict, with FAIL for variants with a setting that got looser without a reason."""
    faults = [change for change in loosened if not change.reason]
    variants = dict(verdict["variants"])
    for name, v in variants.items():
        looser = dict.fromkeys(fault.what for fault in faults if fault.variants is None or name in fault.variants)
        if looser and v["verdict"] != "UNSUPPORTED":
            why = f"looser than at the baseline, without a new `reason:` in params.yaml: {', '.join(looser)}"
            variants[name] = {**v, "verdict": "FAIL", "reason": f"{why}; {v['reason']}" if v["verdict"] == "FAIL" else why}
    return {**verdict, "verdict": "FAIL" if faults else verdict["verdict"], "variants": variants}


def compare(settings: Params, base: Mapping[str, Any], results: dict[str, VariantResult]) -> list[Loosening]:
    """Settings looser than the base's. base: its parsed params.yaml; results: by variant."""
    gate = base.get("gate") or {}
    reason = settings.gate.reason if settings.gate.reason != gate.get("reason") else None
    loosened = [Loosening(*change, reason) for change in _conditions(settings, base)]
    base_rules = []
    for raw in gate.get("rules") or []:
        try:
            rule = Rule.model_validate(raw)
            bound_of(rule)
            base_rules.append(rule)
        except (ValidationError, ParamsError):
            loosened.append(Loosening(str(raw.get("metric")), "a rule", "unknown to this version", reason))
    for rule in base_rules:
        rules, rules_before = (
            [r for r in all_rules if (r.metric, r.against) == (rule.metric, rule.against)]
            for all_rules in (settings.gate.rules, base_rules)
        )
        old_reasons = {r.reason for r in rules_before}
        reasons = [r.reason for r in rules if r.reason and r.reason not in old_reasons] if rules else [reason]
        variants = [v for v in settings.variants if v != settings.reference and applies(rule, v)]
        shortfalls = {v: _shortfall(rules, rule, v) for v in variants}
        for now in dict.fromkeys(filter(None, shortfalls.values())):
            noise = _noise(rule, settings, results)
            concerned = tuple(v for v in variants if shortfalls[v] == now)
            loosened.append(Loosening(rule.metric, _text(rule), now, next(iter(reasons), None), noise, concerned))
    return loosened


def _conditions(settings: Params, base: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(what, before, now) of looser settings that are not rules."""
    gate, compare, evaluate = (base.get(section) or {} for section in ("gate", "compare", "evaluate"))
    looser: list[tuple[str, Any, Any]] = []
    looser += [("variants", name, "taken out") for name in base.get("variants") or {} if name not in settings.variants]
    looser += [("gate.required", name, "taken out") for name in gate.get("required") or [] if name not in settings.gate.required]
    inconclusive = settings.gate.inconclusive
    if gate.get("inconclusive", "blocks") == "blocks" != inconclusive:
        looser.append(("gate.inconclusive", "blocks", inconclusive))
    if (confidence := compare.get("confidence", 0.95)) > settings.compare.confidence:
        looser.append(("compare.confidence", confidence, settings.compare.confidence))
    for name in BetweenRuns.model_fields:  # less makes intervals narrower; more turns a FAIL into INCONCLUSIVE
        before, now = (compare.get("between_runs") or {}).get(name), getattr(settings.compare.between_runs, name)
        if (before or 0) > (now or 0) or ((before or 0) < (now or 0) and inconclusive == "passes"):
            looser.append((f"compare.between_runs.{name}", before, now))
    if settings.evaluate.allow_truncated and not evaluate.get("allow_truncated"):
        looser.append(("evaluate.allow_truncated", False, True))
    return [(what, str(before), str(now)) for what, before, now in looser]


def _shortfall(rules: list[Rule], base_rule: Rule, variant: str) -> str:
    """The rule that replaced a stricter `base_rule`; empty if one is as strict."""
    applying = [r for r in rules if applies(r, variant)]
    if not applying:
        return "no rule" if base_rule.variants is None and not rules else f"no rule for {variant}"
    return "" if any(_as_strict(r, base_rule) for r in applying) else _text(applying[0])


def _as_strict(rule: Rule, base_rule: Rule) -> bool:
    bound, base_bound = bound_of(rule), bound_of(base_rule)
    past = (bound.threshold - base_bound.threshold) * (1 if bound.better == "lower" else -1)
    if past > 1e-12 * max(abs(base_bound.threshold), 1e-6) or (base_rule.required and not rule.required):
        return False
    return rule.above in (None, base_rule.above) and base_rule.machine in (None, rule.machine)


def _text(rule: Rule) -> str:
    return bound_of(rule).text + (f" above the {rule.above}" if rule.above else "") + ("" if rule.required else ", advisory")


def _noise(rule: Rule, settings: Params, results: dict[str, VariantResult]) -> str:
    """Smallest margin that a variant without loss passes in 80 % of runs, in the unit of the rule's bound: what the narrowest
    interval of a required variant resolves, plus the upper end of the noise floor if the metric has one. Unknown without an
    interval, and for timings whose run-to-run variation was not measured."""
    amounts = []
    for name in settings.gate.required:
        metric = results[name]["metrics"].get(rule.metric) if name in results and applies(rule, name) else None
        if metric is None or metric["low"] is None or metric["high"] is None:
            continue
        if not (timed(rule.metric) and metric["between"] is None):
            amounts.append(resolvable(metric["low"], metric["high"], confidence=metric["confidence"]))
    if not amounts:
        return "unknown"
    reference = results.get(settings.reference)
    floor = reference["metrics"].get(FLOORS[rule.metric][0]) if reference and rule.metric in FLOORS else None
    amount = min(amounts) + ((floor["high"] if floor else None) or 0.0)
    what, written = definition(rule.metric), QUANTITY.match(getattr(rule, rule.kind))
    assert what is not None and written is not None  # bound_of refuses everything else
    return f"{amount / units_of(what)[written.group(2)]:.2g} {written.group(2)}"
