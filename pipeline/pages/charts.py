"""The report's other pictures: divergence by domain and by position, latency against load, memory.

Each gives its alternative text, or None with nothing drawn where the figures are not there. Several variants' curves would
hide one another, so that divergence has a panel a variant; latencies, which are to be compared, share one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.numbers.shown import counted, n_of
from pipeline.pages import pictures, place
from pipeline.pages.pictures import AMBER, BLUE, GREY, INK, PAGE, bars, sheet

Results = dict[str, dict[str, Any]]
Curve = list[tuple[float, dict[str, Any]]]  # (context or requests at once, metric)
PANEL = (2.55, 2.5)  # inches
ACROSS = 3
SHAPES = "osD^vP*Xh<>p"
KINDS = {"corpus": "texts", "trajectory": "the reference's own continuations"}
# what a load does to latency: (title, unit, how the figures are found)
SWEEPS = (
    ("TTFT", "ms", "ttft_ms/context-"), ("TPOT", "ms", "tpot_ms/context-"), ("TPOT", "ms", "tpot_ms/batch-"),
    ("decode rate, all together", "tok/s", "decode_tok_s/batch-"),
    ("TTFT p50, server", "ms", "ttft_p50_ms/closed-"), ("TPOT p50, server", "ms", "tpot_p50_ms/closed-"),
    ("throughput, server", "tok/s", "throughput_tok_s/closed-"),
)  # fmt: skip
AXES = {"context": "tokens of context", "batch": "sequences at once", "closed": "requests at once"}
MEMORY = (("weight_bytes", "weights on disk", "s"), ("load_memory_bytes", "peak while loading", "^"),
          ("peak_memory_bytes", "peak while serving", "o"))  # fmt: skip


# --- divergence, a panel a variant -------------------------------------------------------------------------------


def draw_domains(results: Results, reference: str, path: Path) -> str | None:
    """Mean KLD of each variant by domain, with intervals; hollow where one document gives none."""
    names = [n for n in results if n != reference and _domains(results[n])]
    domains = sorted({d for n in names for d in _domains(results[n])}, key=lambda d: (d == "trajectory", d), reverse=True)
    if not domains:
        return None

    def panel(axes: Any, name: str) -> None:
        own = [(y, results[name]["metrics"].get(f"kld_mean/{domain}")) for y, domain in enumerate(domains)]
        _dots(axes, [(y, m) for y, m in own if m and m["value"] is not None], "x")
        axes.set_yticks(range(len(domains)), [f"{d} (n = {n_of(results, f'kld_mean/{d}')})" for d in domains])

    values = [results[n]["metrics"].get(f"kld_mean/{d}", {}).get("value") for n in names for d in domains]
    _panels(names, panel, path, "x", values, f"mean KLD to {reference}, nats; n in tokens; hollow: one document, so no interval",
            alt := f"Mean KLD to {reference} by domain, a panel a variant: {', '.join(names)}.",
            height=0.5 + 0.17 * len(domains))  # fmt: skip
    return alt


def draw_positions(results: Results, reference: str, path: Path) -> str | None:
    """Mean KLD by position in the text and in the reference's own continuations."""
    curves = {n: r.get("curves", {}).get("kld_by_position", {}) for n, r in results.items() if n != reference}
    curves = {n: c for n, c in curves.items() if any(p["value"] is not None for points in c.values() for p in points)}
    if not curves:
        return None
    sizes = [p["n"] for c in curves.values() for points in c.values() for p in points]
    first = next(iter(curves))

    def panel(axes: Any, name: str) -> None:
        for (kind, points), shape, line, ink in zip(sorted(curves[name].items()), "os", ("-", "--"), (BLUE, AMBER)):
            found = [(math.sqrt(p["from"] * p["to"]), p) for p in points if p["value"] is not None]
            axes.plot([x for x, _ in found], [p["value"] for _, p in found], ls=line, lw=1, color=ink)
            _dots(axes, found, "y", shape, ink)
            if name == first:
                axes.plot([], [], f"{shape}{line}", color=ink, ms=4.5, lw=1, label=KINDS.get(kind, kind))
        pictures.plain_log(axes, "x")

    values = [p["value"] for c in curves.values() for points in c.values() for p in points]
    n = f"n = {counted(sizes)} tokens a point"
    _panels(list(curves), panel, path, "y", values,
            f"position (tokens); up: mean KLD to {reference}, nats; {n}",
            alt := f"Mean KLD to {reference} by position, a panel a variant: {', '.join(curves)}; {n}.")  # fmt: skip
    return alt


def _panels(
    names: list[str], panel: Callable[[Any, str], None], path: Path, log: str, values: list[Any], label: str, alt: str,
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
        pictures.save(figure, path, alt)


def _kld_axis(axes: Any, which: str, values: list[Any]) -> None:
    """Logarithmic; with a place for 0 where a figure is 0."""
    known = [v for v in values if v is not None]
    above = [v for v in known if v > 0]
    if not above:
        return
    if min(known) <= 0:
        axes.set(**{f"{which}scale": "symlog"})
        (axes.xaxis if which == "x" else axes.yaxis).get_major_locator().set_params(numticks=6)
        return
    axes.set(**{f"{which}scale": "log", f"{which}lim": (min(above) / 2.5, max(above) * 3)})


def _dots(axes: Any, points: Curve, along: str, shape: str = "o", ink: str = BLUE) -> None:
    """Figures with their intervals along an axis, `points` giving the other coordinate; hollow where there is no interval."""
    for known in (True, False):
        own = [(at, m) for at, m in points if (bars(m) is not None) == known]
        if own:
            at, values = [a for a, _ in own], [m["value"] for _, m in own]
            err = np.hstack([np.array(bars(m)) for _, m in own]) if known else None
            xy = (values, at) if along == "x" else (at, values)
            axes.errorbar(*xy, **{f"{along}err": err}, fmt=shape, ms=4.5, mfc=ink if known else PAGE, mec=ink, ecolor=ink, lw=1)


def _domains(result: dict[str, Any]) -> list[str]:
    return [k.split("/")[1] for k in result["metrics"] if k.startswith("kld_mean/") and ":" not in k]


# --- latency against load ----------------------------------------------------------------------------------------


def sweeps(results: Results, serving: Results) -> list[tuple[str, str, str, dict[str, Curve]]]:
    """(title, unit, axis, {variant: its curve}) of those loads at which two or more were measured.

    serving: {variant: reports/serving/<variant>.json}, whose levels count like parts of a metric.
    """
    found = []
    for title, unit, start in SWEEPS:
        curves = {}
        for name in [*results, *(n for n in serving if n not in results)]:
            served = {f"{m}/{level}": v for level, ms in (serving.get(name, {}).get("levels") or {}).items() for m, v in ms.items()}
            curves[name] = _curve(results.get(name, {}).get("metrics", {}) | served, start)
        curves = {n: c for n, c in curves.items() if len(c) > 1}
        if curves:
            found.append((title, unit, AXES[start.split("/")[1].rstrip("-")], curves))
    return found


def _curve(metrics: dict[str, Any], start: str) -> Curve:
    """Points of `ttft_ms/context-1024` and its like, in order."""
    found = [(re.fullmatch(re.escape(start) + r"(\d+)", k), m) for k, m in metrics.items()]
    return sorted(((float(k[1]), m) for k, m in found if k and m["value"] is not None), key=lambda p: p[0])


def draw_latency(found: list[tuple[str, str, str, dict[str, Curve]]], path: Path) -> str | None:
    """Latency and rate against context and load: a panel a figure, a line a variant, its name at the line's end."""
    if not found:
        return None
    rows = math.ceil(len(found) / 2)
    with sheet((8.6, 3.1 * rows), rows, min(2, len(found))) as (figure, grid):
        for axes, part in zip(grid.flat, [*found, *[None] * (grid.size - len(found))]):
            if part is None:
                axes.set_visible(False)
                continue
            _lines(figure, axes, *part)
        _end_labels(figure, grid.flat, found)
        alt = "Latency and rate against load: " + "; ".join(f"{title} by {axis}" for title, _, axis, _ in found)
        pictures.save(figure, path, alt)
    return alt


def _lines(figure: Any, axes: Any, title: str, unit: str, axis: str, curves: dict[str, Curve]) -> None:
    for (_, curve), shape in zip(curves.items(), SHAPES * len(curves)):
        axes.plot([x for x, _ in curve], [m["value"] for _, m in curve], color=GREY, lw=1)
        _dots(axes, curve, "y", shape)
    at = sorted({x for c in curves.values() for x, _ in c})
    pictures.plain_log(axes, "x")
    pictures.plain_log(axes, "y")
    axes.set_xticks(at, [f"{x:g}" for x in at])
    axes.set_xlim(at[0] / 1.15, at[-1] * (at[-1] / at[0]) ** 0.45)  # room for names at the lines' ends
    n = counted(m["n"] for c in curves.values() for _, m in c)
    axes.set_title(f"{title} ({unit}; n = {n})")
    axes.minorticks_off()
    axes.set_xlabel(axis)
    axes.grid(alpha=0.5)


def _end_labels(figure: Any, grid: Any, found: list[tuple[str, str, str, dict[str, Curve]]]) -> None:
    """Names at the ends of lines, apart by a line's height; a thin line leads to those that had to move."""
    figure.canvas.draw()
    for axes, (_, _, _, curves) in zip(grid, found):
        ends = {name: (curve[-1][0], curve[-1][1]["value"]) for name, curve in curves.items()}
        at = {name: axes.transData.transform(end) for name, end in ends.items()}
        right = max(x for x, _ in at.values())
        heights = place.spread([y for _, y in at.values()], 9.5, axes.get_window_extent().y1)
        for (name, end), y in zip(ends.items(), heights):
            axes.annotate(name, end, xytext=(right - at[name][0] + 12, y - at[name][1]), textcoords="offset points", fontsize=7.5,
                          va="center", arrowprops={"arrowstyle": "-", "color": GREY, "lw": 0.5, "shrinkB": 4},
                          ).set_in_layout(False)  # fmt: skip


# --- memory ------------------------------------------------------------------------------------------------------


def draw_memory(results: Results, path: Path) -> str | None:
    """File size and peak resident memory of each variant, in MB; one measurement each, so without an interval."""
    names = [n for n, r in results.items() if any(r["metrics"].get(k, {}).get("value") for k, _, _ in MEMORY)][::-1]
    if not names:
        return None
    with sheet((7.6, 0.9 + 0.3 * len(names))) as (figure, grid):
        axes = grid[0][0]
        for key, label, shape in MEMORY:
            found = [(y, m) for y, n in enumerate(names) if (m := results[n]["metrics"].get(key)) and m["value"] is not None]
            axes.plot([], [], shape, ms=6, color=INK, mfc=PAGE if _single(found) else INK, label=label)
            _dots(axes, [(y, _in_mb(m)) for y, m in found], "x", shape, INK)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlim(left=0)
        axes.set_xlabel("MB; filled: exact or with an interval, hollow: the highest of one process (n = 1), so no interval")
        axes.grid(alpha=0.5)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(MEMORY), fontsize=8, frameon=False)
        alt = f"Weights and peak memory in MB of {', '.join(reversed(names))}."
        pictures.save(figure, path, alt)
    return alt


def _single(found: list[tuple[int, dict[str, Any]]]) -> bool:
    return bool(found) and all(m["low"] is None for _, m in found)


def _in_mb(metric: dict[str, Any]) -> dict[str, Any]:
    return metric | {k: metric[k] / 1e6 for k in ("value", "low", "high") if metric[k] is not None}
