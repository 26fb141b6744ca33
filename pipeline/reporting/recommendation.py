"""What to serve: the fastest variant that passes, and the gain and cost of each step down in bits (reference, 8, 4, ...).

A rung is the variant of its nominal bits that comes nearest to passing: PASS first, then fewest required rules not passed, then
fastest. Speeds are ratios to the reference in one run; they are not compared across machines.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from pipeline.core.options import nominal_bits
from pipeline.reporting import pareto, text

Results = dict[str, dict[str, Any]]
COSTS = (("kld_mean", "KLD"), ("top1_agreement", "top-1 agreement"), ("acc_delta/all", "accuracy"))


def advice(results: Results, verdict: dict[str, Any], reference: str) -> dict[str, Any]:
    """{serve: a sentence, ladder: [a sentence a step], open: [what is not settled, and what would settle it]}."""
    judged = {n: v for n, v in verdict["variants"].items() if n in results}
    steps = _rungs(results, judged, reference)
    ladder = [_step(results, judged, a, b) for a, b in pairwise(steps)]
    return {"serve": _serve(results, judged, reference), "ladder": ladder, "open": _open(results, judged, reference)}


def passing(results: Results, judged: dict[str, Any]) -> list[str]:
    """Variants that pass every required rule and have a speed, fastest first."""
    names = [n for n, v in judged.items() if v["verdict"] == "PASS" and _speed(results[n]) is not None]
    return sorted(names, key=lambda n: -(_speed(results[n]) or 0))


def _serve(results: Results, judged: dict[str, Any], reference: str) -> str:
    """The fastest variant that passes, and how sure it is that it is the fastest."""
    names = passing(results, judged)
    if not names:
        return _none(results, judged)
    if not pareto.one_machine(results):
        return f"{', '.join(names)} pass every required rule; which is fastest is unknown: they were timed on different machines."
    best, m = names[0], results[names[0]]["metrics"]
    of = "the only variant that passes" if len(names) == 1 else f"the fastest of {len(names)} variants that pass"
    line = f"{best} is {of} every required rule: {text.show(m['speed_ratio'])} times {reference}'s decode rate"
    line += _smaller(results, reference, best) + f", KLD {text.with_unit(m.get('kld_mean'))}"
    rivals = [n for n in names[1:] if pareto.side(results[n]["metrics"]["speed_ratio"], m["speed_ratio"]) != "better"]
    if rivals:
        line += f"; that it is faster than {', '.join(rivals)} is not settled (their intervals overlap)"
    missed = [r["metric"] for r in judged[best]["rules"] if not r["required"] and r["verdict"] != "PASS"]
    if missed:
        line += f"; it does not pass the advisory rule on {', '.join(missed)}"
    if not judged[best]["required"]:
        line += f"; its verdict is advisory: add {best} to gate.required to hold merges to it"
    return line + "."


def _none(results: Results, judged: dict[str, Any]) -> str:
    """No variant passes, or none with a speed: the nearest, and what keeps it from passing."""
    passed = [n for n, v in judged.items() if v["verdict"] == "PASS"]
    if passed:
        return f"{', '.join(passed)} pass every required rule; how fast they are is unknown."
    near = sorted((n for n in judged if judged[n]["rules"]), key=lambda n: _rank(results, judged, n))
    if not near or _unpassed(judged[near[0]]) == 0:
        return "No variant passes every required rule: nothing here can be advised."
    return f"No variant passes every required rule; {near[0]} comes nearest: {text.brief(judged[near[0]])}."


def _rungs(results: Results, judged: dict[str, Any], reference: str) -> list[str]:
    """The reference, then the best variant of each lower number of bits that was measured."""
    top = nominal_bits(results[reference]["options"]) or 16
    by: dict[int, list[str]] = {}
    for name in judged:
        bits = nominal_bits(results[name]["options"])
        if bits is not None and bits < top and _speed(results[name]) is not None:
            by.setdefault(bits, []).append(name)
    return [reference, *(min(by[b], key=lambda n: _rank(results, judged, n)) for b in sorted(by, reverse=True))]


def _rank(results: Results, judged: dict[str, Any], name: str) -> tuple[bool, int, float]:
    return judged[name]["verdict"] != "PASS", _unpassed(judged[name]), -(_speed(results[name]) or 0.0)


def _unpassed(judged: dict[str, Any]) -> int:
    return sum(r["required"] and r["verdict"] != "PASS" for r in judged["rules"])


def _step(results: Results, judged: dict[str, Any], a: str, b: str) -> str:
    """One step down: what it gains, what it costs, and what the gate says of it."""
    line = f"{_named(results, a)} → {_named(results, b)}: {_faster(results, a, b)}{_smaller(results, a, b)}; "
    costs = []
    for metric, label in COSTS:
        before, after = (results[n]["metrics"].get(metric) for n in (a, b))
        known = before and before["value"] is not None
        start = text.show(before | {"low": None}, sign=before["unit"] == "pp") if known else "unknown"
        costs.append(f"{label} {start} to {text.with_unit(after)}")
    line += "; ".join(costs)
    verdict = text.verdict_word(judged[b])
    why = f": {text.brief(judged[b])}" if text.deciding(judged[b]) else ""
    return f"{line}. {verdict}{why}."


def _named(results: Results, name: str) -> str:
    bits = nominal_bits(results[name]["options"])
    return f"{name} ({bits} bits)" if bits else name


def _faster(results: Results, a: str, b: str) -> str:
    """The ratio of two decode rates, each taken over the reference's in its own run; the interval is the outer one of both.
    The reference's own is 1: what it was timed at beside itself is the machine's."""
    ours, theirs = results[b]["metrics"].get("speed_ratio"), results[a]["metrics"].get("speed_ratio")
    if theirs and results[a]["reference"] == a:
        theirs = theirs | dict.fromkeys(("value", "low", "high"), 1.0)
    if not (ours and theirs) or not ours["value"] or not theirs["value"]:
        return "speed unknown"
    if not pareto.one_machine(results):
        return "speed not compared: timed on different machines"
    ratio = ours["value"] / theirs["value"]
    if None in (ours["low"], theirs["low"]):
        return f"{text.number(ratio)} times as fast, no interval"
    low, high = ours["low"] / theirs["high"], ours["high"] / theirs["low"]
    open_ = ", so neither is surely faster" if low <= 1 <= high else ""
    return f"{text.number(ratio)} [{text.number(low)}, {text.number(high)}] times as fast{open_}"


def _smaller(results: Results, a: str, b: str) -> str:
    sizes = [results[n]["metrics"].get("weight_bytes", {}).get("value") for n in (a, b)]
    if None in sizes:
        return ""
    change = 100 * (sizes[1] / sizes[0] - 1)
    size = f"{text.number(sizes[1] / 1e6)} MB"
    return f", {size} ({abs(change):.0f} % {'smaller' if change < 0 else 'larger'} than {a})" if round(change) else f", {size}"


def _open(results: Results, judged: dict[str, Any], reference: str) -> list[str]:
    """Each rule whose interval contains its bound, and each variant whose domination the intervals leave open."""
    lines = []
    for name, v in judged.items():
        for r in v["rules"]:
            if r["verdict"] == "INCONCLUSIVE":
                more = text.settled_by(r) or f": {r['reason']}"
                kind = "" if r["required"] else ", advisory"
                lines.append(f"{name}: {r['metric']} {text.judged_figure(r)} ({text.bound(r)}{kind}){more}")
    behind = pareto.dominated(results, reference)
    return lines + [f"{d.words}: whether {n} is dominated is open" for n, d in behind.items() if not d.sure]


def _speed(result: dict[str, Any]) -> float | None:
    value = result["metrics"].get("speed_ratio", {}).get("value")
    return None if value is None else float(value)
