"""Request rows of a server -> metrics with intervals.

A level is one load: so many requests at once (closed loop), or per second (open loop). Until the machine is full, more requests at
once raise throughput and cost little; beyond that they only wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import numpy as np

from pipeline.core.records import Metric, Metrics, RequestRow
from pipeline.metrics.builder import as_metric
from pipeline.metrics.definitions import QUANTILES, SERVED
from pipeline.speed import rounds as clock
from pipeline.speed.rounds import whole_runs
from pipeline.stats.intervals import Estimate, geometric_mean_t, mean_t, quantile_interval, wilson

T = TypeVar("T")
FEW_FOR_P99 = 100
WHY_MISSING = {
    "tpot": "one token, a number of tokens that is not known, or all at once",
    "itl": "fewer than two tokens, or events that carry more than one or none",
    "ttfc": "nothing but reasoning",
}
PREFIX = ("prefix-cold", "prefix-warm")  # levels of prompts whose beginning is new to the server, and of those whose is not
TAIL = 64  # tokens of such a prompt after its shared beginning
FAR = 1.0  # nats between the two likeliest tokens: rounding moves them by hundredths, and never swaps them
LAG = 0.05  # share of the median TTFT: a client that sends later than this also measures itself


def scenarios(concurrency: Iterable[int], rates: Iterable[float]) -> list[str]:
    """Names of levels: `closed-4` (four at once), `open-0.5` (one every other second)."""
    return [*(f"closed-{c}" for c in sorted(set(concurrency))), *(f"open-{r:g}" for r in sorted(set(rates)))]


def in_a_round(scenario: str, requests: int) -> int:
    """Requests of a level in one round: at least four for each concurrent one."""
    kind, _, size = scenario.partition("-")
    return max(requests, 4 * int(size)) if kind == "closed" else requests


def warm_ups(scenario: str, warmups: int) -> int:
    """Warm-up requests of a level: at least one for each concurrent one, unless `warmups` is 0."""
    kind, _, size = scenario.partition("-")
    return max(warmups, int(size)) if warmups and kind == "closed" else warmups


def memory(peak: int | None, why_not: str, confidence: float) -> Metric:
    """`server_memory_bytes`; null with `why_not` if unknown."""
    method = "sum of VmHWM over the server's processes, loading and all levels"
    estimate = nothing(why_not) if peak is None else Estimate(peak, None, None, 1, method, ("measured once: no interval",))
    return as_metric("server_memory_bytes", estimate, confidence)


# ---- one request: seconds, None where unknown --------------------------------------------------------------------------------
# A token may come without its own event: a server holds back partial characters, and one event may carry several tokens. The last
# token came no later than the event that ends the reply (`t_last`).


def ttft(row: RequestRow) -> float | None:
    """Submit to first token."""
    return clock.ttft(row["t_submit"], row["t_chunks"])


def ttfc(row: RequestRow) -> float | None:
    """Submit to the first token of the content; None for a reply that is all reasoning."""
    return None if row["t_content"] is None else row["t_content"] - row["t_submit"]


def tpot(row: RequestRow) -> float | None:
    """Time per output token after the first."""
    n = row["output_tokens"]
    return None if n is None else clock.tpot(row["t_chunks"], row["t_last"], n)


def e2e(row: RequestRow) -> float | None:
    """Submit to last token."""
    return None if row["t_last"] is None or not row["t_chunks"] else row["t_last"] - row["t_submit"]


TIMES = {"ttft": ttft, "ttfc": ttfc, "tpot": tpot, "e2e": e2e}


@dataclass(frozen=True)
class Objective:
    """Limits that a good request stays within, in milliseconds; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def met(self, row: RequestRow) -> bool:
        """Whether a request is complete and within every limit. A reply of one token meets any TPOT; an unknown time meets none."""
        times = {f"{name}_ms": of(row) for name, of in TIMES.items()}
        if row["output_tokens"] == 1:
            times["tpot_ms"] = 0.0
        limits = {k: v for k, v in asdict(self).items() if v is not None}
        return row["ok"] and all((x := times[k]) is not None and 1000 * x <= limit for k, limit in limits.items())


# ---- a level -----------------------------------------------------------------------------------------------------------------


def level(rows: list[RequestRow], confidence: float, objective: Objective | None = None, between: float | None = None) -> Metrics:
    """Metrics of one level. rows: all of its requests, failed ones and warm-ups too; between: variation of times and rates between
    whole runs (`whole_runs`). Failed requests count in failure rates and wall time, not in latencies and throughput."""
    counted = [r for r in rows if not r["warmup"]]
    good = [r for r in counted if r["ok"]]
    estimates = {
        "failure_rate": _share(counted, lambda r: not r["ok"], confidence),
        "timeout_rate": _share(counted, lambda r: r["fault"] == "timeout", confidence),
        **_latencies(good, len(counted) - len(good), confidence), **_rates(counted, confidence, objective), **_counts(rows, good),
    }  # fmt: skip
    timed = [name for name in estimates if SERVED[name].unit in ("ms", "tok/s", "req/s")]
    estimates |= {name: whole_runs(estimates[name], between, confidence=confidence) for name in timed}
    if late := [1000 * (r["t_submit"] - r["t_due"]) for r in counted if "t_due" in r]:
        estimates["client_lag_p99_ms"] = _lag(late, good)
    if good and all(ttft(r) is None for r in good):  # that no empty reply failed means nothing
        silent = "no complete reply has a token: nothing was served"
        estimates = {name: replace(e, low=None, high=None, warnings=(*e.warnings, silent)) for name, e in estimates.items()}
    return {name: as_metric(name, e, confidence) for name, e in estimates.items()}


def nothing(reason: str, n: int = 0, method: str = "none") -> Estimate:
    return Estimate(None, None, None, n, method, (reason,))


def _latencies(good: list[RequestRow], failed: int, confidence: float) -> dict[str, Estimate]:
    """Percentiles over requests; of gaps, over all gaps, resampled by request."""
    latencies = {}
    each = {"itl": [(gap, k) for k, r in enumerate(good) for gap in clock.itl(r["t_tokens"] or [])]}
    for name, of in TIMES.items():
        each[name] = [(x, k) for k, r in enumerate(good) if (x := of(r)) is not None]
    for name, seconds in each.items():
        left_out = len(good) - len({k for _, k in seconds})
        why = f"{left_out} of {len(good)} complete replies are left out: {WHY_MISSING.get(name, 'no token')}"
        notes: tuple[str, ...] = (why,) if left_out else ()
        notes += _unseen(good) if name in ("ttft", "tpot", "e2e") else ()
        notes += (f"{failed} failed requests are left out",) if failed else ()
        rounds = _by_round([1000 * x for x, _ in seconds], [good[k] for _, k in seconds]).values()
        for label, q in QUANTILES.items():
            of_rounds = [float(np.quantile(values, q)) for values in rounds]
            latencies[f"{name}_{label}_ms"] = _across(_quantile(seconds, q, notes, confidence), of_rounds, confidence)
    return latencies


def _unseen(good: list[RequestRow]) -> tuple[str, ...]:
    """Warnings about complete replies that do not have one event per token."""
    known = [(len(r["t_chunks"]), r["output_tokens"]) for r in good if r["output_tokens"] is not None]
    counts = {
        "fewer events than tokens (held back, or several in one): where the first token had none it came earlier than is seen, "
        "the last no later than the reply's end": sum(seen < n for seen, n in known),
        "more events with text than tokens: their count is doubtful": sum(seen > n for seen, n in known),
    }
    return tuple(f"{n} of {len(good)} complete replies came in {words}" for words, n in counts.items() if n)


def _share(rows: list[RequestRow], hit: Callable[[RequestRow], bool], confidence: float) -> Estimate:
    """The share of requests for which `hit` is true."""
    hits = [hit(r) for r in rows]
    rounds = [float(np.mean(values)) for values in _by_round(hits, rows).values()]
    share = _across(wilson(sum(hits), len(hits), confidence=confidence), rounds, confidence)
    return share if share.high is None else replace(share, high=min(share.high, 1.0))


def _by_round(values: Iterable[T], rows: Iterable[RequestRow]) -> dict[int, list[T]]:
    """{round: the values of its rows}, in order of rounds."""
    by_round: dict[int, list[T]] = {}
    for value, row in zip(values, rows):
        by_round.setdefault(row["round"] or 0, []).append(value)
    return dict(sorted(by_round.items()))


def _across(pooled: Estimate, rounds: list[float], confidence: float) -> Estimate:
    """A value over all requests. Its interval is the outer of the one over requests and a t interval over rounds (`rounds` has
    their values): requests of one round wait for each other, so their spread alone is too narrow. One round has no interval."""
    if pooled.low is None or pooled.high is None or pooled.value is None:
        return pooled
    each = mean_t(rounds, confidence=confidence)
    if each.low is None or each.high is None:
        return replace(pooled, low=None, high=None, warnings=(*pooled.warnings, "one round: no interval can be made"))
    half = (each.high - each.low) / 2
    low, high = max(min(pooled.low, pooled.value - half), 0.0), max(pooled.high, pooled.value + half)
    return replace(pooled, low=low, high=high, method=f"outer limits of: {pooled.method}; {each.method} of rounds")


def _quantile(seconds: list[tuple[float, int]], q: float, notes: tuple[str, ...], confidence: float) -> Estimate:
    """The quantile, in milliseconds, of (seconds, number of their request)."""
    if not seconds:
        return nothing("; ".join(notes) or "no request was complete")
    estimate = quantile_interval([1000 * x for x, _ in seconds], [k for _, k in seconds], q, confidence=confidence)
    if q == QUANTILES["p99"] and len(seconds) < FEW_FOR_P99:
        notes = (f"the 99th percentile of {len(seconds)} values is little more than their maximum", *notes)
    return replace(estimate, warnings=(*estimate.warnings, *notes))


def _rounds(rows: list[RequestRow]) -> dict[int, tuple[list[RequestRow], float]]:
    """{round: (its requests, seconds from the first submission to the last event)}; rounds that took no time are left out."""
    rounds = _by_round(rows, rows)
    walls = {k: max(r["t_end"] for r in part) - min(r["t_submit"] for r in part) for k, part in rounds.items()}
    return {k: (rounds[k], wall) for k, wall in walls.items() if wall > 0}


def _rates(counted: list[RequestRow], confidence: float, objective: Objective | None) -> dict[str, Estimate]:
    """Rates are means over rounds: requests of one round affect each other, so the round is the unit."""
    rounds = _rounds(counted).values()

    def rate(weight: Callable[[RequestRow], float]) -> Estimate:
        mean = mean_t([sum(map(weight, rows)) / seconds for rows, seconds in rounds], confidence=confidence)
        if mean.low is None or mean.low >= 0:
            return mean
        return replace(mean, low=0.0, warnings=(*mean.warnings, f"cut at 0: {mean.n} rounds are few for an interval"))

    rates = {"throughput_req_s": rate(lambda r: float(r["ok"]))}
    good = [r for r in counted if r["ok"]]
    unknown = sum(r["output_tokens"] is None for r in good)
    if unknown:
        rates["throughput_tok_s"] = nothing(f"{unknown} of {len(good)} replies have no known number of tokens")
    else:
        rates["throughput_tok_s"] = rate(lambda r: float(r["output_tokens"] or 0) if r["ok"] else 0.0)
    if objective is None or objective == Objective():
        return rates | dict.fromkeys(("goodput_req_s", "attainment"), nothing("no objective was stated"))
    return rates | {"goodput_req_s": rate(objective.met), "attainment": _share(counted, objective.met, confidence)}


def _counts(rows: list[RequestRow], good: list[RequestRow]) -> dict[str, Estimate]:
    """Lengths, cache hits and warm-ups: what makes two servers comparable, or not. Counts have no sampling error."""
    known = [r["output_tokens"] for r in good if r["output_tokens"] is not None]
    cached = [r["cached_tokens"] for r in good if r["cached_tokens"] is not None]
    warm = [r["ok"] for r in rows if r["warmup"]]

    def exact(value: int, n: int, *notes: str) -> Estimate:
        return Estimate(value, value, value, n, "count", notes)

    cold = () if any(warm) else ("no warm-up: the first requests carry what is done once",)
    counts = {"warmups": exact(sum(warm), len(warm), *cold)}
    forced = [r for r in good if r["forced"]]
    unsure = sum(r["counted_by"] != "usage" for r in forced)
    notes = [f"length unverified: {unsure} of {len(forced)} replies of forced length came without usage"] if unsure else []
    if known:
        if min(known) != max(known):
            notes.append("replies differ in length: latencies and throughput are not comparable with another run's")
        counts["output_tokens_min"] = exact(min(known), len(known), *notes)
        counts["output_tokens_max"] = exact(max(known), len(known), *notes)
        counts["one_token_replies"] = exact(known.count(1), len(known))
    else:
        reason = "; ".join(("no complete reply has a known number of tokens", *notes))
        counts |= dict.fromkeys(("output_tokens_min", "output_tokens_max", "one_token_replies"), nothing(reason))
    if cached:
        note = ("a prefix cache answered part of the prompts: TTFT is not that of new ones",) if sum(cached) else ()
        counts["cached_tokens"] = exact(sum(cached), len(cached), *note)
    else:
        counts["cached_tokens"] = nothing("the server does not say what its prefix cache answered")
    return counts


def _lag(late: list[float], good: list[RequestRow]) -> Estimate:
    """How late requests were sent. late: milliseconds of each."""
    value = float(np.quantile(late, 0.99, method="inverted_cdf"))
    usual = [1000 * x for r in good if (x := ttft(r)) is not None]
    note = "measured on the client: no interval is made"
    if usual and value > LAG * float(np.median(usual)):
        note = f"this client sent late by more than {LAG:.0%} of the median TTFT: use a lower rate or another machine; {note}"
    return Estimate(value, None, None, len(late), "99th percentile", (note,))


def reuse(rows: list[RequestRow], confidence: float, between: float | None = None) -> Metrics:
    """What a server saves on prompts that begin alike, by pairs of a cold and a warm one, and whether a cache hit changes its
    reply."""
    by: dict[str, dict[int | None, RequestRow]] = {}
    for r in rows:
        if r["ok"]:
            by.setdefault(r["scenario"], {})[r["round"]] = r
    cold, warm, hit, alone = (by.get(name, {}) for name in (*PREFIX, "prefix-hit", "prefix-alone"))
    shares = [n / tokens for r in warm.values() if (n := r["cached_tokens"]) is not None and (tokens := r["prompt_tokens"])]
    times = [(ttft(cold[k]), ttft(warm[k])) for k in cold.keys() & warm.keys()]
    gains = geometric_mean_t([a / b for a, b in times if a and b], confidence=confidence)
    replies = [(r["said"], alone[k]["said"]) for k, r in hit.items() if "said" in r and "said" in alone.get(k, {})]
    gaps = [next((b["gap"] for a, b in zip(*both) if a["token"] != b["token"]), 0.0) for both in replies]
    apart = sum([s["token"] for s in a] != [s["token"] for s in b] for a, b in replies)
    unasked = nothing("the server cannot be asked for the same reply without what it keeps, or gives no log-probabilities")
    estimates = {
        "prefix_hit_rate": mean_t(shares, confidence=confidence) if shares else nothing("the server does not say what it reused"),
        "prefix_gain": whole_runs(gains, between, confidence=confidence),
        "prefix_same": wilson(len(replies) - apart, len(replies), confidence=confidence) if replies else unasked,
        "prefix_gap": Estimate(max(gaps), max(gaps), max(gaps), len(gaps), "largest of these replies") if gaps else unasked,
    }
    return {name: as_metric(name, e, confidence) for name, e in estimates.items()}


def tipped(levels: Mapping[str, Metrics]) -> str | None:
    """Why a server's prefix cache is wrong, or None."""
    gap = levels.get(PREFIX[1], {}).get("prefix_gap")
    if gap is None or (gap["value"] or 0.0) <= FAR:
        return None
    return f"a prefix hit changes a reply where the two likeliest tokens are {gap['value']:.2g} nats apart"


def saturation_point(levels: Mapping[int, list[RequestRow]], confidence: float) -> Metric:
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
    best_of_round = [max(power, key=lambda c, k=k: power[c][k]) for k in rounds]  # type: ignore[misc]
    best = max(power, key=lambda c: float(np.mean(np.log([power[c][k] for k in rounds]))))
    method = f"greatest throughput / median latency over {len(power)} levels, {len(rounds)} rounds; interval: single rounds' own"
    unsettled = {
        max(power): f"throughput still pays for latency at {best} at once, the most that was tried",
        min(power): f"throughput over latency is best at {best} at once, and nothing lower was tried",
    }
    if best in unsettled and best > 1:
        return as_metric("knee", nothing(unsettled[best], len(rounds), method), confidence)
    notes = () if len(set(best_of_round)) == 1 else (f"rounds disagree: {best_of_round}",)
    return as_metric("knee", Estimate(best, min(best_of_round), max(best_of_round), len(rounds), method, notes), confidence)


def _power(counted: list[RequestRow]) -> dict[int, float]:
    """{round: complete requests a second over median end-to-end seconds}, for rounds with complete requests."""
    by_round = {}
    for k, (rows, seconds) in _rounds(counted).items():
        if times := [x for r in rows if r["ok"] and (x := e2e(r)) is not None]:
            by_round[k] = len(times) / seconds / float(np.median(times))
    return by_round
