"""The report's other pictures: divergence by domain and by position, a panel a variant, and memory.

Each function returns the alternative text, or None with nothing drawn if there are no figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.reporting import plots
from pipeline.reporting.plots import AMBER, BLUE, INK, PAGE, bars, level, sheet
from pipeline.reporting.text import counted, n_of

Results = dict[str, dict[str, Any]]
Curve = list[tuple[float, dict[str, Any]]]  # (context or requests at once, metric)
PANEL = (2.55, 2.5)  # inches
ACROSS = 3
KINDS = {"corpus": "texts", "trajectory": "the reference's own continuations"}
MEMORY = (("weight_bytes", "weights on disk", "s"), ("load_memory_bytes", "peak while loading", "^"),
          ("peak_memory_bytes", "peak while serving", "o"))  # fmt: skip


def draw_domains(results: Results, reference: str, confidence: float, path: Path) -> str | None:
    """Mean KLD of each variant by domain, with intervals; hollow where one document gives none."""
    names = [n for n in results if n != reference and _domains(results[n])]
    domains = sorted({d for n in names for d in _domains(results[n])}, key=lambda d: (d == "trajectory", d), reverse=True)
    if not domains:
        return None

    def panel(axes: Any, name: str) -> None:
        own = [(y, results[name]["metrics"].get(f"kld_mean/{domain}")) for y, domain in enumerate(domains)]
        dots(axes, [(y, m) for y, m in own if m and m["value"] is not None], "x")
        axes.set_yticks(range(len(domains)), [f"{d} (n = {n_of(results, f'kld_mean/{d}')})" for d in domains])

    values = [results[n]["metrics"].get(f"kld_mean/{d}", {}).get("value") for n in names for d in domains]
    label = f"mean KLD to {reference}, nats; n in tokens. {level(confidence)}; hollow: one document, so no interval"
    _panels(names, panel, path, "x", values, label,
            alt := f"Mean KLD to {reference} by domain, a panel a variant: {', '.join(names)}.",
            height=0.5 + 0.17 * len(domains))  # fmt: skip
    return alt


def draw_positions(results: Results, reference: str, confidence: float, path: Path) -> str | None:
    """Mean KLD by position in the text and in the reference's own continuations."""
    curves = {n: r.get("curves", {}).get("kld_by_position", {}) for n, r in results.items() if n != reference}
    curves = {n: c for n, c in curves.items() if any(p["value"] is not None for points in c.values() for p in points)}
    if not curves:
        return None
    sizes = [p["n"] for c in curves.values() for points in c.values() for p in points]
    first = next(iter(curves))

    def panel(axes: Any, name: str) -> None:
        for (kind, points), shape, line, ink in zip(sorted(curves[name].items()), "os", ("-", "--"), (BLUE, AMBER)):
            known = [(math.sqrt(p["from"] * p["to"]), p) for p in points if p["value"] is not None]
            axes.plot([x for x, _ in known], [p["value"] for _, p in known], ls=line, lw=1, color=ink)
            dots(axes, known, "y", shape, ink)
            if name == first:
                axes.plot([], [], f"{shape}{line}", color=ink, ms=4.5, lw=1, label=KINDS.get(kind, kind))
        plots.plain_log(axes, "x")

    values = [p["value"] for c in curves.values() for points in c.values() for p in points]
    n = f"n = {counted(sizes)} tokens a point"
    _panels(list(curves), panel, path, "y", values,
            f"position (tokens); up: mean KLD to {reference}, nats; {n}. {level(confidence)}",
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
        plots.save(figure, path, alt)


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


def dots(axes: Any, points: Curve, along: str, shape: str = "o", ink: str = BLUE) -> None:
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


def draw_memory(results: Results, path: Path) -> str | None:
    """File size and peak resident memory of each variant, in MB; one measurement each, so without an interval."""
    names = [n for n, r in results.items() if any(r["metrics"].get(k, {}).get("value") for k, _, _ in MEMORY)][::-1]
    if not names:
        return None
    with sheet((7.6, 0.9 + 0.3 * len(names))) as (figure, grid):
        axes = grid[0][0]
        for key, label, shape in MEMORY:
            known = [(y, m) for y, n in enumerate(names) if (m := results[n]["metrics"].get(key)) and m["value"] is not None]
            hollow = known and all(m["low"] is None for _, m in known)
            axes.plot([], [], shape, ms=6, color=INK, mfc=PAGE if hollow else INK, label=label)
            in_mb: Curve = [(y, m | {k: m[k] / 1e6 for k in ("value", "low", "high") if m[k] is not None}) for y, m in known]
            dots(axes, in_mb, "x", shape, INK)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlim(left=0)
        axes.set_xlabel("MB; filled: exact or with an interval, hollow: the highest of one process (n = 1), so no interval")
        axes.grid(alpha=0.5)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(MEMORY), fontsize=8, frameon=False)
        alt = f"Weights and peak memory in MB of {', '.join(reversed(names))}."
        plots.save(figure, path, alt)
    return alt
