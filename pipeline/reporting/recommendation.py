"""What to serve: the fastest variant that passes, gain and cost of each step down in bits, and which variants are dominated.

A rung of the ladder (reference, 8 bits, 4, ...) is the variant with that many nominal bits that comes nearest to passing: PASS
first, then fewest required rules not passed; then the fastest that passes, or else the nearest to the reference.

One variant dominates another if it is faster (decode rate over the reference's in the same run), no larger on disk, and nearer to
the reference (mean KLD), with intervals that do not overlap. KLDs below the noise floor's limit count as equal. If the intervals of
one axis overlap, domination is open. Timings of different machines are never compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from pipeline.core.explain import nominal_bits
from pipeline.core.records import Results, VariantVerdict, Verdict
from pipeline.metrics import definitions
from pipeline.reporting import effects, smallest, text
from pipeline.reporting.text import Known, known, show, value_of

Judged = dict[str, VariantVerdict]
COSTS = ("kld_mean", "top1_agreement", "acc_delta/all")
AXES = ("speed_ratio", "kld_mean")


@dataclass(frozen=True)
class Advice:
    """answer: whether a variant of so many bits passes; serve: the advice; command: how to follow it, or None; notes: its limits;
    breaks: why fewer bits do not pass; ladder: a sentence for each step; open: what is not settled; smallest: what `make smallest`
    certified; setting: its params.yaml line."""

    answer: str
    serve: str
    command: str | None
    notes: list[str]
    breaks: str | None
    ladder: list[str]
    open: list[str]
    smallest: list[str]
    setting: str | None


@dataclass(frozen=True)
class Domination:
    """by: the variant that dominates; sure: no intervals overlap; words: the values of both."""

    by: str
    sure: bool
    words: str


def advice(results: Results, verdict: Verdict, reference: str, found: smallest.Found | None = None) -> Advice:
    """What to serve, and why. found: the results of `make smallest`."""
    judged = verdict["variants"]
    rungs = _rungs(results, judged, reference)
    ladder = [_step(results, judged, a, b) for a, b in pairwise(rungs)]
    serve, breaks = _serve(results, judged, reference), _breaks(results, judged, rungs[-1])
    least = smallest.advice(found, results, verdict) if found else ([], None)
    return Advice(_answer(results, judged), *serve, breaks, ladder, _open(results, judged, reference), *least)


def _answer(results: Results, judged: Judged) -> str:
    """`4 bits: no, none of 5 variants passes. 8 bits: yes, int8.`"""
    tried = ((bits, n) for n, v in judged.items() if v["rules"] and (bits := nominal_bits(results[n]["options"])) and bits < 16)
    said = []
    for bits, names in sorted(text.together(tried).items()):
        passed = [n for n in names if judged[n]["verdict"] == "PASS"]
        none = "no, none" if all(judged[n]["verdict"] == "FAIL" for n in names) else "not settled, none"
        yes = f"yes, {', '.join(passed)}"
        said.append(f"{bits} bits: {yes if passed else f'{none} of {len(names)} variants passes'}.")
    return " ".join(said)


def one_machine(results: Results) -> bool:
    return len({repr(r["machine"]) for r in results.values() if r["machine"]}) <= 1


def _serve(results: Results, judged: Judged, reference: str) -> tuple[str, str | None, list[str]]:
    """(the fastest variant that passes, its command, notes)."""
    passed = [n for n, v in judged.items() if v["verdict"] == "PASS"]
    speeds = {n: speed for n in passed if (speed := known(results[n]["metrics"].get("speed_ratio")))}
    names = sorted(speeds, key=lambda n: -speeds[n].value)
    if not passed:
        return _nearest(results, judged), None, []
    if not names:
        return f"{', '.join(passed)} pass every required rule; how fast they are is unknown.", None, []
    if not one_machine(results):
        return f"{', '.join(names)} pass every required rule; which is fastest is unknown: timed on different machines.", None, []
    best = names[0]
    metrics = results[best]["metrics"]
    line = f"Ship {best}: {show(metrics['speed_ratio'])} times {reference}'s decode rate{_size(results, reference, best)}, "
    line += f"KLD {text.with_unit(metrics.get('kld_mean'))} (brackets: {100 * metrics['speed_ratio']['confidence']:g} % intervals)."
    costs = [f"{text.NAMES[k]} {text.with_unit(m)}" for k in COSTS[1:] if known(m := metrics.get(k))]
    several = f"{best} is the fastest of the {len(names)} that pass every required rule ({', '.join(names)})."
    notes = [f"{apart}."] if (apart := effects.words(results, best)) else []
    notes += [f"{best} against {reference}: {', '.join(costs)}."] if costs else []
    notes += [several if len(names) > 1 else "It is the only variant that passes every required rule."]
    of = [v for v in judged.values() if v["rules"]]  # judged on the same texts, whether they passed or not
    notes += [note] if (note := smallest.family_note(len(of), judged[best]["family"]["level"])) else []
    rivals = [n for n in names[1:] if side(speeds[n], speeds[best]) != "better"]
    if rivals:
        notes.append(f"That it is faster than {', '.join(rivals)} is not settled (their intervals overlap).")
    missed = [r["metric"] for r in judged[best]["rules"] if not r["required"] and r["verdict"] != "PASS"]
    if missed:
        notes.append(f"It does not pass the advisory rule on {', '.join(missed)}.")
    if not judged[best]["required"]:
        notes.append(f"Its verdict is advisory: add {best} to gate.required in params.yaml to hold merges to it.")
    return line, f"quantgate track --promote {best}   # then serve artifacts/models/{best} ({results[best]['engine']})", notes


def _breaks(results: Results, judged: Judged, name: str) -> str | None:
    """Why the rung with the fewest bits does not pass."""
    if name not in judged or not text.deciding(judged[name]):
        return None
    return f"Of {nominal_bits(results[name]['options'])} bits {name} comes nearest: {text.brief(judged[name])}."


def _nearest(results: Results, judged: Judged) -> str:
    """The variant nearest to passing, and what keeps it from it."""
    near = sorted((n for n in judged if judged[n]["rules"]), key=lambda n: _rank(results, judged, n))
    if not near or _unpassed(judged[near[0]]) == 0:
        return "No variant passes every required rule: nothing here can be advised."
    return f"No variant passes every required rule; {near[0]} comes nearest: {text.brief(judged[near[0]])}."


def _rungs(results: Results, judged: Judged, reference: str) -> list[str]:
    """The reference, then the best variant of each lower number of bits."""
    top = nominal_bits(results[reference]["options"]) or 16
    timed = [n for n in judged if value_of(results[n], "speed_ratio") is not None]
    by_bits = text.together((bits, n) for n in timed if (bits := nominal_bits(results[n]["options"])) is not None and bits < top)
    return [reference, *(min(by_bits[b], key=lambda n: _rank(results, judged, n)) for b in sorted(by_bits, reverse=True))]


def _rank(results: Results, judged: Judged, name: str) -> tuple[bool, int, float]:
    passed, kld = judged[name]["verdict"] == "PASS", value_of(results[name], "kld_mean")
    last = -(value_of(results[name], "speed_ratio") or 0.0) if passed else math.inf if kld is None else kld
    return not passed, _unpassed(judged[name]), last


def _unpassed(judged: VariantVerdict) -> int:
    return sum(r["required"] and r["verdict"] != "PASS" for r in judged["rules"])


def _step(results: Results, judged: Judged, a: str, b: str) -> str:
    """One step down the ladder: gain, cost, verdict."""
    costs = []
    for name in COSTS:
        before, after = (results[n]["metrics"].get(name) for n in (a, b))
        start = show(before, sign=before["unit"] == "pp", interval=False) if before and known(before) else "unknown"
        costs.append(f"{text.NAMES[name]} {start} to {text.with_unit(after)}")
    why = f": {text.brief(judged[b])}" if text.deciding(judged[b]) else ""
    gain = f"{_faster(results, a, b)}{_size(results, a, b)}"
    return f"{_named(results, a)} → {_named(results, b)}: {gain}; {'; '.join(costs)}. {text.verdict_word(judged[b])}{why}."


def _named(results: Results, name: str) -> str:
    bits = nominal_bits(results[name]["options"])
    return f"{name} ({bits} bits)" if bits else name


def _faster(results: Results, a: str, b: str) -> str:
    """b's decode rate over a's: the quotient of their ratios to the reference, with the outer ends of both intervals. The
    reference's own ratio is 1; timing it against itself only shows the machine's noise."""
    slow, fast = (known(results[n]["metrics"].get("speed_ratio")) for n in (a, b))
    if slow and results[a]["reference"] == a:
        slow = Known(1.0, (1.0, 1.0), slow.n)
    if not slow or not fast or not slow.value or not fast.value:
        return "speed unknown"
    if not one_machine(results):
        return "speed not compared: timed on different machines"
    ratio = text.number(fast.value / slow.value)
    if not fast.interval or not slow.interval:
        return f"{ratio} times as fast, no interval"
    low, high = fast.interval[0] / slow.interval[1], fast.interval[1] / slow.interval[0]
    unsure = ", so neither is surely faster" if low <= 1 <= high else ""
    return f"{ratio} [{text.number(low)}, {text.number(high)}] times as fast{unsure}"


def _size(results: Results, a: str, b: str) -> str:
    """b's size and its change from a; empty if either is unknown."""
    before, after = (value_of(results[n], "weight_bytes") for n in (a, b))
    if before is None or after is None:
        return ""
    change = 100 * (after / before - 1)
    size = f"{text.number(after / 1e6)} MB"
    return f", {size} ({abs(change):.0f} % {'smaller' if change < 0 else 'larger'} than {a})" if round(change) else f", {size}"


def _open(results: Results, judged: Judged, reference: str) -> list[str]:
    """Rules whose interval contains their bound, and variants whose domination is open."""
    lines = []
    for name, v in judged.items():
        for r in v["rules"]:
            if r["verdict"] == "INCONCLUSIVE":
                more = text.settled_by(r) or f": {r['reason']}"
                kind = "" if r["required"] else ", advisory"
                lines.append(f"{name}: {r['metric']} {text.judged_value(r)} ({text.bound(r)}{kind}){more}")
    behind = dominated(results, reference)
    return lines + [f"{d.words}: whether {n} is dominated is open" for n, d in behind.items() if not d.sure]


def measured(results: Results) -> dict[str, tuple[Known, Known]]:
    """{variant: (speed, KLD)}, for variants with both."""
    pairs = {n: [known(r["metrics"].get(axis)) for axis in AXES] for n, r in results.items()}
    return {n: (speed, kld) for n, (speed, kld) in pairs.items() if speed and kld}


def front(results: Results) -> list[str]:
    """Variants that no other beats in both speed and KLD by value, fastest first: the picture's line."""
    at = {n: (-speed.value, kld.value) for n, (speed, kld) in measured(results).items()}
    chosen: list[str] = []
    for name in sorted(at, key=at.__getitem__):
        if not chosen or at[name][1] < at[chosen[-1]][1]:
            chosen.append(name)
    return chosen


def dominated(results: Results, reference: str) -> dict[str, Domination]:
    """{variant: the variant that dominates it}; of several a sure one, then the nearest to the reference."""
    behind: dict[str, Domination] = {}
    at = measured(results) if one_machine(results) else {}
    limit = definitions.floor_limit("kld_mean", results[reference]["metrics"]) or 0.0
    for name in at:
        judged = {r: _dominates(results, r, name, at, limit) for r in at if r != name}
        rivals = [(not sure, at[r][1].value, r) for r, sure in judged.items() if sure is not None]
        if name != reference and rivals:
            unsure, _, by = min(rivals, key=lambda rival: rival[:2])
            a, b = results[by]["metrics"], results[name]["metrics"]
            same = " (both floor-limited)" if side(at[by][1], at[name][1], limit) == "same" else ""
            words = (
                f"{by} against {name}: decode {show(a['speed_ratio'])} to {show(b['speed_ratio'])} times the reference's, "
                f"KLD {show(a['kld_mean'])} to {show(b['kld_mean'])} nats{same}, "
                f"{show(a['weight_bytes'])} to {show(b['weight_bytes'])} MB"
            )
            behind[name] = Domination(by, not unsure, words)
    return behind


def domination(results: Results, reference: str) -> tuple[str, list[str]]:
    """(a sentence on domination, a line for each variant that is surely dominated)."""
    sure = [d.words for d in dominated(results, reference).values() if d.sure]
    if not one_machine(results):
        return "Domination is unknown: the variants were timed on different machines.", []
    if not sure:
        return "No variant is dominated: none is beaten in speed, KLD and size at once with intervals that do not overlap.", []
    return "Dominated by a variant that is no larger, faster, and no farther from the reference; intervals do not overlap:", sure


def _dominates(results: Results, a: str, b: str, at: dict[str, tuple[Known, Known]], limit: float) -> bool | None:
    """Whether a dominates b: True: surely; False: open; None: no."""
    sizes = [value_of(results[n], "weight_bytes") for n in (a, b)]
    if sizes[0] is None or sizes[1] is None or sizes[0] > sizes[1]:
        return None
    speed, kld = side(at[b][0], at[a][0]), side(at[a][1], at[b][1], limit)
    if speed == "better" and kld in ("better", "same"):
        return True
    return False if {speed, kld} == {"better", "open"} else None


def side(low: Known, high: Known, limit: float = 0.0) -> Literal["better", "same", "open", "worse"]:
    """Whether the first value is lower (better) by intervals that do not overlap; values up to `limit` are the same."""
    if max(low.value, high.value) <= limit:
        return "same"
    if not low.interval or not high.interval:
        return "open"
    if low.interval[1] < high.interval[0]:
        return "better"
    return "worse" if low.interval[0] > high.interval[1] else "open"
