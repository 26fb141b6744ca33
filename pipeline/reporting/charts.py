"""The report's other pictures: divergence by domain and by position, latency against context and load, and memory.

Each function returns the alternative text, or None with nothing drawn if there are no values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.core.records import Metric, Metrics, Results, ServerReport, Span, VariantResult
from pipeline.reporting import plots
from pipeline.reporting.plots import AMBER, BLUE, GREY, INK, PAGE, bars, level, sheet
from pipeline.reporting.text import Known, counted, known, n_of

Curve = list[tuple[float, Known]]  # (context, load or position; value)
Curves = dict[str, Curve]  # by variant
PANEL = (2.55, 2.5)  # inches
ACROSS = 3
KINDS = {"corpus": "texts", "trajectory": "the reference's own continuations"}
MEMORY = (("weight_bytes", "weights on disk", "s"), ("load_memory_bytes", "peak while loading", "^"),
          ("peak_memory_bytes", "peak while serving", "o"))  # fmt: skip
SHAPES = "osD^vP*Xh<>p"
# what a load does to latency: (title, unit, start of the metrics' names)
SWEEPS = (
    ("TTFT", "ms", "ttft_ms/context-"), ("TPOT", "ms", "tpot_ms/context-"), ("TPOT", "ms", "tpot_ms/batch-"),
    ("decode rate, all together", "tok/s", "decode_tok_s/batch-"),
    ("TTFT p50, server", "ms", "ttft_p50_ms/closed-"), ("TPOT p50, server", "ms", "tpot_p50_ms/closed-"),
    ("throughput, server", "tok/s", "throughput_tok_s/closed-"),
)  # fmt: skip
AXES = {"context": "tokens of context", "batch": "sequences at once", "closed": "requests at once"}
BESIDE = 0.4  # of the way from one load to the next is taken by variants side by side
ROOM = 2.0  # times the greatest value, and a share of the least, is how far a panel follows an interval


class Panel(NamedTuple):
    """One metric against one kind of load (`axis`)."""

    title: str
    unit: str
    axis: str
    curves: Curves


def draw_domains(results: Results, reference: str, confidence: float, path: Path) -> str | None:
    """Mean KLD of each variant by domain, with intervals; hollow where one document gives none."""
    names = [n for n in results if n != reference and _domains(results[n])]
    domains = sorted({d for n in names for d in _domains(results[n])}, key=lambda d: (d == "trajectory", d), reverse=True)
    if not domains:
        return None
    curves = {name: _points(enumerate(results[name]["metrics"].get(f"kld_mean/{d}") for d in domains)) for name in names}

    def panel(axes: Any, name: str) -> None:
        dots(axes, curves[name], "x")
        axes.set_yticks(range(len(domains)), [f"{d} (n = {n_of(results, f'kld_mean/{d}')})" for d in domains])

    label = f"mean KLD to {reference}, nats; n in tokens. {level(confidence)}; hollow: one document, so no interval"
    alt = f"Mean KLD to {reference} by domain, a panel a variant: {', '.join(names)}."
    _panels(names, panel, path, "x", _values(curves), label, alt, height=0.5 + 0.17 * len(domains))
    return alt


def draw_positions(results: Results, reference: str, confidence: float, path: Path) -> str | None:
    """Mean KLD by position in the text and in the reference's own continuations."""
    spans = {n: r["curves"].get("kld_by_position", {}) for n, r in results.items() if n != reference}
    curves = {
        name: {kind: _points((math.sqrt(p["from"] * p["to"]), p) for p in points) for kind, points in sorted(kinds.items())}
        for name, kinds in spans.items()
    }
    curves = {name: kinds for name, kinds in curves.items() if any(kinds.values())}
    if not curves:
        return None
    first = next(iter(curves))

    def panel(axes: Any, name: str) -> None:
        for (kind, curve), shape, line, ink in zip(curves[name].items(), "os", ("-", "--"), (BLUE, AMBER)):
            axes.plot([x for x, _ in curve], [m.value for _, m in curve], ls=line, lw=1, color=ink)
            dots(axes, curve, "y", shape, ink)
            if name == first:
                axes.plot([], [], f"{shape}{line}", color=ink, ms=4.5, lw=1, label=KINDS.get(kind, kind))
        plots.plain_log(axes, "x")

    n = f"n = {counted(p['n'] for name in curves for points in spans[name].values() for p in points)} tokens a point"
    alt = f"Mean KLD to {reference} by position, a panel a variant: {', '.join(curves)}; {n}."
    label = f"position (tokens); up: mean KLD to {reference}, nats; {n}. {level(confidence)}"
    _panels(list(curves), panel, path, "y", [v for kinds in curves.values() for v in _values(kinds)], label, alt)
    return alt


def _points(metrics: Iterable[tuple[float, Metric | Span | None]]) -> Curve:
    return [(at, m) for at, metric in metrics if (m := known(metric))]


def _values(curves: Mapping[str, Curve]) -> list[float]:
    return [m.value for curve in curves.values() for _, m in curve]


def _panels(
    names: list[str], panel: Callable[[Any, str], None], path: Path, log: str, values: list[float], label: str, alt: str,
    height: float = PANEL[1],
) -> None:  # fmt: skip
    """A panel a variant on common axes; `log`: the axis of KLD, logarithmic."""
    rows = math.ceil(len(names) / ACROSS)
    across = min(ACROSS, len(names))
    shared = {"sharex": log == "x", "sharey": True}
    with sheet((PANEL[0] * across + 1.2, height * rows + 0.5), rows, across, **shared) as (figure, grid):
        for k, axes in enumerate(grid.flat):
            if k >= len(names):
                axes.set_visible(False)
                continue
            panel(axes, names[k])
            axes.set_title(names[k])
            axes.grid(alpha=0.5)
            axes.tick_params(labelbottom=k + across >= len(names))
        _kld_axis(grid[0][0], log, values)
        for axes in grid.flat:
            axes.minorticks_off()  # nine panels of them are half the file and half the time
        if grid[0][0].get_legend_handles_labels()[1]:
            figure.legend(loc="outside upper left", ncols=2, fontsize=8, frameon=False)
        figure.supxlabel(label, fontsize=8, color=INK)
        plots.save(figure, path, alt)


def _kld_axis(axes: Any, which: str, values: list[float]) -> None:
    """Logarithmic; with a place for 0 where a value is 0."""
    above = [v for v in values if v > 0]
    if not above:
        return
    if min(values) <= 0:
        axes.set(**{f"{which}scale": "symlog"})
        (axes.xaxis if which == "x" else axes.yaxis).get_major_locator().set_params(numticks=6)
        return
    axes.set(**{f"{which}scale": "log", f"{which}lim": (min(above) / 2.5, max(above) * 3)})


def dots(axes: Any, points: Curve, along: str, shape: str = "o", ink: str = BLUE) -> None:
    """Values with their intervals along an axis, `points` giving the other coordinate; hollow where there is no interval."""
    for filled in (True, False):
        drawn = [(at, m) for at, m in points if (m.interval is not None) == filled]
        if drawn:
            at, values = [a for a, _ in drawn], [m.value for _, m in drawn]
            err = np.hstack([np.array(bars(m)) for _, m in drawn]) if filled else None
            xy = (values, at) if along == "x" else (at, values)
            axes.errorbar(*xy, **{f"{along}err": err}, fmt=shape, ms=4.5, mfc=ink if filled else PAGE, mec=ink, ecolor=ink, lw=1)


def _domains(result: VariantResult) -> list[str]:
    return [k.split("/")[1] for k in result["metrics"] if k.startswith("kld_mean/") and ":" not in k]


def draw_memory(results: Results, path: Path) -> str | None:
    """File size and peak resident memory of each variant, in MB; one measurement each, so without an interval."""
    names = [n for n, r in results.items() if any(known(r["metrics"].get(key)) for key, _, _ in MEMORY)][::-1]
    if not names:
        return None
    with sheet((7.6, 0.9 + 0.3 * len(names))) as (figure, grid):
        axes = grid[0][0]
        for key, label, shape in MEMORY:
            points = _points(enumerate(results[n]["metrics"].get(key) for n in names))
            hollow = points and all(m.interval is None for _, m in points)
            axes.plot([], [], shape, ms=6, color=INK, mfc=PAGE if hollow else INK, label=label)
            dots(axes, [(y, _in_mb(m)) for y, m in points], "x", shape, INK)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlim(left=0)
        axes.set_xlabel("MB; filled: exact or with an interval, hollow: the highest of one process (n = 1), so no interval")
        axes.grid(alpha=0.5)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(MEMORY), fontsize=8, frameon=False)
        alt = f"Weights and peak memory in MB of {', '.join(reversed(names))}."
        plots.save(figure, path, alt)
    return alt


def _in_mb(size: Known) -> Known:
    interval = size.interval and (size.interval[0] / 1e6, size.interval[1] / 1e6)
    return Known(size.value / 1e6, interval, size.n)


def sweeps(results: Results, serving: Mapping[str, ServerReport], prompt_tokens: int) -> list[Panel]:
    """Panels of metrics that were measured at two loads or more. serving: {variant: its server's results}, whose levels count like
    parts of a metric. prompt_tokens: of the rounds, whose values replace a sweep's of the same context: they are surer."""
    metrics = {name: dict(r["metrics"]) for name, r in results.items()}
    for name, report in serving.items():
        metrics[name] |= {f"{metric}/{load}": m for load, by_name in report["levels"].items() for metric, m in by_name.items()}
    panels = []
    for title, unit, start in SWEEPS:
        curves = {name: curve for name, own in metrics.items() if len(curve := _curve(own, start, prompt_tokens)) > 1}
        if curves:
            panels.append(Panel(title, unit, AXES[start.split("/")[1].rstrip("-")], curves))
    return panels


def _curve(metrics: Metrics, start: str, prompt_tokens: int) -> Curve:
    """Points of `ttft_ms/context-1024` and its like, in order."""
    rounds = metrics.get(start.removesuffix("/context-"))
    same = f"{start}{prompt_tokens}"
    if rounds and rounds["value"] is not None and same in metrics:
        metrics = metrics | {same: rounds}
    matches = [(re.fullmatch(re.escape(start) + r"(\d+)", k), m) for k, m in metrics.items()]
    return sorted(_points((float(k[1]), m) for k, m in matches if k), key=lambda point: point[0])


def draw_latency(panels: list[Panel], confidence: float, path: Path) -> str | None:
    """Latency and rate against context and load: a panel a metric, a line a variant, variants side by side at a load."""
    if not panels:
        return None
    rows = math.ceil(len(panels) / 2)
    shapes = dict(zip(dict.fromkeys(name for panel in panels for name in panel.curves), cycle(SHAPES)))
    with sheet((8.6, 3.4 * rows + 0.3), rows, min(2, len(panels))) as (figure, grid):
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, panel in zip(grid.flat, panels):
            _loads(axes, panel)
            _lines(axes, side_by_side(panel.curves), shapes)
        figure.supxlabel(f"{level(confidence)}; an arrow: the interval goes on; hollow: it has none", fontsize=8, color=INK)
        for name, shape in shapes.items():
            grid[0][0].plot([], [], shape, color=BLUE, ms=4.5, label=name)
        figure.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False)
        alt = "Latency and rate against load: " + "; ".join(f"{panel.title} by {panel.axis}" for panel in panels)
        plots.save(figure, path, alt)
    return alt


def side_by_side(curves: Curves) -> Curves:
    """The curves, each a step to the right of the one before (both axes are logarithmic)."""
    width = BESIDE * min((math.log(b / a) for a, b in pairwise(_loads_of(curves))), default=0.0)
    steps = [width * ((k + 0.5) / len(curves) - 0.5) for k in range(len(curves))]
    return {name: [(x * math.exp(step), m) for x, m in curve] for step, (name, curve) in zip(steps, curves.items())}


def within(metric: Known, least: float, most: float) -> tuple[Known, list[tuple[float, int]]]:
    """(a value with its interval cut to what a panel shows, [(where it was cut, direction)])."""
    if metric.interval is None:
        return metric, []
    low, high = metric.interval
    cut = [(least, -1)] * (low < least) + [(most, 1)] * (high > most)
    return metric._replace(interval=(max(low, least), min(high, most))), cut


def _loads_of(curves: Curves) -> list[float]:
    return sorted({x for c in curves.values() for x, _ in c})


def _loads(axes: Any, panel: Panel) -> None:
    """A panel's axes, title and ticks."""
    at = _loads_of(panel.curves)
    plots.plain_log(axes, "x")
    plots.plain_log(axes, "y")
    axes.set_xticks(at, [f"{x:g}" for x in at])
    axes.set_xlim(at[0] / (at[1] / at[0]) ** (BESIDE / 2 + 0.05), at[-1] * (at[-1] / at[-2]) ** (BESIDE / 2 + 0.05))
    axes.set_title(f"{panel.title} ({panel.unit}; n = {counted(m.n for c in panel.curves.values() for _, m in c)})")
    axes.minorticks_off()
    axes.set_xlabel(panel.axis)
    axes.grid(alpha=0.5)


def _limits(metrics: list[Known]) -> tuple[float, float]:
    """From where to where a panel shows: all values, and intervals as far as ROOM allows."""
    values = [m.value for m in metrics]
    ends = [*values, *(end for m in metrics for end in m.interval or ())]
    return max(min(ends), min(values) / ROOM) / 1.05, min(max(ends), max(values) * ROOM) * 1.05


def _lines(axes: Any, curves: Curves, shapes: dict[str, str]) -> None:
    above = [m for curve in curves.values() for _, m in curve if m.value > 0]
    if not above:
        return
    least, most = _limits(above)
    axes.set_ylim(least, most)
    for name, curve in curves.items():
        axes.plot([x for x, _ in curve], [m.value for _, m in curve], color=GREY, lw=0.7, alpha=0.6)
        points = [(x, *within(m, least, most)) for x, m in curve]
        dots(axes, [(x, m) for x, m, _ in points], "y", shapes[name])
        for x, end, way in ((x, *end) for x, _, cut in points for end in cut):
            axes.annotate("", (x, end), xytext=(0, -9 * way), textcoords="offset points",
                          arrowprops={"arrowstyle": "->", "color": BLUE, "lw": 1, "shrinkA": 0, "shrinkB": 0})  # fmt: skip
