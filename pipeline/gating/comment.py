"""The comment of a merge request: the verdict first, then the differences that matter most, then every rule, folded.

`python -m pipeline.gate --comment --baseline REV` writes it; .github/workflows/gate.yml posts it once and edits it from then on,
finding it by MARK.
"""

from __future__ import annotations

from typing import Any

from pipeline.core import artifacts
from pipeline.reporting.text import dequantized, with_unit
from pipeline.reporting.text import render as page

FILE = artifacts.ARTIFACTS / "comment.md"
MARK = "<!-- quantgate -->"
DELTAS = 3  # so many differences stand above the fold
LONGEST = 300  # characters of a reason in the table
LARGEST = 60_000  # characters that a comment holds (GitHub: 65 536), without its line ends
ORDER = {"FAIL": 0, "INCONCLUSIVE": 1, "PASS": 2}
Row = dict[str, Any]


def problem(reason: str) -> str:
    """The comment where there is no verdict."""
    return f"{MARK}\n### quantgate: no verdict\n\n{_plain(reason)}\n\nNothing is passed without a verdict (exit code 2).\n"


def render(verdict: Row, results: dict[str, Row], beside: Row | None) -> str:
    """Markdown of a verdict. results: {variant: its metrics}; beside: see `baseline.beside`, None without a baseline."""
    variants = verdict["variants"]
    required = {n: v for n, v in variants.items() if v["required"]}
    advisory = {n: v for n, v in variants.items() if not v["required"]}
    level: float = next(v["family"]["level"] for v in variants.values())  # what a confidence leaves on one side
    context = {
        "mark": MARK, "verdict": verdict, "beside": beside, "required": required, "advisory": advisory,
        "deltas": _deltas(required or advisory, results, beside), "confidence": f"{round(100 * (1 - 2 * level), 6):g}",
        "dequantized": dequantized(results.get(verdict["reference"], {})), "report": artifacts.REPORTS / "report.html",
        "rules": [_cells(name, rule, beside) for name, v in variants.items() for rule in v["rules"]],
    }  # fmt: skip
    whole = page("comment.md.j2", context | {"folded": True}, plain=_plain)
    return whole if len(whole) <= LARGEST else page("comment.md.j2", context | {"folded": False}, plain=_plain)


def _deltas(variants: Row, results: dict[str, Row], beside: Row | None) -> list[str]:
    """One line for each of the figures nearest to, or farthest past, what their rules allow."""
    ranked: dict[tuple[str, str], tuple[tuple[bool, int, float], str]] = {}
    for name, v in variants.items():
        for rule in v["rules"]:
            metric = results.get(name, {}).get("metrics", {}).get(rule["metric"])
            if metric is None or metric.get("value") is None:
                continue
            rank = (not rule["required"], ORDER[rule["verdict"]], -_used(rule))
            candidate = rank, _delta(name, rule, metric, beside)
            key = (name, rule["metric"])
            ranked[key] = min(ranked.get(key, candidate), candidate)
    return [line for _, line in sorted(ranked.values())[:DELTAS]]


def _used(rule: Row) -> float:
    """How much of what a rule allows is used up by the worse end of the interval; 1 is the bound."""
    ends = [rule[k] for k in ("low", "high") if rule.get(k) is not None] or [rule.get("value")]
    if ends[0] is None:
        return 0.0
    neutral = rule["neutral"] or 0.0  # an absolute limit counts from 0
    allowed = rule["threshold"] - neutral
    far = max(ends) if rule["better"] == "lower" else min(ends)
    return (far - neutral) / allowed if allowed else 0.0


def _delta(name: str, rule: Row, metric: Row, beside: Row | None) -> str:
    """`**int4** kld_mean: 0.256 → 0.485 nats, +0.23 [+0.18, +0.29] (paired by token, n = 4914): FAIL, margin 0.02 nats`."""
    judged = f"{rule['verdict']}, {_bound(rule)}"
    figure = beside["variants"][name]["figures"].get(rule["metric"]) if beside else None
    if figure is None or beside is None:
        why = " (no baseline: new)" if beside else ""
        return f"- **{name}** {rule['metric']}: {_interval(metric)}, n = {metric['n']}{why}: {judged}"
    then = beside["variants"][name]["values"][rule["metric"]]
    both = f"{with_unit(then | {'unit': metric['unit']}, interval=False)} → {with_unit(metric, interval=False)}"
    lost = [w for w in figure["warnings"] if w.startswith(("pairing was lost", "the baseline", "the reference"))]
    how = "; ".join([f"{figure['how']}, n = {figure['n']}", *map(_plain, lost)])
    return f"- **{name}** {rule['metric']}: {both}, {'quotient ' * (figure['unit'] == 'ratio')}{_change(figure)} ({how}): {judged}"


def _bound(rule: Row) -> str:
    return _plain(rule["bound"]) + ("" if rule["required"] else ", advisory")


def _change(figure: Row) -> str:
    return _interval(figure, sign=figure["unit"] != "ratio")


def _interval(metric: Row, sign: bool = False) -> str:
    if metric.get("value") is None:
        return "–"
    return with_unit(metric, sign=sign) + (" (no interval)" if metric.get("low") is None else "")


def _cells(name: str, rule: Row, beside: Row | None) -> Row:
    """A rule's row of the table."""
    figure = beside["variants"][name]["figures"].get(rule["metric"]) if beside else None
    change = f"{_change(figure)} ({figure['how']})" if figure else "no baseline" if beside else "–"
    return {
        "variant": name, "metric": rule["metric"], "figure": "–" if rule["against"] == "baseline" else _interval(rule),
        "n": "–" if rule["n"] is None else rule["n"], "since the baseline": change, "rule": _bound(rule),
        "verdict": rule["verdict"], "why": _plain(rule["reason"][:LONGEST]),
    }  # fmt: skip


def _plain(text: Any) -> str:
    """Text without a cell, tag, mention or line of Markdown's."""
    plain = str(text)
    for char, instead in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("@", "&#64;"), ("\n", " "), ("\r", " ")):
        plain = plain.replace(char, instead)
    return plain
