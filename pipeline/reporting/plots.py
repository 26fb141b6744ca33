"""What the report draws. Never without a unit, n and an interval; a verdict is a marker and a word, not a colour alone.

A picture is one SVG in both themes: its colours are those of THEME, and a style of its own swaps them where the reader's
screen is dark. It is drawn at 72 dots an inch, so that a pixel is a point and labels stay where they were placed.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core import artifacts
from pipeline.metrics import noise_floor
from pipeline.reporting import label_layout, pareto
from pipeline.reporting.numbers import n_of

Results = dict[str, dict[str, Any]]
# name: (light, dark); every colour of a picture is one of these, or it would stay as it is in the dark
THEME = {
    "ink": ("#1b1f24", "#e6edf3"), "soft": ("#59636e", "#9198a1"), "line": ("#d1d9e0", "#3d444d"),
    "page": ("#ffffff", "#0d1117"),
    "pass": ("#1a7f37", "#3fb950"), "fail": ("#b42318", "#ff7b72"), "unsure": ("#9a6700", "#d29922"),
    "grey": ("#8c959f", "#7d8590"),
    "reference": ("#0b57a4", "#58a6ff"),
}  # fmt: skip
INK, SOFT, LINE, PAGE, GREY, BLUE, AMBER = (THEME[k][0] for k in ("ink", "soft", "line", "page", "grey", "reference", "unsure"))
MARKS = {"PASS": ("o", "pass"), "FAIL": ("X", "fail"), "INCONCLUSIVE": ("D", "unsure"), "REFERENCE": ("s", "reference")}
LARGEST = 420.0  # square points of the mark of the largest file
SPREAD = 5.0  # an axis is logarithmic where its greatest value is so many times its least


@contextmanager
def sheet(size: tuple[float, float], rows: int = 1, columns: int = 1, **shared: Any) -> Iterator[tuple[Any, Any]]:
    """(figure, axes [rows, columns]) in the theme's colours. size: inches; shared: sharex, sharey."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {
        "svg.fonttype": "none", "font.size": 9, "figure.dpi": 72, "text.color": INK, "axes.edgecolor": SOFT,
        "axes.labelcolor": INK, "axes.titlecolor": INK, "xtick.color": SOFT, "ytick.color": SOFT, "xtick.labelcolor": INK,
        "ytick.labelcolor": INK, "grid.color": LINE, "figure.facecolor": PAGE, "axes.facecolor": PAGE, "legend.edgecolor": LINE,
        "legend.facecolor": PAGE, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9,
    }  # fmt: skip
    with plt.rc_context(style):
        figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **shared)
        try:
            yield figure, axes
        finally:
            plt.close(figure)


def save(figure: Any, path: Path, alt: str, png: bool = False) -> None:
    """Write a figure as an SVG that says `alt` to who cannot see it, and if asked as a (light) PNG beside it."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):  # apart by picture: several stand in one page
        figure.savefig(text, format="svg", metadata={"Date": None})
    artifacts.write_text(path, themed(text.getvalue(), alt))
    if png:
        with artifacts.atomic_file(path.with_suffix(".png")) as tmp:
            figure.savefig(tmp, format="png", dpi=130, metadata={"Software": None})


def themed(svg: str, alt: str) -> str:
    """matplotlib's SVG with alternative text, without names that clash in a page, and with its colours for a dark screen."""
    dark = "".join(
        f'[style*="{kind}: {light}"]{{{kind}:{night}!important}}'  # of no class: a <use> sees only itself
        for light, night in THEME.values()
        for kind in ("fill", "stroke")
    )
    style = f"<style>.chart *{{stroke-linejoin:round}}@media screen and (prefers-color-scheme:dark){{{dark}}}</style>"
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<style type="text/css">.*?</style>', style, svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    return svg.replace("<svg ", f'<svg class="chart" role="img" aria-label="{html.escape(alt)}" ', 1)


def level(confidence: float) -> str:
    """What a picture's bars are."""
    return f"Bars: {100 * confidence:g} % intervals"


def bars(metric: dict[str, Any]) -> list[list[float]] | None:
    """A figure's interval as matplotlib wants it; None where there is none."""
    if metric["low"] is None or metric["high"] is None:
        return None
    return [[max(0.0, metric["value"] - metric["low"])], [max(0.0, metric["high"] - metric["value"])]]


def draw_tradeoff(results: Results, verdict: dict[str, Any], reference: str, confidence: float, path: Path) -> str:
    """Quality (KLD) against decode speed, area by file size, verdict by marker and word; returns the alternative text.

    Speed is the ratio to the reference in the same run; the line is the least KLD to be had at a speed, by value.
    """
    behind = {n: d for n, d in pareto.dominated(results, reference).items() if d.sure}
    names = pareto.measured(results)
    alt = f"Mean KLD to {reference} against decode speed, for {', '.join(names) or 'no variant'}; the table has the figures."
    with sheet((7.6, 5.2)) as (figure, grid):
        axes = grid[0][0]
        _scales(axes, results, names, reference)
        noise_floor.draw(axes, results[reference]["metrics"])
        front = [results[n]["metrics"] for n in pareto.front(results)]
        axes.plot(*_steps(front), color=SOFT, lw=1, ls="--", zorder=1)
        words = {n: "REFERENCE" if n == reference else verdict["variants"][n]["verdict"] for n in names}
        for name in names:
            _mark(axes, results[name]["metrics"], words[name], _area(results, name), name in behind)
        axes.set_ylabel(f"mean KLD to {reference}, nats (n = {n_of(results, 'kld_mean')} tokens; lower is better)")
        axes.set_xlabel(
            f"decode rate, times {reference}'s in the same run (n = {n_of(results, 'speed_ratio')} rounds; right is better)"
        )
        axes.set_title(f"Area: file size. {level(confidence)}. Dashed: least KLD to be had at a speed. Hollow grey: dominated.")
        axes.grid(alpha=0.5)
        _labels(figure, axes, results, {n: _label(results[n], words[n], n, n in behind) for n in names})
        save(figure, path, alt, png=True)
    return alt


def _scales(axes: Any, results: Results, names: list[str], reference: str) -> None:
    """KLD is linear up to the floor's limit (0 must have a place) and logarithmic above; speed is logarithmic if spread."""
    speeds = [results[n]["metrics"]["speed_ratio"]["value"] for n in names]
    klds = [results[n]["metrics"]["kld_mean"]["value"] for n in names]
    knee = noise_floor.limit("kld_mean", results[reference]["metrics"]) or 1e-5
    axes.set_yscale("symlog", linthresh=knee, linscale=0.6)
    axes.set_ylim(-knee / 4, max([*klds, knee]) * 6)
    if speeds and min(speeds) > 0 and max(speeds) / min(speeds) > SPREAD:
        plain_log(axes, "x")
        axes.set_xlim(min(speeds) / 1.6, max(speeds) * 1.8)
    else:
        axes.margins(x=0.25)


def plain_log(axes: Any, which: str) -> None:
    """Make `x` or `y` logarithmic, its ticks the numbers people read: 0.5, 1, 2, 5, 10."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axis.set_minor_formatter(NullFormatter())


def _steps(front: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """The Pareto front as a staircase: up to a variant's speed its KLD can be had."""
    xs, ys = ([m[k]["value"] for m in front] for k in pareto.AXES)  # fastest first, each nearer than the one before
    return [x for x in xs for _ in (0, 1)], [ys[0], *(y for y in ys[:-1] for _ in (0, 1)), ys[-1]] if ys else []


def _area(results: Results, name: str) -> float:
    sizes = {n: r["metrics"].get("weight_bytes", {}).get("value") or 0.0 for n, r in results.items()}
    return float(LARGEST * max(sizes[name], 1.0) / max([*sizes.values(), 1.0]))


def _mark(axes: Any, metrics: dict[str, Any], word: str, area: float, behind: bool) -> None:
    """One variant: intervals as bars, verdict by shape; hollow and grey where another dominates it."""
    speed, kld = (metrics[k] for k in pareto.AXES)
    shape, colour = MARKS.get(word, ("P", "grey"))
    ink = GREY if behind else THEME[colour][0]
    at = speed["value"], kld["value"]
    axes.errorbar(*at, xerr=bars(speed), yerr=bars(kld), fmt="none", color=ink, lw=1, capsize=2, zorder=2)
    axes.scatter(*at, s=area, marker=shape, c=PAGE if behind else ink, edgecolors=ink if behind else PAGE, linewidths=1, zorder=3)


def _label(result: dict[str, Any], word: str, name: str, behind: bool) -> str:
    size = result["metrics"].get("weight_bytes", {}).get("value")
    parts = [f"{size / 1e6:.0f} MB" if size else "", word, "dominated" if behind else ""]
    return f"{name}\n{' · '.join(p for p in parts if p)}"


def _labels(figure: Any, axes: Any, results: Results, labels: dict[str, str]) -> None:
    """Write labels beside their marks, none upon another, a mark or a bar; a line leads to those that had to go far."""
    figure.canvas.draw()
    values = {n: [results[n]["metrics"][k]["value"] for k in pareto.AXES] for n in labels}
    at = {n: axes.transData.transform(v) for n, v in values.items()}
    drawn = {n: axes.text(0.5, 0.5, text, fontsize=8, linespacing=1.05, transform=axes.transAxes) for n, text in labels.items()}
    sizes = {n: t.get_window_extent() for n, t in drawn.items()}
    taken = [box for n in labels for box in _boxes(axes, results[n]["metrics"], at[n], _area(results, n))]
    taken += _path(axes.transData.transform(np.column_stack(_steps([results[n]["metrics"] for n in pareto.front(results)]))))
    taken += [tuple(t.get_window_extent().extents) for t in axes.texts if t not in drawn.values()]
    order = sorted(labels, key=lambda n: (-at[n][0], at[n][1]))  # the right edge has least room: it goes first
    spots = label_layout.place([tuple(at[n]) for n in order], [(sizes[n].width, sizes[n].height) for n in order], taken,
                        tuple(axes.get_window_extent().extents))  # fmt: skip
    for name, box in zip(order, spots):
        drawn[name].remove()
        far = label_layout.nearest(tuple(at[name]), box)
        long = (far[0] - at[name][0]) ** 2 + (far[1] - at[name][1]) ** 2 > 20**2
        axes.annotate(
            labels[name], values[name],
            xytext=(box[0] - at[name][0], box[1] - at[name][1]), textcoords="offset points", fontsize=8, linespacing=1.05,
            va="bottom", color=SOFT if "dominated" in labels[name] else INK, zorder=4,
        ).set_in_layout(False)  # fmt: skip
        if long:
            line = {"arrowstyle": "-", "color": SOFT, "lw": 0.6, "shrinkA": 0, "shrinkB": 0}
            end = far[0] - at[name][0], far[1] - at[name][1]
            axes.annotate("", values[name], xytext=end, textcoords="offset points", arrowprops=line).set_in_layout(False)


def _path(points: Any) -> list[label_layout.Box]:
    """Small boxes along a broken line, in pixels."""
    boxes: list[label_layout.Box] = []
    for (x0, y0), (x1, y1) in pairwise(points):
        n = max(2, int(max(abs(x1 - x0), abs(y1 - y0)) / 5))
        boxes += [(x - 1, y - 1, x + 1, y + 1) for x, y in zip(np.linspace(x0, x1, n), np.linspace(y0, y1, n))]
    return boxes


def _boxes(axes: Any, metrics: dict[str, Any], at: Any, area: float) -> list[label_layout.Box]:
    """What of a variant is drawn: its mark and both its bars, in pixels."""
    r = area**0.5 / 2 + 1
    boxes = [(at[0] - r, at[1] - r, at[0] + r, at[1] + r)]
    for k, name in enumerate(pareto.AXES):
        m = metrics[name]
        if m["low"] is not None and m["high"] is not None:
            ends = [[m[side], metrics[pareto.AXES[1]]["value"]] for side in ("low", "high")] if k == 0 else None
            ends = ends or [[metrics[pareto.AXES[0]]["value"], m[side]] for side in ("low", "high")]
            (x0, y0), (x1, y1) = axes.transData.transform(ends)
            boxes.append((min(x0, x1) - 2, min(y0, y1) - 2, max(x0, x1) + 2, max(y0, y1) + 2))
    return boxes
