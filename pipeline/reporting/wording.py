"""How a verdict, a table row, a floor and a machine are written wherever people read them. Pure."""

from __future__ import annotations

from typing import Any

from pipeline.metrics import noise_floor
from pipeline.reporting.numbers import UNITS as UNITS
from pipeline.reporting.numbers import dequantized, digits_apart
from pipeline.reporting.numbers import number as number
from pipeline.reporting.numbers import show as show

Metric = dict[str, Any]
Results = dict[str, dict[str, Any]]
CALIBRATED = ("gptq", "awq")
COUNTED = {"kld": " tokens", "top1": " tokens", "ppl": " tokens", "acc": " items", "speed": " rounds", "ttft": " rounds"}
LONGEST = 160  # characters of a reason in a line that is to stay one


def told(metric: Metric | None, unit: str, interval: bool = True, digits: int = 3) -> str:
    """`63.6 [57.5, 68.3] %`: a figure with its unit, or `unknown`. unit: the metric's own, as in `pipeline.numbers.metrics`."""
    if not metric or metric["value"] is None:
        return "unknown"
    scale, name = UNITS.get(unit, (1.0, f" {unit}"))
    shown = metric if interval else metric | {"low": None}
    return show(shown, digits, scale=scale, sign=unit == "pp") + name


def verdict_word(judged: dict[str, Any] | None) -> str:
    """`FAIL (advisory)`; the reference is not judged."""
    return "reference" if judged is None else judged["verdict"] + ("" if judged["required"] else " (advisory)")


def deciding(judged: dict[str, Any]) -> list[dict[str, Any]]:
    """The required rules that gave a variant its verdict, if that is not PASS."""
    worse = judged["verdict"] in ("FAIL", "INCONCLUSIVE")
    return [r for r in judged["rules"] if worse and r["required"] and r["verdict"] == judged["verdict"]]


def brief(judged: dict[str, Any]) -> str:
    """A verdict in one line: of the rules only those that decided it, with value and bound; else its reason, cut to a line."""
    rules = deciding(judged)
    if not rules:
        reason = judged["reason"]
        return reason if len(reason) <= LONGEST else f"{reason[:LONGEST]}…"
    return ", ".join(map(_brief_rule, rules))


def aside(judged: dict[str, Any]) -> str:
    """What a verdict does not hang on and a reader should see all the same: advisory rules that fail; empty where none does."""
    failed = [r for r in judged["rules"] if not r["required"] and r["verdict"] == "FAIL"]
    return f"advisory, fails: {', '.join(map(_brief_rule, failed))}" if failed else ""


def _brief_rule(rule: dict[str, Any]) -> str:
    unsure = rule["verdict"] == "INCONCLUSIVE"
    return f"{rule['metric']} {judged_figure(rule, unsure)} ({bound(rule)}{settled_by(rule) if unsure else ''})"


def judged_figure(rule: dict[str, Any], interval: bool = True) -> str:
    """A rule's figure, with so many digits that it, its interval's ends and its bound can be told apart."""
    return told(rule, rule["unit"], interval, _digits(rule))


def _digits(rule: dict[str, Any]) -> int:
    return digits_apart([rule[k] for k in ("value", "low", "high", "threshold") if rule[k] is not None])


def bound(rule: dict[str, Any]) -> str:
    """`at most 0.02`, in the unit in which `told` shows the figure."""
    scale, _ = UNITS.get(rule["unit"], (1.0, ""))
    side = "at most" if rule["better"] == "lower" else "at least"
    return f"{side} {number(rule['threshold'] * scale, f'.{max(4, _digits(rule))}g')}"


def settled_by(rule: dict[str, Any]) -> str:
    """`; about 4000 items in place of 696 would settle it`, where the gate could tell."""
    if not rule.get("settle"):
        return ""
    kind = next((what for start, what in COUNTED.items() if rule["metric"].startswith(start)), "")
    return f"; about {rule['settle']}{kind} in place of {rule['n']} would settle it"


def table(results: Results, verdict: dict[str, Any], variants: Any) -> list[dict[str, str]]:
    """One row a variant, as text; the columns are those of the README."""
    rows = []
    for name in variants:
        m = results[name]["metrics"]
        rows.append({
            "variant": name,
            "verdict": verdict_word(judged := verdict["variants"].get(name)) + ("" if judged else dequantized(results[name])),
            "bits/weight": show(m.get("bits_per_weight")),
            "size MB": show(m.get("weight_bytes"), scale=1e-6),
            "KLD (nats)": show(m.get("kld_mean")) + noise_floor.marked(m.get("kld_mean")),
            "top-1 agreement (%)": show(m.get("top1_agreement"), scale=100) + noise_floor.marked(m.get("top1_agreement")),
            "accuracy Δ (pp)": show(m.get("acc_delta/all"), 2, sign=True),
            "TTFT (ms)": show(m.get("ttft_ms")),
            "× prefill": show(m.get("prefill_ratio")),
            "decode tok/s": show(m.get("decode_tok_s")),
            "× decode": show(m.get("speed_ratio")),
        })  # fmt: skip
    return rows


def noise_line(floors: dict[str, Metric], reference: str) -> str:
    """The floor in one line; empty where none was measured. `noise.sentence` says all of it."""
    if "kld_floor" not in floors:
        return ""
    return (
        f"Noise floor ({reference} against itself): mean KLD up to {noise_floor.shown(floors['kld_floor'])} nats, another "
        f"likeliest token in {noise_floor.shown(floors['flip_floor'], 100)} % (n = {floors['kld_floor/rerun']['n']} tokens). "
        f"Values below {noise_floor.TIMES} times that cannot be told from zero ({noise_floor.MARK})."
    )


def against_rounding(results: Results) -> list[str]:
    """What calibration buys: each calibrated variant beside plain rounding to as many bits in as large groups, in words."""
    said = []
    for name, ours in results.items():
        for other, theirs in results.items() if ours["quantizer"] in CALIBRATED else []:
            same = all(theirs["options"].get(k) == ours["options"].get(k) for k in ("bits", "group_size"))
            kld, bar = ours["metrics"].get("kld_mean"), theirs["metrics"].get("kld_mean")
            if theirs["quantizer"] == "rtn" and same and kld and bar and bar["value"]:
                less = 100 * (1 - kld["value"] / bar["value"])
                gained = f"KLD {show(kld)} instead of {show(bar)} nats, {less:.0f} % less"
                said.append(f"{name} against {other}, with as many bits and groups as large: {gained}")
    return said


def unmeasured(results: Results) -> list[str]:
    """Everything that failed, was unsupported or has no value, with its reason; a line a variant and reason."""
    said = [f"{name}: {r['status']}: {r['reason']}" for name, r in results.items() if r.get("status", "ok") != "ok"]
    for name, r in results.items():
        why: dict[str, list[str]] = {}
        for metric, m in r["metrics"].items():
            if m["value"] is None:
                why.setdefault(str(m.get("reason") or "; ".join(m.get("warnings") or []) or "no reason given"), []).append(metric)
        said += [f"{name}: no value for {', '.join(names)}: {reason}" for reason, names in why.items()]
        failed = r["metrics"].get("failure_rate")
        if failed and failed["value"]:
            said.append(f"{name}: {told(failed, 'fraction')} of {failed['n']} requests failed; they are out of the rates")
    return said


def machine_line(results: Results) -> str:
    """The machine the timings were taken on."""
    machines = list({repr(r["machine"]): r["machine"] for r in results.values() if r["machine"]}.values())
    if not machines:
        return "no timings were taken"
    if len(machines) > 1:
        return f"{len(machines)} different machines, whose timings must not be compared: " + "; ".join(map(machine, machines))
    return machine(machines[0])


def machine(facts: dict[str, Any]) -> str:
    """A machine in a line, from what `hardware.describe` wrote."""
    gpu = facts["gpu"] or "no GPU"
    return (
        f"{facts['cpu']}, {facts['cores']} cores ({facts.get('cpu_capability', '?')}), {facts['threads']} threads, "
        f"{facts['memory_bytes'] / 2**30:.0f} GiB, {gpu}, {facts['system']}, Python {facts['python']}"
    )


def whole_runs(between: float | None) -> str:
    """Of which runs speed intervals are. between: what whole runs differ by (log standard deviation), None: not known."""
    if between is None:
        return "Speed intervals are of this run: how far whole runs differ is not known (compare.between_runs)."
    return f"Speed intervals are for another run on this machine: {100 * between:g} % between whole runs is in them."


def said(result: dict[str, Any]) -> list[str]:
    """A variant's sentences on what bounds it, and warnings on its ratio, in one list: a cliff may be several."""
    found = [result["bounds"], {"ratio": list(result["metrics"].get("speed_ratio", {}).get("warnings") or [])}]
    return [t for of in found for text in of.values() for t in (text if isinstance(text, list) else [text]) if t]
