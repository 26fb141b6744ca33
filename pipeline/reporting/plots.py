"""How the report draws, and quality against speed. Never without a unit, n and an interval; a verdict is a marker and a word.

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
from pipeline.core.records import Metrics, Results, Verdict
from pipeline.metrics import noise_floor
from pipeline.reporting import recommendation
from pipeline.reporting.text import Known, n_of, value_of

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


def bars(metric: Known) -> list[list[float]] | None:
    """A value's interval as matplotlib wants it; None where there is none."""
    if metric.interval is None:
        return None
    low, high = metric.interval
    return [[max(0.0, metric.value - low)], [max(0.0, high - metric.value)]]


def draw_tradeoff(results: Results, verdict: Verdict, reference: str, confidence: float, path: Path) -> str:
    """Quality (KLD) against decode speed: a numbered mark a variant, area by file size; returns the alternative text. Speed is the
    ratio to the reference in the same run; the line is the least KLD to be had at a speed, by value."""
    behind = {n for n, d in recommendation.dominated(results, reference).items() if d.sure}
    at = recommendation.measured(results)
    sizes = {n: value_of(r, "weight_bytes") or 0.0 for n, r in results.items()}
    alt = f"Mean KLD to {reference} against decode speed, for {', '.join(at) or 'no variant'}; the table has the values."
    with sheet((7.6, 5.2)) as (figure, grid):
        axes = grid[0][0]
        floor = noise_floor.limit("kld_mean", results[reference]["metrics"])
        _scales(axes, [speed.value for speed, _ in at.values()], [kld.value for _, kld in at.values()], floor or 1e-5)
        draw_floor(axes, results[reference]["metrics"])
        front = [at[name] for name in recommendation.front(results)]
        line = {"color": SOFT, "lw": 1, "ls": "--", "drawstyle": "steps-post"}  # up to a variant's speed its KLD can be had
        axes.plot([speed.value for speed, _ in front], [kld.value for _, kld in front], zorder=1, **line)
        for k, (name, (speed, kld)) in enumerate(at.items(), 1):
            word = "REFERENCE" if name == reference else verdict["variants"][name]["verdict"]
            shape, colour = MARKS.get(word, ("P", "grey"))
            ink, grey = THEME["grey" if name in behind else colour][0], name in behind
            style = {"marker": shape, "c": PAGE if grey else ink, "edgecolors": ink if grey else PAGE, "linewidths": 1}
            area = LARGEST * max(sizes[name], 1.0) / max([*sizes.values(), 1.0])
            axes.errorbar(
                speed.value, kld.value, xerr=bars(speed), yerr=bars(kld), fmt="none", color=ink, lw=1, capsize=2, zorder=2
            )
            axes.scatter(speed.value, kld.value, s=area, zorder=3, **style)
            size = f"{sizes[name] / 1e6:.0f} MB" if sizes[name] else ""
            axes.scatter([], [], s=36, label=" · ".join(filter(None, (f"{k}: {name}", size, word, "dominated" * grey))), **style)
            away, way = area**0.5 / 2 + 2, (-1) ** k  # neighbours' numbers stand on both sides
            axes.annotate(
                str(k), (speed.value, kld.value), xytext=(way * away, away), textcoords="offset points", fontsize=9, weight="bold",
                ha="left" if way > 0 else "right", color=SOFT if grey else INK, zorder=4,
            )  # fmt: skip
        axes.set_ylabel(f"mean KLD to {reference}, nats (n = {n_of(results, 'kld_mean')} tokens; lower is better)")
        axes.set_xlabel(
            f"decode rate, times {reference}'s in the same run (n = {n_of(results, 'speed_ratio')} rounds; right is better)"
        )
        axes.set_title(f"Area: file size. {level(confidence)}. Dashed: least KLD to be had at a speed. Hollow grey: dominated.")
        axes.grid(alpha=0.5)
        if at:
            figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
        save(figure, path, alt, png=True)
    return alt


def draw_floor(axes: Any, floors: Metrics) -> None:
    """Shade the band of mean KLD (y) that cannot be told from zero."""
    most = noise_floor.limit("kld_mean", floors)
    if most:
        axes.axhspan(0, most, color=BLUE, alpha=0.08, lw=0, zorder=0)
        text = f"{noise_floor.MARK}: below {noise_floor.TIMES} × what no difference measures ({most / noise_floor.TIMES:.2g} nats)"
        axes.text(0.99, most, text, transform=axes.get_yaxis_transform(), ha="right", va="top", fontsize=7, color=BLUE)


def _scales(axes: Any, speeds: list[float], klds: list[float], linear: float) -> None:
    """KLD is linear up to the floor's limit (0 must have a place) and logarithmic above; speed is logarithmic if spread."""
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
