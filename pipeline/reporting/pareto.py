"""Which variants are dominated, and by whom.

One variant dominates another if it is faster (decode rate over the reference's in the same run), no larger on disk, and nearer to
the reference (mean KLD), with intervals apart. KLDs below the noise floor's limit count as equal. If one of speed and KLD is apart
and the other overlaps, domination is open. Timings of different machines are never compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pipeline.metrics import noise_floor
from pipeline.reporting.text import show

Results = dict[str, dict[str, Any]]
Side = Literal["better", "same", "open", "worse"]
AXES = ("speed_ratio", "kld_mean")


@dataclass(frozen=True)
class Domination:
    """by: the variant that dominates; sure: intervals are apart; words: the figures of both."""

    by: str
    sure: bool
    words: str


def measured(results: Results) -> list[str]:
    """Variants with a speed and a KLD."""
    return [n for n, r in results.items() if all(r["metrics"].get(k, {}).get("value") is not None for k in AXES)]


def one_machine(results: Results) -> bool:
    """Whether all timings were taken on the same machine."""
    return len({repr(r["machine"]) for r in results.values() if r["machine"]}) <= 1


def front(results: Results) -> list[str]:
    """Variants that no other beats in speed and KLD by value, fastest first: what the picture's line joins."""
    chosen: list[str] = []
    for name in sorted(measured(results), key=lambda n: (-_value(results, n, "speed_ratio"), _value(results, n, "kld_mean"))):
        if not chosen or _value(results, name, "kld_mean") < _value(results, chosen[-1], "kld_mean"):
            chosen.append(name)
    return chosen


def dominated(results: Results, reference: str) -> dict[str, Domination]:
    """{variant: by whom it is dominated}, sure ones before open ones; of several the nearest to the reference."""
    behind: dict[str, Domination] = {}
    names = measured(results) if one_machine(results) else []
    limit = noise_floor.limit("kld_mean", results[reference]["metrics"]) or 0.0
    for name in names:
        rivals = [(r, sure) for r in names if (sure := _dominates(results[r], results[name], limit)) is not None]
        if name != reference and rivals:
            by, sure = min(rivals, key=lambda r: (not r[1], _value(results, r[0], "kld_mean")))
            behind[name] = Domination(by, sure, _words(results, by, name, limit))
    return behind


def _dominates(ours: dict[str, Any], theirs: dict[str, Any], limit: float) -> bool | None:
    """True: surely; False: one axis is sure, the other open; None: no."""
    a, b = ours["metrics"], theirs["metrics"]
    size = [m.get("weight_bytes", {}).get("value") for m in (a, b)]
    if ours is theirs or None in size or size[0] > size[1]:
        return None
    speed, kld = side(b["speed_ratio"], a["speed_ratio"]), side(a["kld_mean"], b["kld_mean"], limit)
    if speed == "better" and kld in ("better", "same"):
        return True
    return False if {speed, kld} == {"better", "open"} else None


def side(low: dict[str, Any], high: dict[str, Any], limit: float = 0.0) -> Side:
    """How sure it is that the first figure is the lower one."""
    if max(low["value"], high["value"]) <= limit:
        return "same"
    if None in (low["low"], low["high"], high["low"], high["high"]):
        return "open"
    if low["high"] < high["low"]:
        return "better"
    return "worse" if low["low"] > high["high"] else "open"


def _words(results: Results, by: str, name: str, limit: float) -> str:
    a, b = results[by]["metrics"], results[name]["metrics"]
    same = " (both floor-limited)" if side(a["kld_mean"], b["kld_mean"], limit) == "same" else ""
    return (
        f"{by} against {name}: decode {show(a['speed_ratio'])} to {show(b['speed_ratio'])} times the reference's, "
        f"KLD {show(a['kld_mean'])} to {show(b['kld_mean'])} nats{same}, "
        f"{show(a['weight_bytes'])} to {show(b['weight_bytes'])} MB"
    )


def _value(results: Results, name: str, metric: str) -> float:
    return float(results[name]["metrics"][metric]["value"])
