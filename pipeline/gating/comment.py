"""The comment on a merge request: the verdict, the most important differences, then all rules, folded.

`python -m pipeline.gate --comment --baseline REV` writes it; .github/workflows/gate.yml posts it once and edits it, found by MARK.
"""

from __future__ import annotations

from pipeline.core import artifacts
from pipeline.core.records import Interval, RuleVerdict, VariantVerdict
from pipeline.gating.baseline import Changes
from pipeline.gating.paired_difference import Difference
from pipeline.gating.verdicts import Merge
from pipeline.reporting import effects
from pipeline.reporting.text import dequantized, with_unit
from pipeline.reporting.text import render as page

FILE = artifacts.ARTIFACTS / "comment.md"
MARK = "<!-- quantgate -->"
DELTAS = 3  # differences above the fold
LONGEST = 300  # characters of a reason in the table
LARGEST = 60_000  # characters of a comment: GitHub's limit, 65 536, less room for line ends
ORDER = {"FAIL": 0, "INCONCLUSIVE": 1, "PASS": 2}
ESCAPED = str.maketrans({"&": "&amp;", "<": "&lt;", "|": "\\|", "@": "&#64;", "\n": " ", "\r": " "})


def problem(reason: str) -> str:
    """The comment if there is no verdict."""
    return f"{MARK}\n### quantgate: no verdict\n\n{_plain(reason)}\n\nNothing is passed without a verdict (exit code 2).\n"


def render(merge: Merge) -> str:
    """A merge's verdict as Markdown."""
    verdict, variants = merge.verdict, merge.verdict["variants"]
    required = {n: v for n, v in variants.items() if v["required"]}
    advisory = {n: v for n, v in variants.items() if not v["required"]}
    level = next(v["family"]["level"] for v in variants.values())  # one tail of the confidence
    reference = merge.results.get(verdict["reference"])
    context = {
        "mark": MARK, "verdict": verdict, "changes": merge.changes, "loosened": merge.loosened, "required": required,
        "advisory": advisory, "deltas": _deltas(required or advisory, merge),
        "apart": [words for n in required or advisory if n in merge.results and (words := effects.words(merge.results, n))],
        "confidence": f"{round(100 * (1 - 2 * level), 6):g}",
        "dequantized": dequantized(reference) if reference else "", "report": artifacts.REPORTS / "report.html",
        "rules": [_cells(name, rule, merge.changes) for name, v in variants.items() for rule in v["rules"]],
    }  # fmt: skip
    whole = page("comment.md.j2", context | {"folded": True}, plain=_plain)
    return whole if len(whole) <= LARGEST else page("comment.md.j2", context | {"folded": False}, plain=_plain)


def _deltas(variants: dict[str, VariantVerdict], merge: Merge) -> list[str]:
    """One line for each of the values closest to their bounds or farthest past them."""
    ranked: dict[tuple[str, str], tuple[tuple[bool, int, float], str]] = {}
    for name, v in variants.items():
        for rule in v["rules"]:
            rank = (not rule["required"], ORDER[rule["verdict"]], -_used(rule))
            if line := _delta(name, rule, merge):
                key = (name, rule["metric"])
                ranked[key] = min(ranked.get(key, (rank, line)), (rank, line))
    return [line for _, line in sorted(ranked.values())[:DELTAS]]


def _used(rule: RuleVerdict) -> float:
    """Share of a rule's allowance that the worse end of the interval uses up; 1 is the bound."""
    ends = [x for x in (rule["low"], rule["high"], rule["value"]) if x is not None]
    neutral = rule["neutral"] or 0.0  # an absolute limit counts from 0
    allowed = rule["threshold"] - neutral
    if not ends or not allowed:
        return 0.0
    farthest = max(ends) if rule["better"] == "lower" else min(ends)
    return (farthest - neutral) / allowed


def _delta(name: str, rule: RuleVerdict, merge: Merge) -> str:
    """`**int4** kld_mean: 0.256 → 0.485 nats, +0.23 [+0.18, +0.29] (paired by token, n = 4914): FAIL, margin 0.02 nats`."""
    result = merge.results.get(name)
    metric = result["metrics"].get(rule["metric"]) if result else None
    if metric is None or metric["value"] is None:
        return ""
    judged, change = f"{rule['verdict']}, {_bound(rule)}", merge.changes.variants[name] if merge.changes else None
    difference = change.differences.get(rule["metric"]) if change else None
    if difference is None or change is None:
        why = " (no baseline: new)" if change else ""
        return f"- **{name}** {rule['metric']}: {_interval(metric)}, n = {metric['n']}{why}: {judged}"
    before = with_unit(change.before[rule["metric"]], interval=False)
    both = f"{before} → {with_unit(metric, interval=False)}"
    lost = [w for w in difference["warnings"] if w.startswith(("pairing was lost", "the baseline", "the reference"))]
    how = "; ".join([f"{difference['how']}, n = {difference['n']}", *map(_plain, lost)])
    quotient = "quotient " if difference["unit"] == "ratio" else ""
    return f"- **{name}** {rule['metric']}: {both}, {quotient}{_change(difference)} ({how}): {judged}"


def _bound(rule: RuleVerdict) -> str:
    return _plain(rule["bound"]) + ("" if rule["required"] else ", advisory")


def _interval(metric: Interval, sign: bool = False) -> str:
    none = " (no interval)" if metric["low"] is None else ""
    return "–" if metric["value"] is None else with_unit(metric, sign=sign) + none


def _change(difference: Difference) -> str:
    return _interval(difference, sign=difference["unit"] != "ratio")


def _cells(name: str, rule: RuleVerdict, changes: Changes | None) -> dict[str, object]:
    """A rule's row of the table."""
    difference = changes.variants[name].differences.get(rule["metric"]) if changes else None
    change = f"{_change(difference)} ({difference['how']})" if difference else "no baseline" if changes else "–"
    return {
        "variant": name, "metric": rule["metric"], "figure": "–" if rule["against"] == "baseline" else _interval(rule),
        "n": "–" if rule["n"] is None else rule["n"], "since the baseline": change, "rule": _bound(rule),
        "verdict": rule["verdict"], "why": _plain(rule["reason"][:LONGEST]),
    }  # fmt: skip


def _plain(text: object) -> str:
    """Text escaped for a cell: no Markdown table cell, tag, mention or line end."""
    return str(text).translate(ESCAPED)
