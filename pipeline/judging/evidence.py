"""What repeated runs say of a rule's noise: the evidence that the ledger keeps beside its bound."""

from __future__ import annotations

import time
from typing import Any

from pipeline.core import artifacts, git
from pipeline.core.errors import ArtifactError
from pipeline.core.params import Params, Rule
from pipeline.judging.against import CLOCKED, timed
from pipeline.numbers.definitions import definition
from pipeline.numbers.metrics import FLOORS
from pipeline.numbers.stats import resolvable

Row = dict[str, Any]
OF_CLOCKS = ("speed_ratio", "prefill_ratio", "mbu")  # and what has a time or a rate for its unit


def evidence(rule: Rule, settings: Params, results: dict[str, Row]) -> Row:
    """What repeated runs and the present interval say of a rule's noise.

    noise: the upper end of what the same weights measure against themselves (0 where no floor is measured), and on top the
    smallest loss that the interval tells from none in 80 % of runs; the least margin that a variant without loss passes. Of a
    figure of a clock the interval must hold what whole runs differ by: rounds of one share its minutes. Else it is null.
    """
    names = [*settings.gate.required, *settings.variants]
    usable = [
        n
        for n in names
        if n != settings.reference and (rule.variants is None or n in rule.variants) and _has_interval(results.get(n), rule.metric)
    ]
    if not usable:
        raise ArtifactError(f"{rule.metric} has no interval in the results of any variant; run `dvc repro`")
    what = definition(rule.metric)
    variant = _witness(usable, rule.metric, settings, results)
    m = results[variant]["metrics"][rule.metric]
    floor = floor_of(rule.metric, results.get(settings.reference, {}).get("metrics", {}))
    clusters = f" in {m['clusters']} clusters" if m["clusters"] else ""
    runs = f"{floor['runs']} reruns of {settings.reference} (floor.json)" if floor else "no rerun of the reference measures it"
    runs = runs if not timed(rule.metric) else _of_runs(rule.metric, m)
    assert what is not None
    return {
        "of": variant, "n": m["n"], "clusters": m["clusters"], "value": m["value"], "low": m["low"], "high": m["high"],
        "unit": what.unit, "interval_width": m["high"] - m["low"], "floor": floor, "noise": noise(rule.metric, m, floor),
        "from": f"the interval of {variant}, n = {m['n']}{clusters}; {runs}",
        "tier": settings.tier, "seed": settings.seed, "date": today(), "commit": commit(),
        "figures": figures(variant, m, floor),
    }  # fmt: skip


def _witness(usable: list[str], metric: str, settings: Params, results: dict[str, Row]) -> str:
    """Whose figures speak for a rule: of the required variants the one with the least noise; another's wide interval is not
    theirs. The first of the others where no required one has the metric."""
    deciding = [n for n in usable if n in settings.gate.required]
    width = {n: results[n]["metrics"][metric]["high"] - results[n]["metrics"][metric]["low"] for n in deciding}
    return min(deciding, key=lambda n: width[n]) if deciding else usable[0]


def noise(name: str, metric: Row, floor: Row | None) -> float | None:
    """The least margin that a variant without loss passes in 80 % of runs, by a metric's interval and its floor. None: not
    known, for a figure of a clock whose interval is one run's (whole_runs.py)."""
    if _clocked(name) and metric.get("between") is None:
        return None
    width = resolvable(metric["low"], metric["high"], confidence=metric["confidence"], power=0.8)
    return float((floor or {}).get("high", 0.0) + width)


def _clocked(name: str) -> bool:
    what = definition(name)
    return name in OF_CLOCKS or (what is not None and what.unit in (*CLOCKED, "req/s"))


def _of_runs(name: str, metric: Row) -> str:
    if not _clocked(name):
        return "its rounds are repeated runs"
    if metric.get("between") is None:
        return "one run: how far whole runs differ is not known (compare.between_runs), so its noise explains no looser bound"
    return f"with the {100 * metric['between']:.2g} % that whole runs differ by"


def figures(variant: str, metric: Row, floor: Row | None) -> str:
    """What tells figures apart: the same ones are evidence once."""
    return artifacts.digest([variant, metric["value"], metric["low"], metric["high"], metric["n"], floor])[:16]


def _has_interval(result: Row | None, metric: str) -> bool:
    found = ((result or {}).get("metrics") or {}).get(metric) or {}
    return None not in (found.get("value"), found.get("low"), found.get("high"))


def floor_of(metric: str, reference: dict[str, Row]) -> Row | None:
    """The floor that belongs to a metric: {value, low, high, n, by: {rerun: ...}, runs}; None where none is measured."""
    name = FLOORS[metric][0] if metric in FLOORS else ""
    found = reference.get(name)
    if not found or found.get("high") is None:
        return None
    by = {n.partition("/")[2]: m["value"] for n, m in reference.items() if n.startswith(f"{name}/")}
    return {k: found[k] for k in ("value", "low", "high", "n")} | {"by": by, "runs": len(by)}


def today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def commit() -> str | None:
    """The commit that is checked out, with `+` where files differ from it; None outside git."""
    head = git.line("rev-parse", "--short", "HEAD")
    return head and head + ("+" if git.line("status", "--porcelain", "--untracked-files=no") else "")
