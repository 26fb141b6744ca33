"""Request rows of a server -> metrics with intervals.

A level is one load: so many requests at once (closed loop), or so many a second (open loop). Until the machine is full, more
requests at once raise throughput and cost little; beyond, they only wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from pipeline.metrics.builder import as_metric
from pipeline.metrics.definitions import QUANTILES, SERVED
from pipeline.metrics.replies import e2e, gaps, tpot, ttfc, ttft, unseen, unverified
from pipeline.speed.run_to_run import whole_runs
from pipeline.stats.intervals import Estimate, mean_t, quantile_interval, wilson

Row = dict[str, Any]
Metrics = dict[str, dict[str, Any]]
FEW_FOR_P99 = 100
WHY_MISSING = {
    "tpot": "one token, a number of tokens that is not known, or all at once",
    "itl": "fewer than two tokens, or events that carry more than one or none",
    "ttfc": "nothing but reasoning",
}
LAG = 0.05  # a client that sends later than this share of the median TTFT measures itself as well


def scenarios(concurrency: Iterable[int], rates: Iterable[float]) -> list[str]:
    """Names of levels: `closed-4` (four at once), `open-0.5` (one every other second)."""
    return [*(f"closed-{c}" for c in sorted(set(concurrency))), *(f"open-{r:g}" for r in sorted(set(rates)))]


def in_a_round(scenario: str, requests: int) -> int:
    """Requests of a level in a round: at least four for each concurrent one."""
    kind, _, size = scenario.partition("-")
    return max(requests, 4 * int(size)) if kind == "closed" else requests


def warm_ups(scenario: str, warmups: int) -> int:
    """Requests before a level: at least one for each concurrent one, unless none is asked for."""
    kind, _, size = scenario.partition("-")
    return max(warmups, int(size)) if warmups and kind == "closed" else warmups


def memory(peak: int | None, why_not: str, confidence: float) -> dict[str, Any]:
    """`server_memory_bytes`; null, with the reason, where it cannot be seen."""
    method = "sum of VmHWM over the server's processes, loading and all levels"
    estimate = nothing(why_not) if peak is None else Estimate(peak, None, None, 1, method, ("measured once: no interval",))
    return as_metric("server_memory_bytes", estimate, confidence)


@dataclass(frozen=True)
class Objective:
    """What a request must keep to count as good; limits in milliseconds, None: not asked for."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def met(self, row: Row) -> bool:
        """Whether a request is complete and within every limit. One token has no TPOT to keep; a TPOT that is asked for
        and cannot be known of a longer reply is not kept."""
        if not row["ok"]:
            return False
        times = {"ttft_ms": ttft(row), "tpot_ms": tpot(row), "e2e_ms": e2e(row)}
        if row["output_tokens"] == 1:
            times["tpot_ms"] = 0.0
        limits = {k: v for k, v in asdict(self).items() if v is not None}
        return all((x := times[k]) is not None and 1000 * x <= limit for k, limit in limits.items())


def level(rows: list[Row], confidence: float, objective: Objective | None = None, between: float | None = None) -> Metrics:
    """Figures of one level. rows: all of its requests, failed ones and warm-ups too; between: what times and rates of whole runs
    differ by (whole_runs.py). Failed requests are out of latencies and throughput and in the rates; how long they took counts as
    wall time all the same."""
    counted = [r for r in rows if not r["warmup"]]
    good = [r for r in counted if r["ok"]]
    estimates = {
        "failure_rate": _share(counted, lambda r: not r["ok"], confidence),
        "timeout_rate": _share(counted, lambda r: r["fault"] == "timeout", confidence),
    }
    estimates |= (
        _latencies(good, len(counted) - len(good), confidence) | _rates(counted, confidence, objective) | _counts(rows, good)
    )
    if any(r.get("t_due") is not None for r in counted):
        estimates["client_lag_p99_ms"] = _lag(counted, good)
    times = [name for name in estimates if SERVED[name].unit in ("ms", "tok/s", "req/s") and name != "client_lag_p99_ms"]
    estimates |= {name: whole_runs(estimates[name], between, confidence=confidence) for name in times}
    if good and all(ttft(r) is None for r in good):  # that no empty reply failed is no finding
        silent = "no complete reply has a token: nothing was served"
        estimates = {name: replace(e, low=None, high=None, warnings=(*e.warnings, silent)) for name, e in estimates.items()}
    return {name: as_metric(name, e, confidence) for name, e in estimates.items()}


def nothing(reason: str, n: int = 0, method: str = "none") -> Estimate:
    return Estimate(None, None, None, n, method, (reason,))


def _latencies(good: list[Row], failed: int, confidence: float) -> dict[str, Estimate]:
    """Percentiles over requests; of gaps, over all gaps, with a request's own drawn together."""
    each: dict[str, list[tuple[float, int]]] = {"itl": [(g, k) for k, r in enumerate(good) for g in gaps(r)]}
    for name, of in (("ttft", ttft), ("ttfc", ttfc), ("tpot", tpot), ("e2e", e2e)):
        each[name] = [(x, k) for k, r in enumerate(good) if (x := of(r)) is not None]
    without = len(good) - len({k for _, k in each["itl"]})
    seen = unseen(good)
    latencies = {}
    for name, pairs in each.items():
        left_out = without if name == "itl" else len(good) - len(pairs)
        why = f"{left_out} of {len(good)} complete replies are left out: {WHY_MISSING.get(name, 'no token')}"
        notes: tuple[str, ...] = (why,) if left_out else ()
        notes += seen if name in ("ttft", "tpot", "e2e") else ()
        notes += (f"{failed} failed requests are left out",) if failed else ()
        rounds = _by_round([1000 * x for x, _ in pairs], [good[k]["round"] for _, k in pairs])
        for label, q in QUANTILES.items():
            latencies[f"{name}_{label}_ms"] = _across(
                _quantile(pairs, q, notes, confidence), [float(np.quantile(own, q)) for own in rounds], confidence
            )
    return latencies


def _share(rows: list[Row], hit: Callable[[Row], bool], confidence: float) -> Estimate:
    """The share of requests that `hit` says yes to."""
    hits = [float(hit(r)) for r in rows]
    rounds = [float(np.mean(own)) for own in _by_round(hits, [r["round"] for r in rows])]
    share = _across(wilson(int(sum(hits)), len(hits), confidence=confidence), rounds, confidence)
    return share if share.high is None else replace(share, high=min(share.high, 1.0))


def _by_round(values: list[float], rounds: list[int]) -> list[list[float]]:
    """Values apart by the round of each."""
    return [[x for x, own in zip(values, rounds) if own == k] for k in sorted(set(rounds))]


def _across(pooled: Estimate, rounds: list[float], confidence: float) -> Estimate:
    """A figure over all requests with the outer of its interval over requests and a t interval over rounds (the same figure
    of each): requests of one round wait for each other, so that their own spread says too little. One round has no interval."""
    if pooled.low is None or pooled.high is None or pooled.value is None:
        return pooled
    each = mean_t(rounds, confidence=confidence)
    if each.low is None or each.high is None:
        return replace(pooled, low=None, high=None, warnings=(*pooled.warnings, "one round: no interval can be made"))
    half = (each.high - each.low) / 2
    low, high = max(min(pooled.low, pooled.value - half), 0.0), max(pooled.high, pooled.value + half)
    return replace(pooled, low=low, high=high, method=f"outer limits of: {pooled.method}; {each.method} of rounds")


def _quantile(pairs: list[tuple[float, int]], q: float, notes: tuple[str, ...], confidence: float) -> Estimate:
    if not pairs:
        return nothing("; ".join(notes) or "no request was complete")
    values, requests = zip(*((1000 * x, k) for x, k in pairs))
    estimate = quantile_interval(values, requests, q, confidence=confidence)
    if q == QUANTILES["p99"] and len(values) < FEW_FOR_P99:
        notes = (f"the 99th percentile of {len(values)} values is little more than their maximum", *notes)
    return replace(estimate, warnings=(*estimate.warnings, *notes))


def walls(rows: list[Row]) -> dict[int, float]:
    """{round: seconds from its first submission to its last event}; rounds that took no time at all are left out."""
    by_round = {}
    for k in {r["round"] for r in rows}:
        own = [r for r in rows if r["round"] == k]
        seconds = max(r["t_end"] for r in own) - min(r["t_submit"] for r in own)
        if seconds > 0:
            by_round[k] = seconds
    return by_round


def _rates(counted: list[Row], confidence: float, objective: Objective | None) -> dict[str, Estimate]:
    """Rates are means over rounds: within one round requests shape each other, so it is the unit."""
    wall = walls(counted)
    good = [r for r in counted if r["ok"]]

    def rate(weight: Callable[[Row], float]) -> Estimate:
        sums = [sum(weight(r) for r in counted if r["round"] == k) / seconds for k, seconds in sorted(wall.items())]
        mean = mean_t(sums, confidence=confidence)
        if mean.low is None or mean.low >= 0:
            return mean
        return replace(mean, low=0.0, warnings=(*mean.warnings, f"cut at 0: {mean.n} rounds are few for an interval"))

    rates = {"throughput_req_s": rate(lambda r: float(r["ok"]))}
    unknown = sum(r["output_tokens"] is None for r in good)
    rates["throughput_tok_s"] = (
        nothing(f"{unknown} of {len(good)} replies have no known number of tokens")
        if unknown
        else rate(lambda r: float(r["output_tokens"] if r["ok"] else 0))
    )
    if objective is None or objective == Objective():
        return rates | dict.fromkeys(("goodput_req_s", "attainment"), nothing("no objective was stated"))
    rates["goodput_req_s"] = rate(lambda r: float(objective.met(r)))
    return rates | {"attainment": _share(counted, objective.met, confidence)}


def _counts(rows: list[Row], good: list[Row]) -> dict[str, Estimate]:
    """What makes two servers comparable, or not: lengths, caches, warm-ups. Counts have no sampling error."""
    known = [r["output_tokens"] for r in good if r["output_tokens"] is not None]
    cached = [r["cached_tokens"] for r in good if r["cached_tokens"] is not None]
    warm = [r for r in rows if r["warmup"]]
    ready = sum(r["ok"] for r in warm)

    def exact(value: int, n: int, *notes: str) -> Estimate:
        return Estimate(value, value, value, n, "count", notes)

    counts = {"warmups": exact(ready, len(warm), *(() if ready else ("no warm-up: the first requests carry what is done once",)))}
    notes = unverified(good)
    if known:
        if min(known) != max(known):
            notes += ("replies differ in length: latencies and throughput are not comparable with another run's",)
        counts["output_tokens_min"] = exact(min(known), len(known), *notes)
        counts["output_tokens_max"] = exact(max(known), len(known), *notes)
        counts["one_token_replies"] = exact(sum(k == 1 for k in known), len(known))
    else:
        reason = "; ".join(("no complete reply has a known number of tokens", *notes))
        counts |= {k: nothing(reason) for k in ("output_tokens_min", "output_tokens_max", "one_token_replies")}
    if cached:
        note = ("a prefix cache answered part of the prompts: TTFT is not that of new ones",) if sum(cached) else ()
        counts["cached_tokens"] = exact(sum(cached), len(cached), *note)
    else:
        counts["cached_tokens"] = nothing("the server does not say what its prefix cache answered")
    return counts


def _lag(counted: list[Row], good: list[Row]) -> Estimate:
    late = [1000 * (r["t_submit"] - r["t_due"]) for r in counted if r.get("t_due") is not None]
    value = float(np.quantile(late, 0.99, method="inverted_cdf"))
    usual = [1000 * x for r in good if (x := ttft(r)) is not None]
    note = "measured on the client: no interval is made"
    if usual and value > LAG * float(np.median(usual)):
        note = f"this client sent late by more than {LAG:.0%} of the median TTFT: use a lower rate or another machine; {note}"
    return Estimate(value, None, None, len(late), "99th percentile", (note,))


def saturation_point(levels: Mapping[int, list[Row]], confidence: float) -> dict[str, Any]:
    """The metric `knee`: the concurrency at which throughput over median latency is greatest. Beyond it, one percent more
    throughput costs more than one percent more latency.

    levels: {concurrency: its rows}. low and high: the least and greatest of single rounds. Null if the best level is the
    highest tried, or the lowest (unless that is 1), or if fewer than three levels can be compared. Source: Kleinrock 1979,
    "Power and deterministic rules of thumb for probabilistic problems in computer communications".
    """
    power = {c: p for c, rows in sorted(levels.items()) if (p := _power([r for r in rows if not r["warmup"]]))}
    rounds = sorted(set.intersection(*(set(p) for p in power.values()))) if power else []
    if len(power) < 3 or not rounds:
        reason = f"{len(power)} levels have complete requests in every round; a knee needs three"
        return as_metric("knee", nothing(reason, len(rounds)), confidence)
    single = [max(power, key=lambda c, k=k: power[c][k]) for k in rounds]  # type: ignore[misc]
    best = max(power, key=lambda c: float(np.mean(np.log([power[c][k] for k in rounds]))))
    method = f"greatest throughput / median latency over {len(power)} levels, {len(rounds)} rounds; interval: single rounds' own"
    unsettled = {
        max(power): f"throughput still pays for latency at {best} at once, the most that was tried",
        min(power): f"throughput over latency is best at {best} at once, and nothing lower was tried",
    }
    if best in unsettled and best > 1:
        return as_metric("knee", nothing(unsettled[best], len(rounds), method), confidence)
    notes = () if len(set(single)) == 1 else (f"rounds disagree: {single}",)
    return as_metric("knee", Estimate(best, min(single), max(single), len(rounds), method, notes), confidence)


def _power(counted: list[Row]) -> dict[int, float]:
    """{round: complete requests a second over median end-to-end seconds}, for rounds with complete requests."""
    by_round = {}
    for k, seconds in walls(counted).items():
        times = [x for r in counted if r["round"] == k and r["ok"] and (x := e2e(r)) is not None]
        if times:
            by_round[k] = len(times) / seconds / float(np.median(times))
    return by_round
