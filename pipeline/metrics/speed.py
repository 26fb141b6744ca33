"""Rows of requests -> latency, rates, ratios by round, phases, memory, sweeps, and what bounds them.

Warm-ups and failed requests are out of the rates, not of the counts. Metrics without a part come from the rounds in turn with the
reference (scenario `single`); `ttft_ms/context-1024` and its like from the variant's sweep afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from pipeline.core.errors import ArtifactError
from pipeline.metrics import roofline
from pipeline.metrics.builder import Builder
from pipeline.metrics.roofline import each_token_s, first_token_s
from pipeline.speed.requests import itl
from pipeline.speed.roofline import KV_TOLERANCE, Shape
from pipeline.speed.rounds import Looks, drift, drift_in_words, pairs
from pipeline.speed.run_to_run import whole_runs
from pipeline.speed.schedule import PHASES, SWEPT
from pipeline.stats.intervals import Estimate, geometric_mean_t, mean_t, quantile_interval, wilson

Row = dict[str, Any]
CLIFF = 2.0  # ms per prompt token, or per output token, grow by more than this from one context to the next
ONCE = "measured once: no interval"


def timing_metrics(b: Builder, rows: list[Row], meta: Row) -> None:
    """All figures of one variant's timings; `meta` is what `benchmark` wrote beside the rows."""
    if "rates" not in meta:
        raise ArtifactError("the timings are of an older version of quantgate; run `dvc repro benchmark`")
    single = [r for r in rows if r["scenario"] == "single"]
    ours = [r for r in single if not r["warmup"] and r["who"] == "variant"]
    b.add("failure_rate", wilson(sum(not r["ok"] for r in ours), len(ours), confidence=b.confidence))
    good = [r for r in ours if r["ok"]]
    if not good:
        return
    _latency(b, good)
    cold = next((r for r in single if r["who"] == "variant" and r.get("cold")), None)  # pays for what later ones find ready
    if cold is not None and cold["ok"]:
        b.bare("ttft_cold_ms", 1000 * first_token_s(cold), 1, "first request of a fresh process", ONCE)
    else:
        b.bare("ttft_cold_ms", None, 0, "first request of a fresh process", "the first request failed" if cold else "no such row")
    _ratios(b, single, Looks(meta["looks"]["planned"], tuple(meta["looks"]["bounds"]), b.between.ratio))
    _phases(b, good)
    kv = _cache(b, rows, meta)
    _memory(b, good, meta)
    _sweeps(b, rows, meta)
    roofline.add(b, single, meta, kv)


FIGURES: dict[str, tuple[Callable[[Row], float], float]] = {  # of one request; scale to the metric's unit
    "ttft_ms": (first_token_s, 1000.0),
    "tpot_ms": (each_token_s, 1000.0),
    "e2e_ms": (lambda r: float(r["t_tokens"][-1] - r["t_submit"]), 1000.0),
    "prefill_tok_s": (lambda r: r["prompt_tokens"] / first_token_s(r), 1.0),
    "decode_tok_s": (lambda r: r.get("batch", 1) / each_token_s(r), 1.0),  # of all requests side by side
}


def _time(b: Builder, values: Sequence[float]) -> Estimate:
    """Mean of latencies or rates, its t interval not below zero and with run-to-run variation."""
    mean = mean_t(values, confidence=b.confidence)
    mean = mean if mean.low is None else replace(mean, low=max(mean.low, 0.0))
    return whole_runs(mean, b.between.time, confidence=b.confidence)


def _latency(b: Builder, good: list[Row]) -> None:
    for name, (value, scale) in FIGURES.items():
        b.add(name, _time(b, [value(r) for r in good]), scale)
    gaps = [(1000 * g, r["round"]) for r in good for g in itl(r["t_tokens"])]
    for name, q in (("itl_p50_ms", 0.5), ("itl_p95_ms", 0.95), ("itl_p99_ms", 0.99)):
        estimate = quantile_interval([g for g, _ in gaps], [k for _, k in gaps], q, confidence=b.confidence)
        b.add(name, whole_runs(estimate, b.between.time, confidence=b.confidence))


def _ratios(b: Builder, single: list[Row], looks: Looks) -> None:
    both, c = pairs(single), b.confidence
    moved = drift(single, confidence=c)
    b.add("reference_drift", moved)
    speed = looks.ratio(single, c)
    b.add("speed_ratio", replace(speed, warnings=(*speed.warnings, *drift_in_words(moved, single))))
    prefill = geometric_mean_t([first_token_s(y) / first_token_s(x) for x, y in both], confidence=c)
    b.add("prefill_ratio", whole_runs(prefill, b.between.ratio, confidence=c))


def _phases(b: Builder, good: list[Row]) -> None:
    for phase in PHASES:
        times = [r["phases"][phase] for r in good if r["phases"][phase] not in (None, [])]
        if times:
            b.add(f"phase_ms/{phase}", _time(b, [float(np.mean(v)) for v in times]), 1000.0)
        else:
            b.bare(f"phase_ms/{phase}", None, 0, "clock inside the engine", good[0]["phases_unknown"].get(phase, "unknown"))


def _cache(b: Builder, rows: list[Row], meta: Row) -> float | None:
    """Bytes of keys and values a token: the slope over context lengths, or, at one length, all bytes over all tokens."""
    own = [r for r in rows if r["who"] == "variant" and r["ok"] and r.get("cache_bytes") is not None]
    sizes = {r["cache_tokens"]: r["cache_bytes"] for r in own}
    expected = Shape(**meta["models"]["variant"]["shape"]).cache_bytes(own[-1]["cache_element_bytes"] if own else None)
    config = "the config does not say how many" if expected is None else f"the config makes it {expected:g}"
    if not sizes:
        b.bare("kv_bytes_per_token", None, 0, config, "the engine does not say how large its cache is")
        return None
    lengths = sorted(sizes)
    if len(sizes) > 1:
        value = float(np.polyfit(lengths, [sizes[n] for n in lengths], 1)[0])
        method = f"slope of cache bytes over {len(sizes)} lengths, {lengths[0]} to {lengths[-1]} tokens; {config}"
    else:
        value, method = sizes[lengths[0]] / lengths[0], f"cache bytes over the {lengths[0]} tokens in it; {config}"
    apart = expected is not None and abs(value - expected) > KV_TOLERANCE * expected
    notes = (f"{value:g} bytes measured, {expected:g} by the config: more than {100 * KV_TOLERANCE:g} % apart",) if apart else ()
    b.exact("kv_bytes_per_token", value, len(own), method, *notes)
    return value


def _memory(b: Builder, good: list[Row], meta: Row) -> None:
    peaks = [r["peak_memory_bytes"] for r in good if r["peak_memory_bytes"] is not None]
    b.bare("peak_memory_bytes", max(peaks, default=None), len(peaks), "VmHWM after loading", ONCE)
    load = meta["loads"]["variant"]
    b.bare("load_s", load["load_s"], 1, "fresh process, its libraries' imports counted", ONCE)
    b.bare("load_memory_bytes", load["load_memory_bytes"], 1, "VmHWM while loading", ONCE)
    on_gpu = [r["cuda_memory"] for r in good if r.get("cuda_memory")]
    for name, key in (("cuda_allocated_bytes", "allocated"), ("cuda_reserved_bytes", "reserved"), ("nvml_used_bytes", "nvml")):
        known = [m[key] for m in on_gpu if m[key] is not None]
        if on_gpu:
            note = ONCE if known else "NVML cannot be asked: pip install nvidia-ml-py"
            b.bare(name, max(known, default=None), len(known), "largest after a request", note)
            loaded = (load.get("load_cuda_memory") or {}).get(key)
            b.bare(f"{name}/load", loaded, 1, "after loading", ONCE if loaded is not None else note)


def _sweeps(b: Builder, rows: list[Row], meta: Row) -> None:
    sweep = meta["sweep"]
    by_scenario: dict[str, list[Row]] = {}
    for row in rows:
        if row["scenario"] != "single":
            by_scenario.setdefault(row["scenario"], []).append(row)
    for scenario, own in by_scenario.items():
        _swept(b, scenario, own, tuple(filter(None, [sweep["notes"].get(scenario)])))
    for scenario, why in sweep["missing"].items():
        for name in SWEPT[scenario.partition("-")[0]] if scenario not in by_scenario else ():
            b.bare(f"{name}/{scenario}", None, 0, "sweep", why)
    contexts = [own for scenario, own in by_scenario.items() if scenario.startswith("context-") and any(r["ok"] for r in own)]
    b.bounds["cliffs"] = _cliffs(b, contexts)


def _swept(b: Builder, scenario: str, own: list[Row], notes: tuple[str, ...]) -> None:
    good = [r for r in own if r["ok"]]
    failed = tuple(f"{len(own) - len(good)} of {len(own)} requests failed: {r['error']}" for r in own if not r["ok"])[:1]
    for name in SWEPT[scenario.partition("-")[0]]:
        full = f"{name}/{scenario}"
        if not good:
            b.bare(full, None, 0, "sweep", *failed)
        elif name == "peak_memory_bytes":
            peaks = [r["peak_memory_bytes"] for r in good if r["peak_memory_bytes"] is not None]
            # the least: what an earlier, larger request left with the process is not this one's
            b.bare(full, min(peaks, default=None), len(peaks), "VmHWM of a request, least of its repetitions", ONCE, *notes)
        else:
            value, scale = FIGURES[name]
            estimate = _time(b, [value(r) for r in good])
            b.add(full, replace(estimate, warnings=(*estimate.warnings, *failed, *notes)), scale)


def _cliffs(b: Builder, contexts: list[list[Row]]) -> list[str]:
    """Where a token costs more than CLIFF times what it cost at the next shorter context; also a warning on the metric. The least
    of the repetitions is compared: interference only adds."""
    costs = {
        "ttft_ms": ("ms per prompt token", lambda r: first_token_s(r) / r["prompt_tokens"]),
        "tpot_ms": ("ms per output token", each_token_s),
    }  # fmt: skip
    cliffs = []
    for shorter, longer in pairwise(sorted(contexts, key=lambda rows: int(rows[0]["prompt_tokens"]))):
        names = shorter[0]["scenario"], longer[0]["scenario"]
        for metric, (what, cost) in costs.items():
            growth = _least(longer, cost) / _least(shorter, cost)
            if growth > CLIFF:
                before, after = (b.metrics[f"{metric}/{name}"] for name in names)
                of = [int(rows[0]["prompt_tokens"]) if metric == "ttft_ms" else 1 for rows in (shorter, longer)]
                ends = before["high"], after["low"]
                open_ = "" if None not in ends and ends[1] / of[1] > ends[0] / of[0] else "; not settled: intervals overlap"
                text = f"a cliff: {what} grow {growth:.1f} times from {names[0]} to {names[1]}"
                text += f" (limit {CLIFF:g}; least of each, n = {before['n']} and {after['n']}{open_})"
                cliffs.append(text)
                after["warnings"] = (*after["warnings"], text)
    return cliffs


def _least(rows: Sequence[Row], value: Callable[[Row], float]) -> float:
    return min(value(r) for r in rows if r["ok"])
