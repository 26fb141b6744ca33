"""The report's picture of latency and rate against context and load: a panel a metric, variants side by side at a load."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline.reporting import plots
from pipeline.reporting.charts import Curve, Results, dots
from pipeline.reporting.plots import BLUE, GREY, INK, level, sheet
from pipeline.reporting.text import counted

Curves = dict[str, Curve]
SHAPES = "osD^vP*Xh<>p"
# what a load does to latency: (title, unit, how the figures are found)
SWEEPS = (
    ("TTFT", "ms", "ttft_ms/context-"), ("TPOT", "ms", "tpot_ms/context-"), ("TPOT", "ms", "tpot_ms/batch-"),
    ("decode rate, all together", "tok/s", "decode_tok_s/batch-"),
    ("TTFT p50, server", "ms", "ttft_p50_ms/closed-"), ("TPOT p50, server", "ms", "tpot_p50_ms/closed-"),
    ("throughput, server", "tok/s", "throughput_tok_s/closed-"),
)  # fmt: skip
AXES = {"context": "tokens of context", "batch": "sequences at once", "closed": "requests at once"}
BESIDE = 0.4  # of the way from one load to the next is taken by variants side by side
ROOM = 2.0  # times the greatest figure, and a share of the least, is how far a panel follows an interval


def sweeps(results: Results, serving: Results, prompt_tokens: int) -> list[tuple[str, str, str, Curves]]:
    """(title, unit, axis, {variant: its curve}) of those loads at which two or more were measured. serving: {variant:
    reports/serving/<variant>.json}, whose levels count like parts of a metric. prompt_tokens: of the rounds, whose figures stand
    for a sweep's of the same context, as in the trade-off table: they are surer."""
    panels = []
    for title, unit, start in SWEEPS:
        curves = {}
        for name in [*results, *(n for n in serving if n not in results)]:
            served = {f"{m}/{level}": v for level, ms in (serving.get(name, {}).get("levels") or {}).items() for m, v in ms.items()}
            curves[name] = _curve(results.get(name, {}).get("metrics", {}) | served, start, prompt_tokens)
        curves = {n: c for n, c in curves.items() if len(c) > 1}
        if curves:
            panels.append((title, unit, AXES[start.split("/")[1].rstrip("-")], curves))
    return panels


def _curve(metrics: dict[str, Any], start: str, prompt_tokens: int) -> Curve:
    """Points of `ttft_ms/context-1024` and its like, in order."""
    rounds = metrics.get(start.split("/")[0]) if start.endswith("/context-") else None
    if rounds and rounds["value"] is not None and f"{start}{prompt_tokens}" in metrics:
        metrics = metrics | {f"{start}{prompt_tokens}": rounds}
    matches = [(re.fullmatch(re.escape(start) + r"(\d+)", k), m) for k, m in metrics.items()]
    return sorted(((float(k[1]), m) for k, m in matches if k and m["value"] is not None), key=lambda p: p[0])


def draw_latency(panels: list[tuple[str, str, str, Curves]], confidence: float, path: Path) -> str | None:
    """Latency and rate against context and load: a panel a figure, a line a variant."""
    if not panels:
        return None
    rows = math.ceil(len(panels) / 2)
    names = list(dict.fromkeys(name for *_, curves in panels for name in curves))
    beside = [(title, unit, axis, side_by_side(curves)) for title, unit, axis, curves in panels]
    with sheet((8.6, 3.4 * rows + 0.3), rows, min(2, len(panels))) as (figure, grid):
        for axes, part, drawn in zip(grid.flat, [*panels, *[None] * (grid.size - len(panels))], [*beside, *beside]):
            if part is None:
                axes.set_visible(False)
                continue
            _loads(axes, part)
            _lines(axes, drawn[-1], names)
        figure.supxlabel(f"{level(confidence)}; an arrow: the interval goes on; hollow: it has none", fontsize=8, color=INK)
        for name, shape in zip(names, SHAPES * len(names)):
            grid[0][0].plot([], [], shape, color=BLUE, ms=4.5, label=name)
        figure.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False)
        alt = "Latency and rate against load: " + "; ".join(f"{title} by {axis}" for title, _, axis, _ in panels)
        plots.save(figure, path, alt)
    return alt


def side_by_side(curves: Curves) -> Curves:
    """The curves, each a step to the right of the one before (both axes are logarithmic)."""
    at = _loads_of(curves)
    width = BESIDE * min((math.log(b / a) for a, b in pairwise(at)), default=0.0)
    steps = [width * ((k + 0.5) / len(curves) - 0.5) for k in range(len(curves))]
    return {name: [(x * math.exp(step), m) for x, m in curve] for step, (name, curve) in zip(steps, curves.items())}


def within(metric: dict[str, Any], least: float, most: float) -> tuple[dict[str, Any], list[tuple[float, int]]]:
    """(a figure with its interval cut to what a panel shows, [(where it was cut, direction)])."""
    if metric["low"] is None or metric["high"] is None:
        return metric, []
    cut = [(least, -1)] * (metric["low"] < least) + [(most, 1)] * (metric["high"] > most)
    return metric | {"low": max(metric["low"], least), "high": min(metric["high"], most)}, cut


def _loads_of(curves: Curves) -> list[float]:
    return sorted({x for c in curves.values() for x, _ in c})


def _loads(axes: Any, part: tuple[str, str, str, Curves]) -> None:
    """A panel's axes, title and ticks."""
    title, unit, axis, curves = part
    at = _loads_of(curves)
    plots.plain_log(axes, "x")
    plots.plain_log(axes, "y")
    axes.set_xticks(at, [f"{x:g}" for x in at])
    axes.set_xlim(at[0] / (at[1] / at[0]) ** (BESIDE / 2 + 0.05), at[-1] * (at[-1] / at[-2]) ** (BESIDE / 2 + 0.05))
    axes.set_title(f"{title} ({unit}; n = {counted(m['n'] for c in curves.values() for _, m in c)})")
    axes.minorticks_off()
    axes.set_xlabel(axis)
    axes.grid(alpha=0.5)


def _limits(curves: Curves) -> tuple[float, float]:
    """From where to where a panel shows: all figures, and intervals as far as ROOM allows."""
    metrics = [m for c in curves.values() for _, m in c if m["value"] > 0]
    ends = [m[k] for m in metrics for k in ("low", "high") if m[k] is not None] + [m["value"] for m in metrics]
    least, most = (of(m["value"] for m in metrics) for of in (min, max))
    return max(min(ends), least / ROOM) / 1.05, min(max(ends), most * ROOM) * 1.05


def _lines(axes: Any, curves: Curves, names: list[str]) -> None:
    if not any(m["value"] > 0 for c in curves.values() for _, m in c):
        return
    least, most = _limits(curves)
    axes.set_ylim(least, most)
    for name, curve in curves.items():
        shape = SHAPES[names.index(name) % len(SHAPES)]
        axes.plot([x for x, _ in curve], [m["value"] for _, m in curve], color=GREY, lw=0.7, alpha=0.6)
        points = [(x, *within(m, least, most)) for x, m in curve]
        dots(axes, [(x, m) for x, m, _ in points], "y", shape)
        for x, end, way in ((x, *end) for x, _, cut in points for end in cut):
            axes.annotate("", (x, end), xytext=(0, -9 * way), textcoords="offset points",
                          arrowprops={"arrowstyle": "->", "color": BLUE, "lw": 1, "shrinkA": 0, "shrinkB": 0})  # fmt: skip
