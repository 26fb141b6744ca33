"""What the report draws. Never without a unit, n and an interval; a verdict is a marker and a word, not a colour alone.

A picture is one SVG in both themes: its colours are those of THEME, and a style of its own swaps them on a dark screen.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.core import artifacts
from pipeline.metrics import noise_floor
from pipeline.reporting import pareto
from pipeline.reporting.text import n_of

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
    """Quality (KLD) against decode speed: a numbered mark a variant, area by file size; returns the alternative text. Speed is the
    ratio to the reference in the same run; the line is the least KLD to be had at a speed, by value."""
    behind = {n: d for n, d in pareto.dominated(results, reference).items() if d.sure}
    names = pareto.measured(results)
    alt = f"Mean KLD to {reference} against decode speed, for {', '.join(names) or 'no variant'}; the table has the figures."
    with sheet((7.6, 5.2)) as (figure, grid):
        axes = grid[0][0]
        _scales(axes, results, names, reference)
        draw_floor(axes, results[reference]["metrics"])
        axes.plot(*_steps([results[n]["metrics"] for n in pareto.front(results)]), color=SOFT, lw=1, ls="--", zorder=1)
        for k, name in enumerate(names, 1):
            word = "REFERENCE" if name == reference else verdict["variants"][name]["verdict"]
            _mark(axes, results, name, word, k, name in behind)
        axes.set_ylabel(f"mean KLD to {reference}, nats (n = {n_of(results, 'kld_mean')} tokens; lower is better)")
        axes.set_xlabel(
            f"decode rate, times {reference}'s in the same run (n = {n_of(results, 'speed_ratio')} rounds; right is better)"
        )
        axes.set_title(f"Area: file size. {level(confidence)}. Dashed: least KLD to be had at a speed. Hollow grey: dominated.")
        axes.grid(alpha=0.5)
        if names:
            figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
        save(figure, path, alt, png=True)
    return alt


def draw_floor(axes: Any, floors: dict[str, Any]) -> None:
    """Shade the band of mean KLD (y) that cannot be told from zero."""
    most = noise_floor.limit("kld_mean", floors)
    if most:
        axes.axhspan(0, most, color=BLUE, alpha=0.08, lw=0, zorder=0)
        text = f"{noise_floor.MARK}: below {noise_floor.TIMES} × what no difference measures ({most / noise_floor.TIMES:.2g} nats)"
        axes.text(0.99, most, text, transform=axes.get_yaxis_transform(), ha="right", va="top", fontsize=7, color=BLUE)


def _scales(axes: Any, results: Results, names: list[str], reference: str) -> None:
    """KLD is linear up to the floor's limit (0 must have a place) and logarithmic above; speed is logarithmic if spread."""
    speeds = [results[n]["metrics"]["speed_ratio"]["value"] for n in names]
    klds = [results[n]["metrics"]["kld_mean"]["value"] for n in names]
    linear = noise_floor.limit("kld_mean", results[reference]["metrics"]) or 1e-5
    axes.set_yscale("symlog", linthresh=linear, linscale=0.6)
    axes.set_ylim(-linear / 4, max([*klds, linear]) * 3)
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


def _mark(axes: Any, results: Results, name: str, word: str, k: int, behind: bool) -> None:
    """One variant: bars for intervals, shape for the verdict, a number for the legend; hollow and grey if dominated."""
    metrics = results[name]["metrics"]
    speed, kld = (metrics[axis] for axis in pareto.AXES)
    sizes = {n: r["metrics"].get("weight_bytes", {}).get("value") or 0.0 for n, r in results.items()}
    area = LARGEST * max(sizes[name], 1.0) / max([*sizes.values(), 1.0])
    shape, colour = MARKS.get(word, ("P", "grey"))
    ink = GREY if behind else THEME[colour][0]
    style = {"marker": shape, "c": PAGE if behind else ink, "edgecolors": ink if behind else PAGE, "linewidths": 1}
    at = speed["value"], kld["value"]
    axes.errorbar(*at, xerr=bars(speed), yerr=bars(kld), fmt="none", color=ink, lw=1, capsize=2, zorder=2)
    axes.scatter(*at, s=area, zorder=3, **style)
    size = f"{sizes[name] / 1e6:.0f} MB" if sizes[name] else ""
    axes.scatter([], [], s=36, label=" · ".join(filter(None, (f"{k}: {name}", size, word, "dominated" * behind))), **style)
    away = area**0.5 / 2 + 2
    side = (-1) ** k  # neighbours' numbers stand on both sides
    axes.annotate(str(k), at, xytext=(side * away, away), textcoords="offset points", ha="left" if side > 0 else "right",
                  fontsize=9, weight="bold", color=SOFT if behind else INK, zorder=4)  # fmt: skip
