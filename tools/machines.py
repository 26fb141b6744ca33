"""Show this machine's results beside a bundle's, as Markdown. Pure.

Differing conditions come first. Quality is compared (do the intervals overlap?) only where base, sets and amounts agree. Timings of
two machines are never compared, only shown.
"""

from __future__ import annotations

from typing import Any

from pipeline.core.cli import markdown_table
from pipeline.reporting import text

Row = dict[str, Any]
QUALITY = (("kld_mean", "nats"), ("top1_agreement", "fraction"), ("ppl_ratio", "ratio"), ("acc_delta/all", "pp"))
TIMINGS = (
    ("ttft_ms", "ms"),
    ("tpot_ms", "ms"),
    ("decode_tok_s", "tok/s"),
    ("speed_ratio", "ratio"),
    ("peak_memory_bytes", "bytes"),
)
DECIDES = ("base", "quality", "sets")  # differences in these make quality figures incomparable
SHOWN = ("base", "quality", "sets", "speed", "gate", "versions", "machine", "code")
NUMBERS = ("value", "low", "high", "n")


def side_by_side(here: Row, there: Row) -> str:
    """The comparison as Markdown. here, there: {conditions, results, verdict} as in a bundle."""
    differ = {part: _differences(here["conditions"].get(part), there["conditions"].get(part)) for part in SHOWN}
    names = sorted(here["results"].keys() | there["results"].keys(), key=lambda n: (n not in here["results"], n))
    parts = (
        ["# This machine and another", "", *_conditions(differ, here, there)], ["## Verdicts", "", *_verdicts(names, here, there)],
        _quality(names, differ, here, there), _timings(names, here, there),
    )  # fmt: skip
    return "\n".join(line for part in parts for line in [*part, ""])


def _conditions(differ: dict[str, list[str]], here: Row, there: Row) -> list[str]:
    lines = ["## Conditions that differ (here, there)", ""]
    found = [f"- {part}: {what}" for part, whats in differ.items() for what in whats]
    for name in sorted(here["results"].keys() ^ there["results"].keys()):
        found.append(f"- variant {plain(name)}: only {'here' if name in here['results'] else 'there'}")
    for name in sorted(here["results"].keys() & there["results"].keys()):
        ours, theirs = (_dict(s["conditions"].get("variants")).get(name) for s in (here, there))
        found += [f"- variant {plain(name)}: {what}" for what in _differences(ours, theirs)]
    return lines + (found or ["None."])


def _verdicts(names: list[str], here: Row, there: Row) -> list[str]:
    rows = [[n, *(_verdict(side["verdict"], n) for side in (here, there))] for n in names]
    return _table(["variant", "here", "there"], rows)


def _verdict(verdict: Row, name: str) -> str:
    judged = _dict(verdict.get("variants")).get(name)
    return str(judged.get("verdict", "unknown")) if isinstance(judged, dict) else "not judged"


def _quality(names: list[str], differ: dict[str, list[str]], here: Row, there: Row) -> list[str]:
    why = [part for part in DECIDES if differ[part]]
    rows = []
    for name in names:
        for metric, unit in QUALITY:
            ours, theirs = (figure(side["results"].get(name), metric) for side in (here, there))
            if ours or theirs:
                said = "not comparable" if why else compared(ours, theirs)
                rows.append([name, metric, *(f"{text.with_unit(m and m | {'unit': unit})}{_n(m)}" for m in (ours, theirs)), said])
    note = f"Not comparable: {', '.join(why)} differ." if why else "Same base, sets and amounts, so that figures can be compared."
    return ["## Quality", "", note, "", *_table(["variant", "metric", "here", "there", "intervals"], rows)]


def _timings(names: list[str], here: Row, there: Row) -> list[str]:
    """Two columns and no difference: timings of two machines say nothing about the variants."""
    rows = []
    for name in names:
        for metric, unit in TIMINGS:
            ours, theirs = (figure(side["results"].get(name), metric) for side in (here, there))
            if ours or theirs:
                rows.append([name, metric, *(f"{text.with_unit(m and m | {'unit': unit})}{_n(m)}" for m in (ours, theirs))])
    machines = [machine(side) for side in (here, there)]
    note = f"Each on its own machine, and not compared. Here: {machines[0]}. There: {machines[1]}."
    return ["## Speed and memory", "", note, "", *_table(["variant", "metric", "here", "there"], rows)]


def machine(side: Row) -> str:
    """One side's machine; `unknown` if the bundle does not say."""
    try:
        return plain(text.machine(side["conditions"]["machine"]))
    except (KeyError, TypeError, ValueError):
        return "unknown"


def compared(ours: Row | None, theirs: Row | None) -> str:
    """`equal`, `overlap`, `apart`, or why they cannot be compared."""
    if not (ours and theirs) or ours["value"] is None or theirs["value"] is None:
        return "not in both"
    if all(ours[k] == theirs[k] for k in NUMBERS):
        return "equal"
    if None in (ours["low"], ours["high"], theirs["low"], theirs["high"]):
        return "no interval"
    return "apart" if ours["high"] < theirs["low"] or theirs["high"] < ours["low"] else "overlap"


def figure(result: Row | None, name: str) -> Row | None:
    """One metric of an untrusted metrics file: numbers or None."""
    found = _dict((result or {}).get("metrics")).get(name)
    if not isinstance(found, dict):
        return None
    return {k: v if _is_number(v := found.get(k)) else None for k in NUMBERS}


def plain(value: Any) -> str:
    """Untrusted text as one short line without control characters or table marks."""
    text = "".join(c if c.isprintable() else " " for c in str(value)).replace("|", "/")
    return text if len(text) <= 200 else f"{text[:200]}…"


def _differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """`tier: default, full` for each leaf that differs."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = [*ours, *(k for k in theirs if k not in ours)]
        return [d for k in keys for d in _differences(ours.get(k), theirs.get(k), f"{where}.{k}" if where else str(k))]
    if ours == theirs:
        return []
    shown = [plain(v)[:12] if isinstance(v, str) and len(v) == 64 else plain(v) for v in (ours, theirs)]
    return [f"{plain(where) + ': ' if where else ''}{shown[0]}, {shown[1]}"]


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    return [markdown_table([dict(zip(columns, map(plain, row))) for row in rows])] if rows else []


def _n(metric: Row | None) -> str:
    return f" (n = {metric['n']:g})" if metric and metric["n"] is not None else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300  # not NaN, not infinite


def _dict(value: Any) -> Row:
    return value if isinstance(value, dict) else {}
