"""How values, verdicts, tables and machines are written wherever people read them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from pipeline.core import records
from pipeline.core.cli import markdown_table as markdown_table  # tracking takes it from here
from pipeline.core.explain import nominal_bits
from pipeline.core.records import Metric, Results, RuleVerdict, VariantResult, VariantVerdict
from pipeline.metrics.definitions import FLOOR_MARK, FLOOR_TIMES

TEMPLATES = Path(__file__).parent / "templates"
CALIBRATED = ("gptq", "awq")
NAMES = {
    "kld_mean": "KLD", "top1_agreement": "top-1 agreement", "ppl_ratio": "perplexity", "acc_delta/all": "accuracy",
    "size_ratio": "size", "speed_ratio": "decode rate",
}  # fmt: skip
COUNTED = {"kld": " tokens", "top1": " tokens", "ppl": " tokens", "acc": " items", "speed": " rounds", "ttft": " rounds"}
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?![\w.]*\w)(?! quantile)")
OWN = "decode, × own 16 bits"
ONCE = "measured once"  # the tables say it of all
LONGEST = 160  # characters of a reason in a line that is to stay one


class Unit(NamedTuple):
    """rule: {unit that a gate's rule may use: how many of the metric's own it is}, the first one for differences too; name, factor:
    the unit in which people read a value, and the factor to it."""

    rule: Mapping[str, float]
    name: str
    factor: float = 1.0


SIZES = {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
PLAIN = ("nats", "pp", "ppl", "p", "items", "tokens", "bits", "tok/s", "req/s", "requests", "requests at once")
UNITS = {name: Unit({name: 1.0}, name) for name in PLAIN} | {
    "fraction": Unit({"pp": 0.01}, "%", 100.0),  # a rule may not say %: 5 % of 0.9, or 5 points?
    "ratio": Unit({"%": 0.01}, "×"),
    "bytes": Unit(SIZES, "MB", 1e-6),
    "ms": Unit({"ms": 1.0, "s": 1000.0}, "ms"),
    "s": Unit({"s": 1.0, "ms": 0.001}, "s"),
}


class Known(NamedTuple):
    """A metric that has a value. interval: None where it has none."""

    value: float
    interval: tuple[float, float] | None
    n: int


def known(metric: Metric | records.ShortEstimate | records.Span | None) -> Known | None:
    """A metric's value and interval; None where it has no value."""
    if metric is None or metric["value"] is None:
        return None
    low, high = metric["low"], metric["high"]
    return Known(metric["value"], None if low is None or high is None else (low, high), metric["n"])


def value_of(result: VariantResult, name: str) -> float | None:
    """A variant's metric as a number, None if unknown."""
    metric = known(result["metrics"].get(name))
    return metric.value if metric else None


def render(template: str, context: Mapping[str, object], **filters: Callable[..., str]) -> str:
    """A page of reporting/templates/."""
    import jinja2

    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=template.endswith(".html.j2"), trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True,
    )  # fmt: skip
    env.filters |= {"in_words": in_words} | filters
    env.globals |= {"show": show, "about": about, "floor_mark": floor_mark, "worth": worth, "markdown_table": markdown_table}
    return env.get_template(template).render(context)


def unit_of(name: str) -> Unit:
    """How people read a unit; one that has no entry in UNITS, as it is."""
    return UNITS.get(name) or Unit({}, name)


def difference(unit: str) -> tuple[float, str]:
    """(factor, unit) in which people read a difference of metrics: shares in points, ratios in %."""
    name, size = next(iter(UNITS[unit].rule.items()))
    return 1 / size, name


def show(metric: records.Interval | None, digits: int = 3, sign: bool = False, interval: bool = True) -> str:
    """`0.00623 [0.00579, 0.00675]`, in the unit people read; a dash where there is no value."""
    if not metric or metric["value"] is None:
        return "–"
    style, factor = f"{'+' if sign else ''}.{digits}g", unit_of(metric["unit"]).factor
    value = number(metric["value"] * factor, style)
    low, high = metric["low"], metric["high"]
    if not interval or low is None or high is None or low == high:
        return value
    return f"{value} [{number(low * factor, style)}, {number(high * factor, style)}]"


def with_unit(metric: records.Interval | None, interval: bool = True, digits: int = 3, sign: bool = False) -> str:
    """`63.6 [57.5, 68.3] %`, or `unknown`. sign: a difference, of shares in points."""
    if not metric or metric["value"] is None:
        return "unknown"
    unit = metric["unit"]
    name = "pp" if sign and unit == "fraction" else unit_of(unit).name
    return f"{show(metric, digits, sign or unit == 'pp', interval)} {name}"


def or_why(metric: Metric) -> str:
    """`0.0018 [0.0015, 0.0021]`, or why there is none."""
    return f"unknown ({reason_of(metric)})" if metric["value"] is None else show(metric)


def warnings_of(metric: Metric | None) -> list[str]:
    """A metric's warnings; none of a metric that is not there."""
    return metric["warnings"] if metric else []


def worth(metric: Metric | None) -> list[str]:
    """Warnings on a value that is there, but for those that stand beside it anyway."""
    return [w for w in warnings_of(metric) if metric and metric["value"] is not None and not w.startswith((FLOOR_MARK, ONCE))]


def reason_of(metric: Metric) -> str:
    """Why a metric has no value."""
    return "; ".join(warnings_of(metric)) or "no reason given"


def number(value: float, style: str = ".3g") -> str:
    """Like format(), without exponents in the range people read, and without a sign on zero."""
    text = format(value, style)
    if "e" in text and 1e-4 <= abs(value) < 1e6:
        text = format(round(value), "d") if abs(value) >= 1 else format(value, ".6f")
    return "0" if value == 0 else text


def digits_apart(values: list[float], least: int = 3, most: int = 8) -> int:
    """Significant digits at which different values are also written differently."""
    different = set(values)
    enough = (d for d in range(least, most) if len({format(v, f".{d}g") for v in different}) == len(different))
    return next(enough, most)


def counted(numbers: Iterable[int]) -> str:
    """`5`, or `5 to 10`; of none: `0`."""
    numbers = list(numbers) or [0]
    least, most = min(numbers), max(numbers)
    return f"{least}" if least == most else f"{least} to {most}"


def n_of(results: Results, metric: str) -> str:
    """n of a metric over all variants that have it."""
    return counted(m.n for r in results.values() if (m := known(r["metrics"].get(metric))))


def dequantized(result: VariantResult) -> str:
    """Note beside the reference's name if its base was published packed."""
    return f" (dequantized from {source})" if (source := result.get("dequantized_from")) else ""


def verdict_word(judged: VariantVerdict | None) -> str:
    """`FAIL (advisory)`; the reference is not judged."""
    return "reference" if judged is None else judged["verdict"] + ("" if judged["required"] else " (advisory)")


def deciding(judged: VariantVerdict) -> list[RuleVerdict]:
    """The required rules that gave a variant its verdict, if that is not PASS."""
    worse = judged["verdict"] in ("FAIL", "INCONCLUSIVE")
    return [r for r in judged["rules"] if worse and r["required"] and r["verdict"] == judged["verdict"]]


def brief(judged: VariantVerdict) -> str:
    """A verdict in one line: the rules that decided it, with value and bound; else its reason, cut to a line."""
    reason = judged["reason"]
    return ", ".join(map(_brief_rule, deciding(judged))) or (reason if len(reason) <= LONGEST else f"{reason[:LONGEST]}…")


def aside(judged: VariantVerdict) -> str:
    """Advisory rules that fail; empty if none does."""
    failed = [r for r in judged["rules"] if not r["required"] and r["verdict"] == "FAIL"]
    return f"advisory, fails: {', '.join(map(_brief_rule, failed))}" if failed else ""


def _brief_rule(rule: RuleVerdict) -> str:
    unsure = rule["verdict"] == "INCONCLUSIVE"
    name = NAMES.get(rule["metric"], rule["metric"])
    return f"{name} {judged_value(rule, unsure)} ({bound(rule)}{settled_by(rule) if unsure else ''})"


def judged_value(rule: RuleVerdict, interval: bool = True) -> str:
    """A rule's value, with enough digits to tell it, its interval and its bound apart."""
    return with_unit(rule, interval, _digits(rule))


def _digits(rule: RuleVerdict) -> int:
    ends = rule["value"], rule["low"], rule["high"], rule["threshold"]
    return digits_apart([end for end in ends if end is not None])


def bound(rule: RuleVerdict) -> str:
    """`at most 0.02`, in the unit of the value."""
    side = "at most" if rule["better"] == "lower" else "at least"
    return f"{side} {number(rule['threshold'] * unit_of(rule['unit']).factor, f'.{max(4, _digits(rule))}g')}"


def settled_by(rule: RuleVerdict) -> str:
    """`; about 4000 items in place of 696 would settle it`, if the gate could tell."""
    if not rule["settle"]:
        return ""
    kind = next((what for start, what in COUNTED.items() if rule["metric"].startswith(start)), "")
    return f"; about {rule['settle']}{kind} in place of {rule['n']} would settle it"


def overview(results: Results, verdict: records.Verdict, variants: Iterable[str]) -> list[dict[str, str | Metric | None]]:
    """What decides, one row a variant: seven columns, text or metrics."""
    rows: list[dict[str, str | Metric | None]] = []
    for name in variants:
        metric, judged = results[name]["metrics"].get, verdict["variants"].get(name)
        rows.append({
            "variant": name,
            "verdict": verdict_word(judged),
            "size, MB": metric("weight_bytes"),
            "quality loss: KLD, nats": metric("kld_mean"),
            f"decode, × {verdict['reference']}": metric("speed_ratio"),
            OWN: own_ratio(results, name),
            "memory, MB": metric("peak_memory_bytes"),
        })  # fmt: skip
    return rows


def own_16(results: Results, name: str) -> str | None:
    """The variant that changes engine alone: the same engine, weights of 16 bits (else 32), no cache of fewer bits, no draft. The
    reference is that of its own engine."""
    variant = results[name]
    same = [n for n, r in results.items() if r["engine"] == variant["engine"] and not _changes_more(r["engine_options"])]
    by_bits = [n for bits in (16, 32) for n in same if nominal_bits(results[n]["options"]) == bits]
    return variant["reference"] if variant["reference"] in same else next(iter(by_bits), None)


def _changes_more(options: records.Options) -> bool:
    kept = [nominal_bits({"type": v}) for k, v in options.items() if k == "kv"]
    return "speculate" in options or any(bits is not None and bits < 16 for bits in kept)


def own_ratio(results: Results, name: str) -> Metric | None:
    """Decode rate over that of `own_16`; None where no such variant was measured, or it is that."""
    variant, own = results[name], own_16(results, name)
    if own is None or own == name:
        return None
    ratio, base = (results[n]["metrics"].get("speed_ratio") for n in (name, own))
    if own == variant["reference"] or not ratio:
        return ratio
    a, b = known(ratio), known(base)
    if not a or not b or not a.interval or not b.interval or min(b.interval) <= 0 or variant["machine"] != results[own]["machine"]:
        return None
    method = f"quotient of both ratios to {variant['reference']}; the outer ends of their intervals"
    low, high = a.interval[0] / b.interval[1], a.interval[1] / b.interval[0]
    return {**ratio, "value": a.value / b.value, "low": low, "high": high, "n": min(a.n, b.n), "method": method}


def results_table(results: Results, verdict: records.Verdict, variants: Iterable[str]) -> list[dict[str, str]]:
    """The overview as text, in six columns: `effects.rows` has the engine's own 16 bits."""
    table = [in_words(row) for row in overview(results, verdict, variants)]
    return [{k: cell for k, cell in row.items() if k != OWN} for row in table]


def in_words(row: Mapping[str, str | Metric | None]) -> dict[str, str]:
    """A row whose metrics are text."""
    return {k: cell if isinstance(cell, str) else show(cell) + floor_mark(cell) for k, cell in row.items()}


def about(metric: Metric | None) -> str:
    """A value's n, interval and method, and what to know of it: what a second look shows."""
    if not metric:
        return "not measured"
    if metric["value"] is None:
        return f"unknown: {reason_of(metric)}"
    low, high, share = metric["low"], metric["high"], metric.get("confidence") or 0.95
    ends = f"{100 * share:g} % interval {show(metric).partition(' ')[2]}" if low != high else "exact"
    interval = "no interval" if low is None or high is None else ends
    value = f"{with_unit(metric, interval=False)}, n = {metric['n']}"
    return "; ".join(filter(None, (value, interval, metric.get("method"), *warnings_of(metric))))


def grouped(sentences: Iterable[tuple[str, str]]) -> list[str]:
    """Each sentence once, with what it concerns. sentences: (sentence, what it concerns); numbers that differ become a range."""
    by: dict[tuple[str, ...], list[tuple[list[str], str]]] = {}  # {what stands between its numbers: numbers, what it concerns}
    for sentence, of in sentences:
        by.setdefault(tuple(NUMBER.split(sentence)), []).append((NUMBER.findall(sentence), of))
    lines = []
    for parts, said in by.items():
        ranges = [dict.fromkeys(numbers) for numbers in zip(*(numbers for numbers, _ in said))]
        spans = [min(r, key=float) + (f"–{max(r, key=float)}" if len(r) > 1 else "") for r in ranges]
        whole = "".join(part + span for part, span in zip(parts, (*spans, "")))
        lines.append(f"{whole}: {briefly(dict.fromkeys(of for _, of in said), most=len(said))}")
    return lines


def with_flips(result: VariantResult, task: str) -> Metric | None:
    """Accuracy's difference on a task, and for its tooltip the items lost and won."""
    lost, won = (show(result["metrics"].get(f"flips_to_{way}/{task}"), interval=False) for way in ("wrong", "right"))
    delta = result["metrics"].get(f"acc_delta/{task}")
    return delta and {**delta, "method": f"{lost} items lost, {won} won; {delta.get('method', '')}"}


def floor_mark(metric: Metric | None) -> str:
    """` (floor-limited)` behind a value that is."""
    return f" ({FLOOR_MARK})" if any(w.startswith(FLOOR_MARK) for w in warnings_of(metric)) else ""


def noise_line(floors: records.Metrics, reference: str) -> str:
    """The noise floor in one line; empty if none was measured."""
    if "kld_floor" not in floors:
        return ""
    return (
        f"Noise floor ({reference} against itself): mean KLD up to {or_why(floors['kld_floor'])} nats, another "
        f"likeliest token in {or_why(floors['flip_floor'])} % (n = {floors['kld_floor/rerun']['n']} tokens). "
        f"Values below {FLOOR_TIMES} times that cannot be told from zero ({FLOOR_MARK})."
    )


def noise_details(floors: records.Metrics) -> str:
    """The noise floor by condition, and the effect of rounding; empty if none was measured."""
    if "kld_floor" not in floors:
        return ""
    parts = ", ".join(f"{n.split('/')[1]} {or_why(m)}" for n, m in floors.items() if n.startswith("kld_floor/"))
    return (
        f"Noise floor by condition: {parts} nats ({floors['kld_floor/stepwise']['n']} tokens stepwise). "
        f"The same weights in float32: {or_why(floors['kld_rounding'])} nats, another likeliest token in "
        f"{or_why(floors['flip_rounding'])} %. "
        f"A value below {FLOOR_TIMES} times the larger of floor and rounding is {FLOOR_MARK}."
    )


def calibration_gains(results: Results) -> list[str]:
    """Each calibrated variant beside plain rounding at the same bits and group size."""
    lines = []
    for name, variant in results.items():
        for other, plain in results.items() if variant["quantizer"] in CALIBRATED else []:
            same = all(plain["options"].get(k) == variant["options"].get(k) for k in ("bits", "group_size"))
            kld, plain_kld = value_of(variant, "kld_mean"), value_of(plain, "kld_mean")
            if plain["quantizer"] == "rtn" and same and kld is not None and plain_kld:
                before, after = (show(r["metrics"]["kld_mean"]) for r in (plain, variant))
                gain = f"KLD {after} instead of {before} nats, {100 * (1 - kld / plain_kld):.0f} % less"
                lines.append(f"{name} against {other}, at the same bits and group size: {gain}")
    return lines


def unmeasured(results: Results) -> list[str]:
    """What failed, was unsupported or has no value, with its reason and the variants it concerns."""
    lines = [f"{name}: {r['status']}: {r['reason']}" for name, r in results.items() if r["status"] != "ok"]
    missing: dict[tuple[str, str], list[str]] = {}  # {(variant, reason): metrics}
    failed = []
    for name, r in results.items():
        for metric, m in r["metrics"].items():
            if m["value"] is None:
                missing.setdefault((name, reason_of(m)), []).append(metric)
        rate = r["metrics"].get("failure_rate")
        if rate and rate["value"]:
            failed.append(f"{name}: {with_unit(rate)} of {rate['n']} requests failed; they are out of the rates")
    named: dict[tuple[str, str], list[str]] = {}
    for (name, reason), metrics in missing.items():
        named.setdefault((briefly(metrics), reason), []).append(name)
    return lines + [f"{', '.join(names)}: no value for {what}: {reason}" for (what, reason), names in named.items()] + failed


def briefly(metrics: Iterable[str], most: int = 3) -> str:
    """Names, the parts of one together: `acc/(facts, all)`, `p_mcnemar/(7 parts)` where there are more than `most`."""
    by: dict[str, list[str]] = {}
    for stem, _, part in (m.partition("/") for m in metrics):
        by.setdefault(stem, []).append(part)
    few = {stem: ", ".join(parts) if len(parts) <= most else f"{len(parts)} parts" for stem, parts in by.items()}
    return ", ".join(stem if by[stem] == [""] else f"{stem}/({parts})" for stem, parts in few.items())


def machines(results: Results) -> str:
    """The machine, or machines, that the timings were taken on."""
    facts = list({repr(m): m for r in results.values() if (m := r["machine"])}.values())
    if not facts:
        return "no timings were taken"
    several = f"{len(facts)} different machines, whose timings must not be compared: " if len(facts) > 1 else ""
    return several + "; ".join(map(machine, facts))


def machine(facts: records.Machine) -> str:
    """A machine in a line, from what `hardware.describe` wrote."""
    gpu = facts["gpu"] or "no GPU"
    return (
        f"{facts['cpu']}, {facts['cores']} cores ({facts['cpu_capability']}), {facts['threads']} threads, "
        f"{facts['memory_bytes'] / 2**30:.0f} GiB, {gpu}, {facts['system']}, Python {facts['python']}"
    )


def run_to_run(between: float | None) -> str:
    """Whether speed intervals include run-to-run variation. between: log standard deviation; None: not measured."""
    if between is None:
        return "Speed intervals cover this run only; run-to-run variation was not measured (compare.between_runs)."
    return f"Speed intervals include run-to-run variation of {100 * between:g} % on this machine."


def stopped_early(results: Results) -> str:
    """Which measurements ended before their last row, and what that saved; empty where none did."""
    ended = [(n, s, look) for n, r in results.items() for s, look in r.get("looks", {}).items() if look["share"] < 1]
    if not ended:
        return ""
    where = ", ".join(f"{stage} of {name} at {100 * look['share']:.0f} %" for name, stage, look in ended)
    return f"Stopped early, as their rules were decided: {where}; {sum(look['saved_s'] for *_, look in ended):.0f} s saved."


class Bound(NamedTuple):
    """What bounds a phase. memory, arithmetic: percent of its time that reading the weights and multiplying need at the rates
    measured, None where unknown; words: a short sentence; full: all that is known."""

    phase: str
    memory: float | None
    arithmetic: float | None
    words: str
    full: str


def bounds(result: VariantResult) -> list[Bound]:
    """What bounds a variant's phases."""
    found = []
    for phase, names in {"decode": ("mbu", "mfu/decode"), "prefill": ("mbu/prefill", "mfu")}.items():
        against = "against" if phase == "decode" else "against_prefill"
        said = [str(v) for k in (phase, against) if (v := result["bounds"].get(k))]
        if said:
            memory, arithmetic = (value if value is None else 100 * value for value in (value_of(result, n) for n in names))
            found.append(Bound(phase, memory, arithmetic, said[0].partition(":")[0], "; ".join(said)))
    return found


def cautions(results: Results) -> list[str]:
    """Warnings on the overview's values and cliffs of speed, each said once with its variants."""
    shown = ("kld_mean", "speed_ratio", "peak_memory_bytes")
    said = [(w, name) for name, r in results.items() for key in shown for w in worth(r["metrics"].get(key))]
    return grouped(said + [(cliff, name) for name, r in results.items() for cliff in r["bounds"].get("cliffs", [])])
