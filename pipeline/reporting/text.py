"""How figures, verdicts, tables and machines are written wherever people read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.metrics.noise_floor import MARK, TIMES

Metric = dict[str, Any]
Results = dict[str, dict[str, Any]]
UNITS = {"fraction": (100.0, " %"), "ratio": (1.0, " ×"), "bytes": (1e-6, " MB")}  # unit: (factor, as people read it); others as is
TEMPLATES = Path(__file__).parent / "templates"
CALIBRATED = ("gptq", "awq")
COUNTED = {"kld": " tokens", "top1": " tokens", "ppl": " tokens", "acc": " items", "speed": " rounds", "ttft": " rounds"}
LONGEST = 160  # characters of a reason in a line that is to stay one


def render(template: str, context: dict[str, Any], **filters: Any) -> str:
    """A page of reporting/templates/."""
    import jinja2

    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=template.endswith(".html.j2"), trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True,
    )  # fmt: skip
    env.filters |= filters
    env.globals |= {"show": show, "with_unit": with_unit, "markdown_table": markdown_table}
    return env.get_template(template).render(context)


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of equal keys as a Markdown table."""
    head, *lines = (f"| {' | '.join(map(str, cells))} |" for cells in [rows[0], *(row.values() for row in rows)])
    return "\n".join([head, f"|{'---|' * len(rows[0])}", *lines])


def scale_of(metric: Metric) -> float:
    """Factor from a metric's own unit to the one people read."""
    return UNITS.get(metric.get("unit", ""), (1.0, ""))[0]


def show(metric: Metric | None, digits: int = 3, sign: bool = False) -> str:
    """`0.00623 [0.00579, 0.00675]`, in the unit people read; a dash where there is no value."""
    if not metric or metric["value"] is None:
        return "–"
    style, scale = f"{'+' if sign else ''}.{digits}g", scale_of(metric)
    value = number(metric["value"] * scale, style)
    low, high = metric.get("low"), metric.get("high")
    if low is None or high is None or low == high:
        return value
    return f"{value} [{number(low * scale, style)}, {number(high * scale, style)}]"


def with_unit(metric: Metric | None, interval: bool = True, digits: int = 3, sign: bool = False) -> str:
    """`63.6 [57.5, 68.3] %`, or `unknown`. sign: a difference, of shares in points."""
    if not metric or metric["value"] is None:
        return "unknown"
    unit = metric["unit"]
    name = " pp" if sign and unit == "fraction" else UNITS.get(unit, (1.0, f" {unit}"))[1]
    return show(metric if interval else metric | {"low": None}, digits, sign=sign or unit == "pp") + name


def number(value: float, style: str = ".3g") -> str:
    """Like format(), without exponents in the range people read, and without a sign on zero."""
    text = format(value, style)
    if "e" in text and 1e-4 <= abs(value) < 1e6:
        text = format(round(value), "d") if abs(value) >= 1 else format(value, ".6f")
    return "0" if value == 0 else text


def digits_apart(values: list[float], least: int = 3, most: int = 8) -> int:
    """Significant digits at which different values are also written differently."""
    known = set(values)
    enough = (d for d in range(least, most) if len({format(v, f".{d}g") for v in known}) == len(known))
    return next(enough, most)


def counted(numbers: Iterable[int]) -> str:
    """`5`, or `5 to 10`; of none: `0`."""
    known = list(numbers) or [0]
    least, most = min(known), max(known)
    return f"{least}" if least == most else f"{least} to {most}"


def n_of(results: Results, metric: str) -> str:
    """n of a metric over all variants that have it."""
    return counted(m.get("n", 0) for r in results.values() if (m := r["metrics"].get(metric)) and m["value"] is not None)


def dequantized(result: dict[str, Any]) -> str:
    """Note beside the reference's name if its base was published packed."""
    return f" (dequantized from {source})" if (source := result.get("dequantized_from")) else ""


def verdict_word(judged: dict[str, Any] | None) -> str:
    """`FAIL (advisory)`; the reference is not judged."""
    return "reference" if judged is None else judged["verdict"] + ("" if judged["required"] else " (advisory)")


def deciding(judged: dict[str, Any]) -> list[dict[str, Any]]:
    """The required rules that gave a variant its verdict, if that is not PASS."""
    worse = judged["verdict"] in ("FAIL", "INCONCLUSIVE")
    return [r for r in judged["rules"] if worse and r["required"] and r["verdict"] == judged["verdict"]]


def brief(judged: dict[str, Any]) -> str:
    """A verdict in one line: the rules that decided it, with value and bound; else its reason, cut to a line."""
    reason = judged["reason"]
    return ", ".join(map(_brief_rule, deciding(judged))) or (reason if len(reason) <= LONGEST else f"{reason[:LONGEST]}…")


def aside(judged: dict[str, Any]) -> str:
    """Advisory rules that fail; empty if none does."""
    failed = [r for r in judged["rules"] if not r["required"] and r["verdict"] == "FAIL"]
    return f"advisory, fails: {', '.join(map(_brief_rule, failed))}" if failed else ""


def _brief_rule(rule: dict[str, Any]) -> str:
    unsure = rule["verdict"] == "INCONCLUSIVE"
    return f"{rule['metric']} {judged_figure(rule, unsure)} ({bound(rule)}{settled_by(rule) if unsure else ''})"


def judged_figure(rule: dict[str, Any], interval: bool = True) -> str:
    """A rule's figure, with enough digits to tell it, its interval and its bound apart."""
    return with_unit(rule, interval, _digits(rule))


def _digits(rule: dict[str, Any]) -> int:
    return digits_apart([rule[k] for k in ("value", "low", "high", "threshold") if rule[k] is not None])


def bound(rule: dict[str, Any]) -> str:
    """`at most 0.02`, in the unit of the figure."""
    side = "at most" if rule["better"] == "lower" else "at least"
    return f"{side} {number(rule['threshold'] * scale_of(rule), f'.{max(4, _digits(rule))}g')}"


def settled_by(rule: dict[str, Any]) -> str:
    """`; about 4000 items in place of 696 would settle it`, if the gate could tell."""
    if not rule.get("settle"):
        return ""
    kind = next((what for start, what in COUNTED.items() if rule["metric"].startswith(start)), "")
    return f"; about {rule['settle']}{kind} in place of {rule['n']} would settle it"


def results_table(results: Results, verdict: dict[str, Any], variants: Iterable[str]) -> list[dict[str, str]]:
    """One row a variant, as text; README has the same columns."""
    rows = []
    for name in variants:
        m = results[name]["metrics"].get
        judged = verdict["variants"].get(name)
        rows.append({
            "variant": name,
            "verdict": verdict_word(judged) + ("" if judged else dequantized(results[name])),
            "bits/weight": show(m("bits_per_weight")),
            "size MB": show(m("weight_bytes")),
            "KLD (nats)": show(m("kld_mean")) + floor_mark(m("kld_mean")),
            "top-1 agreement (%)": show(m("top1_agreement")) + floor_mark(m("top1_agreement")),
            "accuracy Δ (pp)": show(m("acc_delta/all"), 2, sign=True),
            "TTFT (ms)": show(m("ttft_ms")),
            "× prefill": show(m("prefill_ratio")),
            "decode tok/s": show(m("decode_tok_s")),
            "× decode": show(m("speed_ratio")),
        })  # fmt: skip
    return rows


def floor_mark(metric: Metric | None) -> str:
    """` (floor-limited)` behind a figure that is."""
    return f" ({MARK})" if any(w.startswith(MARK) for w in (metric or {}).get("warnings", [])) else ""


def noise_line(floors: dict[str, Metric], reference: str) -> str:
    """The noise floor in one line; empty if none was measured."""
    if "kld_floor" not in floors:
        return ""
    return (
        f"Noise floor ({reference} against itself): mean KLD up to {known(floors['kld_floor'])} nats, another "
        f"likeliest token in {known(floors['flip_floor'])} % (n = {floors['kld_floor/rerun']['n']} tokens). "
        f"Values below {TIMES} times that cannot be told from zero ({MARK})."
    )


def noise_details(floors: dict[str, Metric]) -> str:
    """The noise floor by condition, and the effect of rounding; empty if none was measured."""
    if "kld_floor" not in floors:
        return ""
    parts = ", ".join(f"{n.split('/')[1]} {known(m)}" for n, m in floors.items() if n.startswith("kld_floor/"))
    return (
        f"Noise floor by condition: {parts} nats ({floors['kld_floor/stepwise']['n']} tokens stepwise). "
        f"The same weights in float32: {known(floors['kld_rounding'])} nats, another likeliest token in "
        f"{known(floors['flip_rounding'])} %. "
        f"A figure below {TIMES} times the larger of floor and rounding is {MARK}."
    )


def known(metric: Metric) -> str:
    """`0.0018 [0.0015, 0.0021]`, or why there is none."""
    return f"unknown ({metric.get('reason') or 'no reason given'})" if metric["value"] is None else show(metric)


def calibration_gains(results: Results) -> list[str]:
    """Each calibrated variant beside plain rounding at the same bits and group size."""
    lines = []
    for name, ours in results.items():
        for other, theirs in results.items() if ours["quantizer"] in CALIBRATED else []:
            same = all(theirs["options"].get(k) == ours["options"].get(k) for k in ("bits", "group_size"))
            kld, plain = ours["metrics"].get("kld_mean"), theirs["metrics"].get("kld_mean")
            if theirs["quantizer"] == "rtn" and same and kld and plain and plain["value"]:
                less = 100 * (1 - kld["value"] / plain["value"])
                gain = f"KLD {show(kld)} instead of {show(plain)} nats, {less:.0f} % less"
                lines.append(f"{name} against {other}, at the same bits and group size: {gain}")
    return lines


def unmeasured(results: Results) -> list[str]:
    """What failed, was unsupported or has no value, with its reason; a line a variant and reason."""
    lines = [f"{name}: {r['status']}: {r['reason']}" for name, r in results.items() if r.get("status", "ok") != "ok"]
    for name, r in results.items():
        why: dict[str, list[str]] = {}
        for metric, m in r["metrics"].items():
            if m["value"] is None:
                why.setdefault(str(m.get("reason") or "; ".join(m.get("warnings") or []) or "no reason given"), []).append(metric)
        lines += [f"{name}: no value for {', '.join(names)}: {reason}" for reason, names in why.items()]
        failed = r["metrics"].get("failure_rate")
        if failed and failed["value"]:
            lines.append(f"{name}: {with_unit(failed)} of {failed['n']} requests failed; they are out of the rates")
    return lines


def machines(results: Results) -> str:
    """The machine, or machines, that the timings were taken on."""
    facts = list({repr(r["machine"]): r["machine"] for r in results.values() if r["machine"]}.values())
    if not facts:
        return "no timings were taken"
    several = f"{len(facts)} different machines, whose timings must not be compared: " if len(facts) > 1 else ""
    return several + "; ".join(map(machine, facts))


def machine(facts: dict[str, Any]) -> str:
    """A machine in a line, from what `hardware.describe` wrote."""
    gpu = facts["gpu"] or "no GPU"
    return (
        f"{facts['cpu']}, {facts['cores']} cores ({facts.get('cpu_capability', '?')}), {facts['threads']} threads, "
        f"{facts['memory_bytes'] / 2**30:.0f} GiB, {gpu}, {facts['system']}, Python {facts['python']}"
    )


def run_to_run(between: float | None) -> str:
    """Whether speed intervals include run-to-run variation. between: log standard deviation; None: not measured."""
    if between is None:
        return "Speed intervals cover this run only; run-to-run variation was not measured (compare.between_runs)."
    return f"Speed intervals include run-to-run variation of {100 * between:g} % on this machine."


def speed_bounds(result: dict[str, Any]) -> list[str]:
    """A variant's sentences on what bounds its speed, and the warnings on its ratio."""
    texts = [*result["bounds"].values(), list(result["metrics"].get("speed_ratio", {}).get("warnings") or [])]
    return [text for some in texts for text in (some if isinstance(some, list) else [some]) if text]
