"""What the report draws. Never without a unit, n and an interval; a verdict is a marker and a word, not a colour alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline import artifacts, noise

MARKS = {
    "PASS": ("o", "#1a7f37"), "FAIL": ("X", "#b42318"), "INCONCLUSIVE": ("D", "#9a6700"), "REFERENCE": ("s", "#0b57a4"),
}  # fmt: skip


def draw_tradeoff(results: dict[str, dict[str, Any]], verdict: dict[str, Any], reference: str, path: Path) -> None:
    """Quality (KLD) against decode speed, area by file size, verdict by marker and word; intervals as bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"svg.hashsalt": "quantgate", "font.size": 10, "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(7.6, 4.8), layout="constrained")
        sizes = [r["metrics"]["weight_bytes"]["value"] for r in results.values() if "weight_bytes" in r["metrics"]]
        for name, result in results.items():
            x, y, size = (result["metrics"].get(k) for k in ("decode_tok_s", "kld_mean", "weight_bytes"))
            if not (x and y and size) or x["value"] is None or y["value"] is None:
                continue
            word = "REFERENCE" if name == reference else verdict["variants"][name]["verdict"]
            marker, colour = MARKS.get(word, ("o", "#666666"))
            at = x["value"], y["value"]
            axes.errorbar(*at, xerr=_bars(x), yerr=_bars(y), fmt="none", ecolor="#888888", lw=1, capsize=2, zorder=1)
            area = 420 * size["value"] / max(sizes)
            axes.scatter(*at, s=area, marker=marker, c=colour, alpha=0.75, zorder=2, edgecolors="white")
            axes.annotate(
                f"{name}\n{size['value'] / 1e6:.0f} MB · {word}", at, xytext=(10, 6),
                textcoords="offset points", fontsize=8,
            )  # fmt: skip
        axes.set_yscale("symlog", linthresh=1e-5)
        noise.draw(axes, results[reference]["metrics"])
        axes.set_ylabel(f"mean KLD to {reference}, nats (n = {_n(results, 'kld_mean')} tokens; lower is better)")
        axes.set_xlabel(f"decode speed, tok/s (n = {_n(results, 'decode_tok_s')} rounds; right is better)")
        axes.set_title("Quality against speed; area is file size, bars are intervals", fontsize=10)
        axes.margins(x=0.18)
        top = max((r["metrics"]["kld_mean"]["value"] for r in results.values() if "kld_mean" in r["metrics"]), default=1.0)
        axes.set_ylim(-2e-6, max(top, 1e-5) * 8)  # room for the uppermost label
        axes.grid(alpha=0.25)
        with artifacts.atomic_file(path) as tmp:
            figure.savefig(tmp, format="svg", metadata={"Date": None})
        with artifacts.atomic_file(path.with_suffix(".png")) as tmp:
            figure.savefig(tmp, format="png", dpi=130, metadata={"Software": None})
        plt.close(figure)


def _n(results: dict[str, dict[str, Any]], name: str) -> int:
    """The largest n behind a metric, over variants."""
    return max((r["metrics"][name]["n"] for r in results.values() if name in r["metrics"]), default=0)


def _bars(metric: dict[str, Any]) -> list[list[float]] | None:
    if metric["low"] is None:
        return None
    return [[max(0.0, metric["value"] - metric["low"])], [max(0.0, metric["high"] - metric["value"])]]
