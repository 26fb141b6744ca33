"""How a figure is written wherever people read one. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# unit of a metric: (factor, unit) as people read it; others as they are
UNITS = {"fraction": (100.0, " %"), "ratio": (1.0, ""), "bytes": (1e-6, " MB"), "ppl": (1.0, "")}


def show(metric: dict[str, Any] | None, digits: int = 3, scale: float = 1.0, sign: bool = False) -> str:
    """`0.00623 [0.00579, 0.00675]`, or a dash where there is no value."""
    if not metric or metric["value"] is None:
        return "–"
    style = f"{'+' if sign else ''}.{digits}g"
    text = number(metric["value"] * scale, style)
    low, high = metric.get("low"), metric.get("high")
    if low is None or high is None or low == high:
        return text
    return f"{text} [{number(low * scale, style)}, {number(high * scale, style)}]"


def number(value: float, style: str = ".3g") -> str:
    """Like format(), without exponents in the range people read, and without a sign on zero."""
    text = format(value, style)
    if "e" in text and 1e-4 <= abs(value) < 1e6:
        text = format(round(value), "d") if abs(value) >= 1 else format(value, ".6f")
    return "0" if value == 0 else text


def digits_apart(values: list[float], least: int = 3, most: int = 8) -> int:
    """Significant digits at which values that differ are also written differently: a figure beside what it is judged by."""
    known = set(values)
    enough = (d for d in range(least, most) if len({format(v, f".{d}g") for v in known}) == len(known))
    return next(enough, most)


def n_of(results: dict[str, dict[str, Any]], metric: str) -> str:
    """What a figure rests on over all variants that have it, in words: `5`, or `5 to 10` where they differ."""
    return counted(m.get("n", 0) for r in results.values() if (m := r["metrics"].get(metric)) and m["value"] is not None)


def dequantized(result: dict[str, Any]) -> str:
    """What is said beside the reference's name where its base was published packed."""
    return f" (dequantized from {found})" if (found := result.get("dequantized_from")) else ""


def counted(numbers: Iterable[int]) -> str:
    """`5`, or `5 to 10`; of none: `0`."""
    found = list(numbers) or [0]
    least, most = min(found), max(found)
    return f"{least}" if least == most else f"{least} to {most}"
