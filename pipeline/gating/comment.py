"""The comment of a merge request: the verdict first, then the differences that matter most, then every rule, folded.

`python -m pipeline.gate --comment --baseline REV` writes it, since only a merge has a baseline; a workflow posts it once and
edits it from then on, finding it by MARK (.github/workflows/gate.yml).
"""

from __future__ import annotations

from typing import Any

from pipeline.core import artifacts
from pipeline.reporting.numbers import dequantized, number, show

FILE = artifacts.ARTIFACTS / "comment.md"
MARK = "<!-- quantgate -->"
DELTAS = 3  # so many differences stand above the fold
LONGEST = 300  # characters of a reason in the table
LARGEST = 60_000  # characters that a comment holds (GitHub: 65 536), without its line ends
ORDER = {"FAIL": 0, "INCONCLUSIVE": 1, "PASS": 2}
SHOWN = {"fraction": (100.0, "pp"), "ratio": (1.0, "×"), "bytes": (1e-6, "MB")}  # unit: (scale, as people read it)
Row = dict[str, Any]


def write(text: str) -> None:
    artifacts.write_text(FILE, text)


def problem(reason: str) -> str:
    """The comment where there is no verdict: that is no pass."""
    return f"{MARK}\n### quantgate: no verdict\n\n{_safe(reason)}\n\nNothing is passed without a verdict (exit code 2).\n"


def render(verdict: Row, results: dict[str, Row], beside: Row | None) -> str:
    """Markdown of a verdict. results: {variant: its metrics}; beside: see `baseline.beside`, None without a baseline."""
    where = f" against `{_safe(beside['rev'])}` ({beside['commit'][:7]})" if beside else ""
    required = {n: v for n, v in verdict["variants"].items() if v["required"]}
    advisory = {n: v for n, v in verdict["variants"].items() if not v["required"]}
    lines = [MARK, f"### quantgate: {verdict['verdict']}{where}", ""]
    lines += [_line(n, v) for n, v in required.items()]
    lines += [f"- looser than at the baseline: {_safe(str(change))}" for change in verdict["loosened"]]
    lines += ["", *_deltas(required or advisory, results, beside)]
    lines += [
        "",
        f"Brackets: {_confidence(verdict):g} % intervals{'; arrows: from the baseline to this change' if beside else ''}."
        f" Reference: `{_safe(ref := verdict['reference'])}`{_safe(dequantized(results.get(ref, {})))}.",
    ]
    lines += [] if beside else ["No baseline was named, so the rules were not compared with earlier ones."]
    head = lines
    lines = ["", f"<details><summary>All rules, {len(required)} required and {len(advisory)} advisory variants</summary>", ""]
    lines += [_line(n, v) for n, v in advisory.items()]
    lines += ["", *_table(verdict["variants"], beside), *_new(beside), "", "</details>"]
    if sum(map(len, head + lines)) > LARGEST:
        lines = ["", f"All rules stand in {artifacts.REPORTS / 'report.html'}: they are too many for a comment."]
    return "\n".join(head + lines) + "\n"


def _confidence(verdict: Row) -> float:
    """In percent; a family's level is what is left of it on one side."""
    level: float = next(v["family"]["level"] for v in verdict["variants"].values())
    return round(100 * (1 - 2 * level), 6)


def _line(name: str, v: Row) -> str:
    return f"- **{name}**: {v['verdict']}{'' if v['required'] else ' (advisory)'} – {_safe(v['reason'])}"


def _deltas(variants: Row, results: dict[str, Row], beside: Row | None) -> list[str]:
    """One line for each of the figures nearest to, or farthest past, what their rules allow."""
    found: dict[tuple[str, str], tuple[tuple[bool, int, float], str]] = {}
    for name, v in variants.items():
        figures = beside["variants"][name]["figures"] if beside else {}
        for rule in v["rules"]:
            metric = results.get(name, {}).get("metrics", {}).get(rule["metric"])
            if metric is None or metric.get("value") is None:
                continue
            rank = (not rule["required"], ORDER[rule["verdict"]], -_used(rule))
            text = _delta(name, rule, metric, figures.get(rule["metric"]), beside)
            key = (name, rule["metric"])
            found[key] = min(found.get(key, (rank, text)), (rank, text))
    return [text for _, text in sorted(found.values())[:DELTAS]]


def _used(rule: Row) -> float:
    """How much of what a rule allows is used up by the worse end of the interval; 1 is the bound."""
    ends = [rule[k] for k in ("low", "high") if rule.get(k) is not None] or [rule.get("value")]
    if ends[0] is None:
        return 0.0
    neutral = rule["neutral"] or 0.0  # of an absolute limit: what share of it is reached
    allowed = rule["threshold"] - neutral
    far = max(ends) if rule["better"] == "lower" else min(ends)
    return (far - neutral) / allowed if allowed else 0.0


def _delta(name: str, rule: Row, metric: Row, figure: Row | None, beside: Row | None) -> str:
    """`**int4** kld_mean: 0.256 → 0.485 nats, +0.23 [+0.18, +0.29] (paired by token, n = 4914): FAIL, margin 0.02 nats`."""
    judged = f"{rule['verdict']}, {_safe(rule['bound'])}{'' if rule['required'] else ', advisory'}"
    if figure is None:
        why = " (no baseline: new)" if beside else ""
        return f"- **{name}** {rule['metric']}: {_interval(metric)}, n = {metric['n']}{why}: {judged}"
    then = beside["variants"][name]["values"][rule["metric"]] if beside else {}
    quotient = figure["unit"] == "ratio"
    change = _interval(figure, sign=not quotient)
    both = f"{_number(then.get('value'), metric['unit'])} → {_number(metric['value'], metric['unit'])}"
    how = f"{figure['how']}, n = {figure['n']}{_notes(figure)}"
    return f"- **{name}** {rule['metric']}: {both}, {'quotient ' if quotient else ''}{change} ({how}): {judged}"


def _notes(figure: Row) -> str:
    lost = [w for w in figure["warnings"] if w.startswith(("pairing was lost", "the baseline", "the reference"))]
    return "".join(f"; {_safe(w)}" for w in lost)


def _number(value: float | None, unit: str, sign: bool = False) -> str:
    """`0.256 nats`; a share in percent, a difference of shares in points."""
    if value is None:
        return "unknown"
    scale, name = SHOWN.get(unit, (1.0, unit))
    name = "%" if unit == "fraction" and not sign else name
    return f"{number(value * scale, '+.3g' if sign else '.3g')} {name}"


def _interval(metric: Row, sign: bool = False) -> str:
    if metric.get("value") is None:
        return "–"
    if metric.get("low") is None or metric["low"] == metric["high"]:
        return _number(metric["value"], metric["unit"], sign) + ("" if metric.get("low") is not None else " (no interval)")
    unit = _number(metric["value"], metric["unit"], sign).partition(" ")[2]
    return f"{show(metric, scale=SHOWN.get(metric['unit'], (1.0, ''))[0], sign=sign)} {unit}"


def _table(variants: Row, beside: Row | None) -> list[str]:
    lines = ["| variant | metric | figure | n | since the baseline | rule | verdict | why |", "|---|---|---|---|---|---|---|---|"]
    for name, v in variants.items():
        figures = beside["variants"][name]["figures"] if beside else {}
        for r in v["rules"]:
            figure = figures.get(r["metric"])
            change = _interval(figure, sign=figure["unit"] != "ratio") + f" ({figure['how']})" if figure else "no baseline"
            rule = _safe(r["bound"]) + ("" if r["required"] else ", advisory")
            n = "–" if r["n"] is None else r["n"]
            shown = "–" if r["against"] == "baseline" else _interval(r)
            cells = [name, r["metric"], shown, n, change if beside else "–", rule, r["verdict"], _safe(r["reason"][:LONGEST])]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _new(beside: Row | None) -> list[str]:
    """Metrics that this run has and the baseline has not: nothing is claimed of them."""
    told = []
    for name, v in beside["variants"].items() if beside else []:
        if not v["known"]:
            told.append(f"- {name}: no baseline (a new variant)")
        elif v["new"]:
            told.append(f"- {name}: no baseline for {', '.join(v['new'])}")
    return ["", *told] if told else []


def _safe(text: str) -> str:
    """Text for Markdown: no cell, tag, mention or line of its own making."""
    for char, instead in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("@", "&#64;"), ("\n", " "), ("\r", " ")):
        text = text.replace(char, instead)
    return text
