"""What the floor says about a figure: which differences are too small to be told from none, and the same in words."""

from __future__ import annotations

from typing import Any

from pipeline.metrics.definitions import FLOORS, definition
from pipeline.reporting.numbers import show

Metrics = dict[str, dict[str, Any]]
MARK = "floor-limited"
TIMES = 2  # so many times what "no difference" measures; below it a difference may be all noise


def limit(name: str, floors: Metrics) -> float | None:
    """Below this distance from "no difference" a metric is floor-limited, in the metric's unit.

    Twice the larger of floor and rounding; what is null does not count, and of nothing there is none.
    """
    known = [floors[f]["value"] for f in FLOORS[name] if f in floors and floors[f]["value"] is not None]
    return TIMES * max(known) if known else None


def mark(metrics: Metrics, floors: Metrics) -> None:
    """Add a warning to every metric of a variant whose distance from "no difference" is below the limit."""
    for name in FLOORS.keys() & metrics.keys():
        value, most, what = metrics[name]["value"], limit(name, floors), definition(name)
        assert what is not None and what.neutral is not None  # FLOORS names metrics that have both
        if value is None:
            continue
        if most is None:
            told = "the noise floor is unknown"
        elif abs(value - what.neutral) < most:
            told = f"{MARK}: below {TIMES} times what no difference measures here ({most / TIMES:.3g})"
        else:
            continue
        metrics[name]["warnings"] = [*metrics[name]["warnings"], told]


def marked(metric: dict[str, Any] | None) -> str:
    """` (floor-limited)` behind a figure that is."""
    return f" ({MARK})" if any(w.startswith(MARK) for w in (metric or {}).get("warnings", [])) else ""


def sentence(floors: Metrics, reference: str) -> str:
    """The floor's figures in words; empty where none were measured."""
    if "kld_floor" not in floors:
        return ""
    parts = ", ".join(f"{n.split('/')[1]} {shown(m)}" for n, m in floors.items() if n.startswith("kld_floor/"))
    return (
        f"What no difference measures here, {reference} against itself over {floors['kld_floor/rerun']['n']} tokens: mean KLD "
        f"up to {shown(floors['kld_floor'])} nats ({parts}; {floors['kld_floor/stepwise']['n']} tokens stepwise), likeliest "
        f"token another in {shown(floors['flip_floor'], 100)} %. The same weights in float32: {shown(floors['kld_rounding'])} "
        f"nats, {shown(floors['flip_rounding'], 100)} %. Below {TIMES} times the larger of the two, a figure is {MARK}."
    )


def draw(axes: Any, floors: Metrics) -> None:
    """Shade the band of a picture of mean KLD (y) in which a difference may be none, down to 0, and say so."""
    most = limit("kld_mean", floors)
    if most:
        axes.axhspan(0, most, color="#0b57a4", alpha=0.08, lw=0, zorder=0)
        said = f"{MARK}: below {TIMES} × what no difference measures ({most / TIMES:.2g} nats)"
        axes.text(0.99, most, said, transform=axes.get_yaxis_transform(), ha="right", va="top", fontsize=7, color="#0b57a4")


def shown(metric: dict[str, Any], scale: float = 1.0) -> str:
    """`0.0018 [0.0015, 0.0021]`, or why there is none."""
    if metric["value"] is None:
        return f"unknown ({metric.get('reason') or 'no reason given'})"
    return show(metric, scale=scale)
