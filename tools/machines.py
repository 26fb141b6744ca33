"""Show this machine's results beside a bundle's, as Markdown. Pure.

Conditions that differ come first. Quality is compared (do intervals overlap?) only if base, sets and amounts agree. Timings of two
machines are never compared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from typing_extensions import TypedDict

from pipeline.core.records import Json, Machine, Metric, VariantResult, Verdict
from pipeline.reporting import text

QUALITY = ("kld_mean", "top1_agreement", "ppl_ratio", "acc_delta/all")
TIMINGS = ("ttft_ms", "tpot_ms", "decode_tok_s", "speed_ratio", "peak_memory_bytes")
DECIDES = ("base", "quality", "sets")  # if these differ, quality cannot be compared
LONGEST = 200  # characters of text from elsewhere
Both = tuple[Metric | None, Metric | None]


class Conditions(TypedDict):
    """As `bundle.conditions` writes them."""

    base: str
    quality: Json
    sets: dict[str, str]
    speed: Json
    gate: Json
    versions: dict[str, str]
    machine: Machine | None
    code: dict[str, str]
    variants: dict[str, Json]


class Side(NamedTuple):
    """One machine's results. A bundle's have been checked for types, but their text is not trusted."""

    conditions: Conditions
    results: dict[str, VariantResult]
    verdict: Verdict


def side_by_side(here: Side, there: Side) -> str:
    """The comparison as Markdown."""
    parts = [k for k in Conditions.__annotations__ if k != "variants"]
    differ = {part: _differences(here.conditions.get(part), there.conditions.get(part)) for part in parts}
    names = sorted(here.results.keys() | there.results.keys(), key=lambda n: (n not in here.results, n))
    verdicts = [[n, *(_verdict(side, n) for side in (here, there))] for n in names]
    why = [part for part in DECIDES if differ[part]]
    note = f"Not comparable: {', '.join(why)} differ." if why else "Same base, sets and amounts, so that figures can be compared."
    quality = [[*row, "not comparable" if why else compared(*both)] for row, both in _rows(QUALITY, names, here, there)]
    timings = [row for row, _ in _rows(TIMINGS, names, here, there)]
    speed = f"Each on its own machine, and not compared. Here: {machine(here)}. There: {machine(there)}."
    sections = (
        ["# This machine and another", "", "## Conditions that differ (here, there)", "", *_conditions(differ, here, there)],
        ["## Verdicts", "", *_table(["variant", "here", "there"], verdicts)],
        ["## Quality", "", note, "", *_table(["variant", "metric", "here", "there", "intervals"], quality)],
        ["## Speed and memory", "", speed, "", *_table(["variant", "metric", "here", "there"], timings)],
    )
    return "\n".join(line for section in sections for line in [*section, ""])


def _conditions(differ: dict[str, list[str]], here: Side, there: Side) -> list[str]:
    lines = [f"- {part}: {what}" for part, whats in differ.items() for what in whats]
    for name in sorted(here.results.keys() ^ there.results.keys()):
        lines.append(f"- variant {plain(name)}: only {'here' if name in here.results else 'there'}")
    for name in sorted(here.results.keys() & there.results.keys()):
        whats = _differences(here.conditions["variants"].get(name), there.conditions["variants"].get(name))
        lines += [f"- variant {plain(name)}: {what}" for what in whats]
    return lines or ["None."]


def _verdict(side: Side, name: str) -> str:
    judged = side.verdict["variants"].get(name)
    return judged["verdict"] if judged else "not judged"


def _rows(metrics: tuple[str, ...], names: list[str], here: Side, there: Side) -> list[tuple[list[str], Both]]:
    """(cells, both metrics) for each variant and metric that a side has."""
    pairs = [(name, metric, (_metric(here, name, metric), _metric(there, name, metric))) for name in names for metric in metrics]
    return [([name, metric, *map(_cell, both)], both) for name, metric, both in pairs if any(both)]


def _metric(side: Side, variant: str, name: str) -> Metric | None:
    return side.results[variant]["metrics"].get(name) if variant in side.results else None


def _cell(metric: Metric | None) -> str:
    return f"{text.with_unit(metric)} (n = {metric['n']:g})" if metric else "unknown"


def machine(side: Side) -> str:
    facts = side.conditions["machine"]
    return plain(text.machine(facts)) if facts else "unknown"


def compared(here: Metric | None, there: Metric | None) -> str:
    """`equal`, `overlap`, `apart`, or why they cannot be compared."""
    if not (here and there) or here["value"] is None or there["value"] is None:
        return "not in both"
    if all(here[k] == there[k] for k in ("value", "low", "high", "n")):
        return "equal"
    if here["low"] is None or here["high"] is None or there["low"] is None or there["high"] is None:
        return "no interval"
    return "apart" if here["high"] < there["low"] or there["high"] < here["low"] else "overlap"


def plain(value: Any) -> str:
    """Untrusted text as one short line without control characters or table marks."""
    line = "".join(c if c.isprintable() else " " for c in str(value)).replace("|", "/")
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}…"


def _differences(here: Any, there: Any, where: str = "") -> list[str]:
    """`tier: default, full` for each leaf that differs."""
    if isinstance(here, dict) and isinstance(there, dict):
        keys = [*here, *(k for k in there if k not in here)]
        return [d for k in keys for d in _differences(here.get(k), there.get(k), f"{where}.{k}" if where else str(k))]
    if here == there:
        return []
    both = [plain(v)[:12] if isinstance(v, str) and len(v) == 64 else plain(v) for v in (here, there)]
    return [f"{plain(where) + ': ' if where else ''}{both[0]}, {both[1]}"]


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *(f"| {' | '.join(map(plain, row))} |" for row in rows)]
