"""How values, verdicts, tables and machines are written wherever people read them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from pipeline.core import records
from pipeline.core.cli import markdown_table as markdown_table  # tracking takes it from here
from pipeline.core.explain import nominal_bits
from pipeline.core.records import Metric, Results, RuleVerdict, VariantResult, VariantVerdict
from pipeline.metrics.definitions import FLOOR_MARK, FLOOR_TIMES

K = TypeVar("K")
V = TypeVar("V")
Row = dict[str, str | Metric | None]  # {column: cell} of a table
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
    """rule: {unit a gate's rule may use: its size in the metric's own}, the first for differences too; name, factor: the unit that
    people read, and the factor to it."""

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
    """A known value."""

    value: float
    interval: tuple[float, float] | None
    n: int


def known(metric: Metric | records.ShortEstimate | records.Span | None) -> Known | None:
    if metric is None or metric["value"] is None:
        return None
    low, high = metric["low"], metric["high"]
    return Known(metric["value"], None if low is None or high is None else (low, high), metric["n"])


def value_of(result: VariantResult, name: str) -> float | None:
    metric = result["metrics"].get(name)
    return metric["value"] if metric else None


def render(template: str, context: Mapping[str, object], **filters: Callable[..., str]) -> str:
    """Fill a template of reporting/templates/."""
    import jinja2

    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=template.endswith(".html.j2"), trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True,
    )  # fmt: skip
    env.filters |= {"in_words": in_words} | filters
    env.globals |= {"show": show, "about": about, "floor_mark": floor_mark, "worth": worth, "markdown_table": markdown_table}
    return env.get_template(template).render(context)


def unit_of(name: str) -> Unit:
    return UNITS.get(name) or Unit({}, name)


def difference(unit: str) -> tuple[float, str]:
    """(factor, unit) for a difference of metrics: shares in points, ratios in %."""
    name, size = next(iter(UNITS[unit].rule.items()))
    return 1 / size, name


def show(metric: records.Interval | None, digits: int = 3, sign: bool = False, interval: bool = True) -> str:
    """`0.00623 [0.00579, 0.00675]`, in the unit people read; a dash if unknown."""
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


def worth(metric: Metric | None) -> list[str]:
    """Warnings on a known value, without those that every table shows anyway."""
    if metric is None or metric["value"] is None:
        return []
    return [w for w in metric["warnings"] if not w.startswith((FLOOR_MARK, ONCE))]


def reason_of(metric: Metric) -> str:
    return "; ".join(metric["warnings"]) or "no reason given"


def number(value: float, style: str = ".3g") -> str:
    """`format`, without exponents from 0.0001 to a million and without a sign on zero."""
    text = format(value, style)
    if "e" in text and 1e-4 <= abs(value) < 1e6:
        text = format(round(value), "d") if abs(value) >= 1 else format(value, ".6f")
    return "0" if value == 0 else text


def digits_apart(values: list[float]) -> int:
    """Significant digits, 3 to 8, at which different values also look different."""
    different = set(values)
    return next((d for d in range(3, 8) if len({format(v, f".{d}g") for v in different}) == len(different)), 8)


def counted(numbers: Iterable[int]) -> str:
    """`5`, or `5 to 10`; `0` for none."""
    ordered = sorted(numbers) or [0]
    return f"{ordered[0]}" if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"


def n_of(results: Results, metric: str) -> str:
    """The range of n over all variants that have the metric."""
    return counted(m.n for r in results.values() if (m := known(r["metrics"].get(metric))))


def dequantized(result: VariantResult) -> str:
    """The note beside the reference's name if its base was published quantized."""
    return f" (dequantized from {source})" if (source := result.get("dequantized_from")) else ""


def verdict_word(judged: VariantVerdict | None) -> str:
    """A verdict in words: `FAIL on size` if size is all that a variant, as one of 16 bits, fails by."""
    if judged is None:
        return "reference"
    size = " on size" if {r["metric"] for r in deciding(judged)} == {"size_ratio"} else ""
    return judged["verdict"] + size + ("" if judged["required"] else " (advisory)")


def deciding(judged: VariantVerdict) -> list[RuleVerdict]:
    """The required rules that kept a variant from passing."""
    return [r for r in judged["rules"] if r["required"] and r["verdict"] == judged["verdict"] != "PASS"]


def brief(judged: VariantVerdict) -> str:
    """A verdict in one line: the rules that decided it with value and bound, or its reason, cut."""
    reason = judged["reason"]
    return ", ".join(map(_brief_rule, deciding(judged))) or (reason if len(reason) <= LONGEST else f"{reason[:LONGEST]}…")


def aside(judged: VariantVerdict) -> str:
    """Advisory rules that fail; empty if none does."""
    failed = [r for r in judged["rules"] if not r["required"] and r["verdict"] == "FAIL"]
    return f"advisory, fails: {', '.join(map(_brief_rule, failed))}" if failed else ""


def _brief_rule(rule: RuleVerdict) -> str:
    unsure, why = rule["verdict"] == "INCONCLUSIVE", settled_by(rule) or f"; {rule['reason'].partition(';')[0]}"
    name = NAMES.get(rule["metric"], rule["metric"])
    return f"{name} {judged_value(rule, unsure)} ({bound(rule)}{why if unsure else ''})"


def judged_value(rule: RuleVerdict, interval: bool = True) -> str:
    """A rule's value with enough digits to tell value, interval and bound apart."""
    return with_unit(rule, interval, _digits(rule))


def _digits(rule: RuleVerdict) -> int:
    ends = rule["value"], rule["low"], rule["high"], rule["threshold"]
    return digits_apart([end for end in ends if end is not None])


def bound(rule: RuleVerdict) -> str:
    """`at most 0.02`, in the unit of the value."""
    side = "at most" if rule["better"] == "lower" else "at least"
    return f"{side} {number(rule['threshold'] * unit_of(rule['unit']).factor, f'.{max(4, _digits(rule))}g')}"


def settled_by(rule: RuleVerdict) -> str:
    """`; about 4000 items in place of 696 would settle it`; empty if the gate could not tell."""
    if not rule["settle"]:
        return ""
    kind = next((what for start, what in COUNTED.items() if rule["metric"].startswith(start)), "")
    return f"; about {rule['settle']}{kind} in place of {rule['n']} would settle it"


def overview(results: Results, verdict: records.Verdict) -> list[Row]:
    """The first table: one row for each variant."""
    rows: list[Row] = []
    for name, result in results.items():
        metric = result["metrics"].get
        rows.append({
            "variant": name, "verdict": verdict_word(verdict["variants"].get(name)), "size, MB": metric("weight_bytes"),
            "quality loss: KLD, nats": metric("kld_mean"), f"decode, × {verdict['reference']}": metric("speed_ratio"),
            OWN: own_ratio(results, name), "memory, MB": metric("peak_memory_bytes"),
        })  # fmt: skip
    return rows


def own_16(results: Results, name: str) -> str | None:
    """The unquantized variant of a variant's engine: 16-bit weights (else 32), no smaller cache, no draft model. In the reference's
    engine it is the reference."""
    variant = results[name]
    same = [n for n, r in results.items() if r["engine"] == variant["engine"] and not _changes_more(r["engine_options"])]
    by_bits = [n for bits in (16, 32) for n in same if nominal_bits(results[n]["options"]) == bits]
    return variant["reference"] if variant["reference"] in same else next(iter(by_bits), None)


def _changes_more(options: records.Options) -> bool:
    kept = [nominal_bits({"type": v}) for k, v in options.items() if k == "kv"]
    return "speculate" in options or any(bits is not None and bits < 16 for bits in kept)


def own_ratio(results: Results, name: str) -> Metric | None:
    """Decode rate over that of `own_16`; None if there is no such variant, or it is the variant itself."""
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


def results_table(results: Results, verdict: records.Verdict) -> list[dict[str, str]]:
    """The overview as text, without the engine's own 16 bits: `effects.rows` has these."""
    return [in_words({k: cell for k, cell in row.items() if k != OWN}) for row in overview(results, verdict)]


def in_words(row: Row) -> dict[str, str]:
    """A row as text."""
    return {k: cell if isinstance(cell, str) else show(cell) + floor_mark(cell) for k, cell in row.items()}


def about(metric: Metric | None) -> str:
    """A value's tooltip: n, interval, method, warnings."""
    if not metric:
        return "not measured"
    if metric["value"] is None:
        return f"unknown: {reason_of(metric)}"
    if metric["low"] is None or metric["high"] is None:
        interval = "no interval"
    elif metric["low"] == metric["high"]:
        interval = "exact"
    else:
        interval = f"{100 * metric['confidence']:g} % interval {show(metric).partition(' ')[2]}"
    value = f"{with_unit(metric, interval=False)}, n = {metric['n']}"
    return "; ".join(filter(None, (value, interval, metric["method"], *metric["warnings"])))


def grouped(sentences: Iterable[tuple[str, str]]) -> list[str]:
    """Each sentence once, with all names it concerns; numbers that differ become a range. sentences: (sentence, name)."""
    alike = together((tuple(NUMBER.split(sentence)), (NUMBER.findall(sentence), name)) for sentence, name in sentences)
    lines = []
    for parts, uses in alike.items():
        columns = [set(column) for column in zip(*(numbers for numbers, _ in uses))]
        spans = [min(c, key=float) + (f"–{max(c, key=float)}" if len(c) > 1 else "") for c in columns]
        whole = "".join(part + span for part, span in zip(parts, (*spans, "")))
        lines.append(f"{whole}: {briefly(dict.fromkeys(name for _, name in uses), most=len(uses))}")
    return lines


def with_flips(result: VariantResult, task: str) -> Metric | None:
    """The accuracy difference on a task; its tooltip has the items lost and won."""
    lost, won = (show(result["metrics"].get(f"flips_to_{way}/{task}"), interval=False) for way in ("wrong", "right"))
    delta = result["metrics"].get(f"acc_delta/{task}")
    return delta and {**delta, "method": f"{lost} items lost, {won} won; {delta['method']}"}


def floor_mark(metric: Metric | None) -> str:
    """` (floor-limited)` for such a value, else empty."""
    limited = metric is not None and any(w.startswith(FLOOR_MARK) for w in metric["warnings"])
    return f" ({FLOOR_MARK})" if limited else ""


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
    """The noise floor by condition and the effect of rounding; empty if none was measured."""
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
    """Compare each calibrated variant with plain rounding at the same bits and group size."""
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
    """Failed and unsupported variants and unknown values, each with its reason."""
    lines = [f"{name}: {r['status']}: {r['reason']}" for name, r in results.items() if r["status"] != "ok"]
    unknown = [((name, reason_of(m)), k) for name, r in results.items() for k, m in r["metrics"].items() if m["value"] is None]
    by_reason = together(((briefly(metrics), reason), name) for (name, reason), metrics in together(unknown).items())
    lines += [f"{', '.join(names)}: no value for {what}: {reason}" for (what, reason), names in by_reason.items()]
    rates = [(name, rate) for name, r in results.items() if (rate := r["metrics"].get("failure_rate")) and rate["value"]]
    return lines + [f"{n}: {with_unit(rate)} of {rate['n']} requests failed; they are out of the rates" for n, rate in rates]


def briefly(metrics: Iterable[str], most: int = 3) -> str:
    """Names, grouped by stem: `acc/(facts, all)`, or `p_mcnemar/(7 parts)` for more than `most`."""
    by = together((stem, part) for stem, _, part in (m.partition("/") for m in metrics))
    few = {stem: ", ".join(parts) if len(parts) <= most else f"{len(parts)} parts" for stem, parts in by.items()}
    return ", ".join(stem if by[stem] == [""] else f"{stem}/({parts})" for stem, parts in few.items())


def together(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """{key: all its values, in order}."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def machines(results: Results) -> str:
    """The machines that the timings were taken on."""
    facts = list({repr(m): m for r in results.values() if (m := r["machine"])}.values())
    if not facts:
        return "no timings were taken"
    several = f"{len(facts)} different machines, whose timings must not be compared: " if len(facts) > 1 else ""
    return several + "; ".join(map(machine, facts))


def machine(facts: records.Machine) -> str:
    return (
        f"{facts['cpu']}, {facts['cores']} cores ({facts['cpu_capability']}), {facts['threads']} threads, "
        f"{facts['memory_bytes'] / 2**30:.0f} GiB, {facts['gpu'] or 'no GPU'}, {facts['system']}, Python {facts['python']}"
    )


def run_to_run(between: float | None) -> str:
    """Whether speed intervals include run-to-run variation. between: log standard deviation; None: not measured."""
    if between is None:
        return "Speed intervals cover this run only; run-to-run variation was not measured (compare.between_runs)."
    return f"Speed intervals include run-to-run variation of {100 * between:g} % on this machine."


def stopped_early(results: Results) -> str:
    """Measurements that ended before their last row, and the time saved; empty if none did."""
    ended = [(n, s, look) for n, r in results.items() for s, look in r.get("looks", {}).items() if look["share"] < 1]
    if not ended:
        return ""
    where = ", ".join(f"{stage} of {name} at {100 * look['share']:.0f} %" for name, stage, look in ended)
    return f"Stopped early, as their rules were decided: {where}; {sum(look['saved_s'] for *_, look in ended):.0f} s saved."


class Bound(NamedTuple):
    """What bounds a phase. memory, arithmetic: percent of its time for reading the weights and for multiplying, at the measured
    rates (None: unknown); words: short; full: for the tooltip."""

    phase: str
    memory: float | None
    arithmetic: float | None
    words: str
    full: str


def bounds(result: VariantResult) -> list[Bound]:
    phases, asked = [], (("decode", "against", "mbu", "mfu/decode"), ("prefill", "against_prefill", "mbu/prefill", "mfu"))
    for phase, against, *names in asked:
        if words := [str(v) for k in (phase, against) if (v := result["bounds"].get(k))]:
            memory, arithmetic = (value if value is None else 100 * value for value in (value_of(result, n) for n in names))
            phases.append(Bound(phase, memory, arithmetic, words[0].partition(":")[0], "; ".join(words)))
    return phases


def cautions(results: Results) -> list[str]:
    """Warnings on the first table's values, and cliffs of speed, each once with its variants."""
    shown = ("kld_mean", "speed_ratio", "peak_memory_bytes")
    warnings = [(w, name) for name, r in results.items() for key in shown for w in worth(r["metrics"].get(key))]
    return grouped(warnings + [(cliff, name) for name, r in results.items() for cliff in r["bounds"].get("cliffs", [])])
