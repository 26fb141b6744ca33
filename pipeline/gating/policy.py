"""Policy: a gate gets looser only with a reason.

A margin can always be widened until a variant passes. So a merge compares params.yaml with the base's, that of the commit it goes
into. What is looser needs a `reason:` that the base did not have: on the rule, or under `gate` for a removed rule and all other
settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from pipeline.core.errors import ParamsError
from pipeline.core.params import BetweenRuns, Params, Rule
from pipeline.gating.paired_difference import timed
from pipeline.gating.rules import QUANTITY, UNITS, bound_of
from pipeline.metrics.definitions import FLOORS, definition
from pipeline.stats.intervals import resolvable

Row = dict[str, Any]


@dataclass(frozen=True)
class Loosening:
    """A setting looser than the base's. reason: one that the base did not have; variants: None for all."""

    what: str
    before: str
    now: str
    reason: str | None
    noise: str | None = None
    variants: tuple[str, ...] | None = None

    def __str__(self) -> str:
        noise = f" (noise {self.noise})" if self.noise else ""
        return f"{self.what}: {self.before} → {self.now}{noise}; {f'reason: {self.reason}' if self.reason else 'no new reason'}"


def hold(verdict: Row, loosened: list[Loosening]) -> Row:
    """The verdict; FAIL for variants with a setting that got looser without a reason."""
    faults = [change for change in loosened if not change.reason]
    variants = dict(verdict["variants"])
    for name, v in variants.items():
        own = dict.fromkeys(fault.what for fault in faults if fault.variants is None or name in fault.variants)
        if own and v["verdict"] != "UNSUPPORTED":
            why = f"looser than at the baseline, without a new `reason:` in params.yaml: {', '.join(own)}"
            variants[name] = v | {"verdict": "FAIL", "reason": f"{why}; {v['reason']}" if v["verdict"] == "FAIL" else why}
    return verdict | {"verdict": "FAIL" if faults else verdict["verdict"], "variants": variants, "loosened": loosened}


def compare(settings: Params, base: Row, results: dict[str, Row]) -> list[Loosening]:
    """Settings looser than the base's. base: its params.yaml as parsed; results: {variant: metrics}."""
    then = base.get("gate") or {}
    reason = settings.gate.reason if settings.gate.reason != then.get("reason") else None
    loosened = [Loosening(*change, reason) for change in _conditions(settings, base)]
    rules, unknown = _readable(then.get("rules") or [])
    loosened += [Loosening(str(raw.get("metric")), "a rule", "unknown to this version", reason) for raw in unknown]
    for rule in rules:
        ours, earlier = (
            [r for r in own if (r.metric, r.against) == (rule.metric, rule.against)] for own in (settings.gate.rules, rules)
        )
        reasons = [r.reason for r in ours if r.reason and r.reason not in {t.reason for t in earlier}] if ours else [reason]
        shortfalls = {v: _shortfall(ours, rule, v) for v in settings.variants if v != settings.reference and _applies(rule, v)}
        for now in dict.fromkeys(filter(None, shortfalls.values())):
            variants = tuple(v for v, rule_now in shortfalls.items() if rule_now == now)
            noise = _noise(rule, settings, results)
            loosened.append(Loosening(rule.metric, _text(rule), now, next(iter(reasons), None), noise, variants))
    return loosened


def _conditions(settings: Params, base: Row) -> list[tuple[str, str, str]]:
    """(what, before, now) of looser settings other than rules."""
    then, ours = base.get("gate") or {}, settings.compare
    compared = base.get("compare") or {}
    looser: list[tuple[str, Any, Any]] = []
    for what, names, kept in (
        ("variants", base.get("variants") or {}, settings.variants),
        ("gate.required", then.get("required") or [], settings.gate.required),
    ):
        looser += [(what, name, "taken out") for name in names if name not in kept]
    inconclusive = settings.gate.inconclusive
    if then.get("inconclusive", "blocks") == "blocks" != inconclusive:
        looser.append(("gate.inconclusive", "blocks", inconclusive))
    if (confidence := compared.get("confidence", 0.95)) > ours.confidence:
        looser.append(("compare.confidence", confidence, ours.confidence))
    for name in BetweenRuns.model_fields:  # less makes intervals narrower; more turns a FAIL into INCONCLUSIVE
        before, now = (compared.get("between_runs") or {}).get(name), getattr(ours.between_runs, name)
        if (before or 0) > (now or 0) or ((before or 0) < (now or 0) and inconclusive == "passes"):
            looser.append((f"compare.between_runs.{name}", before, now))
    if settings.evaluate.allow_truncated and not (base.get("evaluate") or {}).get("allow_truncated"):
        looser.append(("evaluate.allow_truncated", False, True))
    return [(what, str(before), str(now)) for what, before, now in looser]


def _readable(raw: list[Row]) -> tuple[list[Rule], list[Row]]:
    """(rules that this version understands, those that it does not)."""
    rules, unknown = [], []
    for one in raw:
        try:
            rule = Rule.model_validate(one)
            bound_of(rule)
            rules.append(rule)
        except (ValidationError, ParamsError):
            unknown.append(one)
    return rules, unknown


def _applies(rule: Rule, variant: str) -> bool:
    return rule.variants is None or variant in rule.variants


def _shortfall(ours: list[Rule], theirs: Rule, variant: str) -> str:
    """The rule in place of a stricter `theirs`; empty if one is as strict."""
    applying = [r for r in ours if _applies(r, variant)]
    if not applying:
        return "no rule" if theirs.variants is None and not ours else f"no rule for {variant}"
    return "" if any(_as_strict(r, theirs) for r in applying) else _text(applying[0])


def _as_strict(ours: Rule, theirs: Rule) -> bool:
    a, b = bound_of(ours), bound_of(theirs)
    past = a.threshold - b.threshold if a.better == "lower" else b.threshold - a.threshold
    if past > 1e-12 * max(abs(b.threshold), 1e-6) or (theirs.required and not ours.required):
        return False
    return ours.above in (None, theirs.above)


def _text(rule: Rule) -> str:
    return bound_of(rule).text + (f" above the {rule.above}" if rule.above else "") + ("" if rule.required else ", advisory")


def _noise(rule: Rule, settings: Params, results: dict[str, Row]) -> str:
    """The least margin that a variant without loss passes in 80 % of runs, in the unit of the rule's bound. It is the smallest
    loss that the narrowest interval of a required variant can resolve, above the noise floor's upper end if the metric has one.
    Unknown without an interval, and for timings whose run-to-run variation was not measured."""
    own = [results.get(n, {}).get("metrics", {}).get(rule.metric) or {} for n in settings.gate.required if _applies(rule, n)]
    own = [m for m in own if None not in (m.get("low"), m.get("high")) and not (timed(rule.metric) and m.get("between") is None)]
    if not own:
        return "unknown"
    m = min(own, key=lambda m: float(m["high"] - m["low"]))
    floors = results.get(settings.reference, {}).get("metrics", {})
    floor = floors.get(FLOORS[rule.metric][0]) if rule.metric in FLOORS else None
    amount = resolvable(m["low"], m["high"], confidence=m["confidence"]) + ((floor or {}).get("high") or 0.0)
    what, written = definition(rule.metric), QUANTITY.match(rule.margin or rule.gain or rule.limit or "")
    assert what is not None and written is not None  # bound_of refuses everything else
    return f"{amount / UNITS[what.unit][written.group(2)]:.2g} {written.group(2)}"
