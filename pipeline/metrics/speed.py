"""Rows of requests -> latency, rates, ratios by round, phases, memory, sweeps, and what bounds them.

Rates leave out warm-ups and failed requests, counts do not. Metrics without a part come from the rounds in turns with the reference
(scenario `single`); those such as `ttft_ms/context-1024` from the variant's sweep afterwards. `mbu` is of decoding and `mfu` of
prefill, which they usually bound; the others are `mbu/prefill` and `mfu/decode`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np

from pipeline.core.records import LoadFacts, ModelShape, Sweep, TimingRow, TimingsMeta
from pipeline.metrics.builder import Builder
from pipeline.metrics.definitions import QUANTILES
from pipeline.speed.roofline import KV_TOLERANCE, Phase, cache_bytes, compare_phases, products
from pipeline.speed.rounds import Looks, decode_ratios, drift, drift_in_words, itl, pairs, tpot, ttft, whole_runs
from pipeline.speed.schedule import PHASES, SWEPT
from pipeline.stats.intervals import Estimate, geometric_mean_t, mean_t, quantile_interval, wilson

CLIFF = 2.0  # factor by which ms per prompt or output token must grow between contexts
ONCE = "measured once: no interval"


def timing_metrics(b: Builder, rows: list[TimingRow], meta: TimingsMeta) -> None:
    """All metrics of one variant's timings. meta: the file that `benchmark` wrote beside the rows."""
    single = [r for r in rows if r["scenario"] == "single"]
    requests = [r for r in single if not r["warmup"] and r["who"] == "variant"]
    b.add("failure_rate", wilson(sum(not r["ok"] for r in requests), len(requests), confidence=b.confidence))
    good = [r for r in requests if r["ok"]]
    if not good:
        return
    _latency(b, good)
    cold = next((r for r in single if r["who"] == "variant" and r.get("cold")), None)
    ttft_cold = 1000 * first_token_s(cold) if cold and cold["ok"] else None
    note = ONCE if ttft_cold is not None else "the first request failed" if cold else "no such row"
    b.bare("ttft_cold_ms", ttft_cold, int(ttft_cold is not None), "first request of a fresh process", note)
    _ratios(b, single, Looks(meta["looks"]["planned"], tuple(meta["looks"]["bounds"]), b.between.ratio))
    _speculation(b, single, good)
    _phases(b, good)
    kv = _cache(b, rows, meta["models"]["variant"]["shape"])
    _memory(b, good, meta["loads"]["variant"])
    _sweeps(b, rows, meta["sweep"])
    _roofline(b, single, good, meta, kv)


def first_token_s(row: TimingRow) -> float:
    """Seconds to the first token of a successful request."""
    assert row["t_submit"] is not None
    value = ttft(row["t_submit"], row["t_tokens"])
    assert value is not None  # a successful request has tokens
    return value


def each_token_s(row: TimingRow) -> float:
    """Seconds per token after the first, of a successful request."""
    value = tpot(row["t_tokens"])
    assert value is not None  # params ask for at least two tokens
    return value


def last_token_s(row: TimingRow) -> float:
    """Seconds to the last token of a successful request."""
    return row["t_tokens"][-1] - (row["t_submit"] or 0.0)


REQUEST: dict[str, tuple[Callable[[TimingRow], float], float]] = {  # of one request; scale to the metric's unit
    "ttft_ms": (first_token_s, 1000.0),
    "tpot_ms": (each_token_s, 1000.0),
    "e2e_ms": (last_token_s, 1000.0),
    "prefill_tok_s": (lambda r: r["prompt_tokens"] / first_token_s(r), 1.0),
    "decode_tok_s": (lambda r: r["batch"] / each_token_s(r), 1.0),  # of all requests side by side
}


def _time(b: Builder, values: Sequence[float]) -> Estimate:
    """Mean of latencies or rates; its t interval includes run-to-run variation and is not negative."""
    mean = mean_t(values, confidence=b.confidence)
    mean = mean if mean.low is None else replace(mean, low=max(mean.low, 0.0))
    return whole_runs(mean, b.between.time, confidence=b.confidence)


def _latency(b: Builder, good: list[TimingRow]) -> None:
    for name, (value, scale) in REQUEST.items():
        b.add(name, _time(b, [value(r) for r in good]), scale)
    gaps = [(1000 * gap, r["round"] or 0) for r in good for gap in itl(r["t_tokens"])]
    for label, q in QUANTILES.items():
        estimate = quantile_interval([gap for gap, _ in gaps], [k for _, k in gaps], q, confidence=b.confidence)
        b.add(f"itl_{label}_ms", whole_runs(estimate, b.between.time, confidence=b.confidence))


def _ratios(b: Builder, single: list[TimingRow], looks: Looks) -> None:
    moved = drift(single, confidence=b.confidence)
    b.add("reference_drift", moved)
    speed = looks.ratio(single, b.confidence)
    b.add("speed_ratio", replace(speed, warnings=(*speed.warnings, *drift_in_words(moved, single))))
    ratios = [first_token_s(reference) / first_token_s(variant) for variant, reference in pairs(single)]
    prefill = geometric_mean_t(ratios, confidence=b.confidence)
    b.add("prefill_ratio", whole_runs(prefill, b.between.ratio, confidence=b.confidence))


def _speculation(b: Builder, single: list[TimingRow], good: list[TimingRow]) -> None:
    """What a draft gains over the same engine without it in the same rounds; nothing without a draft."""
    if "accepted" not in good[0]:
        return
    requests = range(len(good))
    b.mean("spec_step", [sum(r["accepted"]) + len(r["accepted"]) for r in good], [len(r["accepted"]) for r in good], requests)
    guessed = [sum(r["proposed"]) for r in good]
    if any(guessed):
        b.mean("spec_accepted", [sum(r["accepted"]) for r in good], guessed, requests)
    else:
        b.bare("spec_accepted", None, 0, "accepted over guessed", "the draft guessed no token")
    for position in range(1, max((n for r in good for n in r["proposed"]), default=0) + 1):
        counts = [(k, *(sum(n >= position for n in of) for of in (r["accepted"], r["proposed"]))) for k, r in enumerate(good)]
        at, hit, tried = zip(*(count for count in counts if count[2]))
        b.mean(f"spec_accepted/{position}", hit, tried, at)
    whole = [last_token_s(other) / last_token_s(variant) for variant, other in pairs(single, "undrafted")]
    for name, ratios in (("spec_speed_ratio", decode_ratios(single, "undrafted")), ("spec_e2e_ratio", whole)):
        b.add(name, whole_runs(geometric_mean_t(ratios, confidence=b.confidence), b.between.ratio, confidence=b.confidence))


def _phases(b: Builder, good: list[TimingRow]) -> None:
    for phase in PHASES:
        times = [seconds for r in good if (seconds := r["phases"][phase]) not in (None, [])]
        if times:
            b.add(f"phase_ms/{phase}", _time(b, [float(np.mean(seconds)) for seconds in times]), 1000.0)
        else:
            b.bare(f"phase_ms/{phase}", None, 0, "clock inside the engine", good[0]["phases_unknown"].get(phase, "unknown"))


def _cache(b: Builder, rows: list[TimingRow], shape: ModelShape) -> float | None:
    """Bytes of keys and values per token: the slope over context lengths, or at a single length the quotient."""
    counted = [r for r in rows if r["who"] == "variant" and r["ok"] and r.get("cache_bytes") is not None]
    sizes = {r["cache_tokens"] or 0: r["cache_bytes"] or 0 for r in counted}
    expected = cache_bytes(shape, counted[-1]["cache_element_bytes"] if counted else None)
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
    b.exact("kv_bytes_per_token", value, len(counted), method, *notes)
    return value


def _peaks(rows: list[TimingRow]) -> list[int]:
    return [peak for r in rows if (peak := r["peak_memory_bytes"]) is not None]


def _memory(b: Builder, good: list[TimingRow], load: LoadFacts) -> None:
    peaks = _peaks(good)
    b.bare("peak_memory_bytes", max(peaks, default=None), len(peaks), "VmHWM after loading", ONCE)
    b.bare("load_s", load["load_s"], 1, "fresh process, its libraries' imports counted", ONCE)
    b.bare("load_memory_bytes", load["load_memory_bytes"], 1, "VmHWM while loading", ONCE)
    on_gpu = [memory for r in good if (memory := r["cuda_memory"])]
    if not on_gpu:
        return
    names: dict[Literal["allocated", "reserved", "nvml"], str] = {
        "allocated": "cuda_allocated_bytes", "reserved": "cuda_reserved_bytes", "nvml": "nvml_used_bytes"
    }  # fmt: skip
    for key, name in names.items():
        known = [size for memory in on_gpu if (size := memory[key]) is not None]
        note = ONCE if known else "NVML cannot be asked: pip install nvidia-ml-py"
        b.bare(name, max(known, default=None), len(known), "largest after a request", note)
        loaded = load["load_cuda_memory"][key] if load["load_cuda_memory"] else None
        b.bare(f"{name}/load", loaded, 1, "after loading", ONCE if loaded is not None else note)


def _sweeps(b: Builder, rows: list[TimingRow], sweep: Sweep) -> None:
    by_scenario: dict[str, list[TimingRow]] = {}
    for row in rows:
        if row["scenario"] != "single":
            by_scenario.setdefault(row["scenario"], []).append(row)
    for scenario, swept in by_scenario.items():
        _swept(b, scenario, swept, tuple(filter(None, [sweep["notes"].get(scenario)])))
    for scenario, why in sweep["missing"].items():
        for name in SWEPT[scenario.partition("-")[0]] if scenario not in by_scenario else ():
            b.bare(f"{name}/{scenario}", None, 0, "sweep", why)
    contexts = [rows for scenario, rows in by_scenario.items() if scenario.startswith("context-") and any(r["ok"] for r in rows)]
    b.bounds["cliffs"] = _cliffs(b, contexts)


def _swept(b: Builder, scenario: str, rows: list[TimingRow], notes: tuple[str, ...]) -> None:
    good = [r for r in rows if r["ok"]]
    failed = tuple(f"{len(rows) - len(good)} of {len(rows)} requests failed: {r['error']}" for r in rows if not r["ok"])[:1]
    for stem in SWEPT[scenario.partition("-")[0]]:
        name = f"{stem}/{scenario}"
        if not good:
            b.bare(name, None, 0, "sweep", *failed)
        elif stem == "peak_memory_bytes":
            peaks = _peaks(good)
            # the least: an earlier, larger request may have left memory with the process
            b.bare(name, min(peaks, default=None), len(peaks), "VmHWM of a request, least of its repetitions", ONCE, *notes)
        else:
            value, scale = REQUEST[stem]
            estimate = _time(b, [value(r) for r in good])
            b.add(name, replace(estimate, warnings=(*estimate.warnings, *failed, *notes)), scale)


def _cliffs(b: Builder, contexts: list[list[TimingRow]]) -> list[str]:
    """Where a token costs more than CLIFF times as much as at the next shorter context; adds a warning to the metric. Compares the
    least of the repetitions, as interference only adds."""
    costs: dict[str, tuple[str, Callable[[TimingRow], float]]] = {
        "ttft_ms": ("ms per prompt token", lambda r: first_token_s(r) / r["prompt_tokens"]),
        "tpot_ms": ("ms per output token", each_token_s),
    }
    cliffs = []
    for both in pairwise(sorted(contexts, key=lambda rows: rows[0]["prompt_tokens"])):
        names = [rows[0]["scenario"] for rows in both]
        for metric, (what, cost) in costs.items():
            shorter, longer = (min(cost(r) for r in rows if r["ok"]) for rows in both)
            if longer / shorter > CLIFF:
                before, after = (b.metrics[f"{metric}/{name}"] for name in names)
                tokens = [rows[0]["prompt_tokens"] if metric == "ttft_ms" else 1 for rows in both]
                high, low = before["high"], after["low"]
                settled = high is not None and low is not None and low / tokens[1] > high / tokens[0]
                text = f"a cliff: {what} grow {longer / shorter:.1f} times from {names[0]} to {names[1]}"
                text += f" (limit {CLIFF:g}; least of each, n = {before['n']} and {after['n']}"
                cliffs.append(text + (")" if settled else "; not settled: intervals overlap)"))
                after["warnings"].append(cliffs[-1])
    return cliffs


PhaseName = Literal["decode", "prefill"]
SHARES: dict[PhaseName, tuple[str, str, str, Literal["against", "against_prefill"]]] = {
    # names of its shares, its ratio to the reference, and the sentence on that
    "decode": ("mbu", "mfu/decode", "speed_ratio", "against"),
    "prefill": ("mbu/prefill", "mfu", "prefill_ratio", "against_prefill"),
}
SECONDS: dict[str, Callable[[TimingRow], float]] = {"prefill": first_token_s, "decode": each_token_s}


def _roofline(b: Builder, single: list[TimingRow], good: list[TimingRow], meta: TimingsMeta, kv: float | None) -> None:
    """Both phases' shares, and why the variant is faster or slower than the reference. kv: bytes of keys and values per token."""
    reference = [row for _, row in pairs(single)]
    for name, (mbu, mfu, ratio, sentence) in SHARES.items():
        phase = _phase(good, meta, "variant", name, kv, b.confidence)
        if phase.note:
            b.bare(mbu, None, 0, "bytes over time over bandwidth", "the engine does not say how large its cache is")
        else:
            _share(b, mbu, phase, good, phase.bytes, phase.bandwidth, "bytes over time over bandwidth")
        _share(b, mfu, phase, good, phase.operations, phase.rate, f"operations over time over rate of a product in {phase.rate_of}")
        b.bounds[name] = phase.sentence()
        if meta["model"] != meta["reference"] and reference:
            other = _phase(reference, meta, "reference", name, reference[0]["kv_bytes_per_token"], b.confidence)
            value, low, high = (b.metrics[ratio][k] for k in ("value", "low", "high"))
            models = meta["models"]
            b.bounds[sentence] = compare_phases(
                models["variant"]["name"], phase, models["reference"]["name"], other, value or 0.0, low, high
            )
    rates = meta["rates"]
    moved = [f"{kind} {rate / 1e9:.3g} GB/s" for rate, kind in ((rates["read"], "read"), (rates["copy"], "copied")) if rate]
    products = [f"{rate / 1e9:.3g} GFLOP/s in {dtype}" for dtype, rate in rates["matrix"].items() if rate]
    parts = [f"memory {' and '.join(moved)}"] * bool(moved) + [f"products {', '.join(products)}"] * bool(products)
    b.bounds["rates"] = f"measured in the same run: {'; '.join(parts)}" if parts else ""


def _share(
    b: Builder, name: str, phase: Phase, rows: list[TimingRow], needed: float | None, rate: float | None, method: str
) -> None:
    """A phase's share of one of the machine's rates, a mean over requests."""
    if not needed or not rate:
        b.bare(name, None, 0, method, phase.why)
        return
    share = mean_t([needed / rate / SECONDS[phase.name](r) for r in rows], confidence=b.confidence)
    low = None if share.low is None else max(share.low, 0.0)
    over = ("more than all of it: its own products are faster than the one that was timed",) if (share.value or 0) > 1 else ()
    method = f"{method}; {share.method}; attention not counted"
    b.add(name, replace(share, low=low, method=method, warnings=(*share.warnings, *over)))


def _phase(
    rows: list[TimingRow], meta: TimingsMeta, who: Literal["variant", "reference"], name: str, kv: float | None, confidence: float
) -> Phase:
    """One phase of one model, with the rates of its device."""
    model, rates = meta["models"][who], meta["rates"]
    measured_here = meta["loads"][who]["device"] == rates["device"]
    guessed = name == "decode" and "accepted" in rows[0]
    multiplied, experts = None if guessed else products(model["shape"], model["parameters"]), model["shape"]["experts"]
    prompt = rows[0]["prompt_tokens"]
    time = mean_t([SECONDS[name](r) for r in rows], confidence=confidence)
    assert time.value is not None  # at least one request is ok
    span = (time.low, time.high) if time.low is not None and time.high is not None and time.low > 0 else None
    if name == "prefill":
        needed, step = float(model["weight_bytes"]), f"for {prompt} prompt tokens"
        work = 2 * (multiplied[0] * prompt + multiplied[1]) if multiplied else None
    else:
        needed, step = model["weight_bytes"] + (kv or 0) * (prompt + rows[0]["output_tokens"] / 2), "a token"
        work = 2 * sum(multiplied) if multiplied else None
    if not measured_here or rates["read"] is None:
        why = "the rates of its device were not measured"
    elif guessed:
        why = "a pass gives several tokens, and the draft reads weights of its own"
    elif experts:
        why = "experts take turns: which weights a token needs is not known"
    elif multiplied:
        why = f"no product in {model['dtype']} could be timed here"
    else:
        why = "config.json does not say which weights a token multiplies"
    return Phase(
        name=name, step=step, seconds=time.value, bytes=None if experts or guessed else needed, operations=work,
        bandwidth=rates["read"] if measured_here else None, rate=rates["matrix"].get(model["dtype"]) if measured_here else None,
        rate_of=model["rate_of"], why=why, span=span,
        note="keys and values not counted" if name == "decode" and kv is None else "",
    )  # fmt: skip
