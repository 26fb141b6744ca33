"""What bounds a variant: shares of the machine's rates by phase, and sentences with the figures behind them.

MBU and MFU of both phases; `mbu` is decoding's and `mfu` prefill's, where each of them decides, `mbu/prefill` and `mfu/decode`
the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipeline.metrics.builder import Builder
from pipeline.speed.requests import tpot, ttft
from pipeline.speed.roofline import Phase, Shape, compare_phases
from pipeline.speed.rounds import pairs
from pipeline.stats.intervals import mean_t

Row = dict[str, Any]
PHASES = {  # names of its shares, of its ratio to the reference, and of the sentence on that
    "decode": ("mbu", "mfu/decode", "speed_ratio", "against"),
    "prefill": ("mbu/prefill", "mfu", "prefill_ratio", "against_prefill"),
}


def add(b: Builder, single: list[Row], meta: Row, kv: float | None) -> None:
    """Both phases' shares, and why the variant is faster or slower than the reference in the same rounds. kv: bytes of keys and
    values a token, None where the engine does not say."""
    both = pairs(single)
    ours = [r for r in single if r["who"] == "variant" and r["ok"] and not r["warmup"]]
    for name, (mbu, mfu, ratio, sentence) in PHASES.items():
        phase = _phase(ours, meta, "variant", name, kv, b.confidence)
        if phase.note:
            b.bare(mbu, None, 0, "bytes over time over bandwidth", "the engine does not say how large its cache is")
        else:
            _share(b, mbu, phase, ours, phase.bytes, phase.bandwidth, "bytes over time over bandwidth")
        _share(b, mfu, phase, ours, phase.operations, phase.rate, f"operations over time over rate of a product in {phase.rate_of}")
        b.bounds[name] = phase.sentence()
        if meta["model"] != meta["reference"] and both:
            rows = [r for _, r in both]
            theirs = _phase(rows, meta, "reference", name, rows[0].get("kv_bytes_per_token"), b.confidence)
            value, low, high = (b.metrics[ratio][k] for k in ("value", "low", "high"))
            names = meta["models"]["variant"]["name"], meta["models"]["reference"]["name"]
            b.bounds[sentence] = compare_phases(names[0], phase, names[1], theirs, value, low, high)
    rates = meta["rates"]
    moved = [f"{kind} {rates[key] / 1e9:.3g} GB/s" for key, kind in (("read", "read"), ("copy", "copied")) if rates[key]]
    products = [f"{rate / 1e9:.3g} GFLOP/s in {dtype}" for dtype, rate in rates["matrix"].items() if rate]
    parts = [f"memory {' and '.join(moved)}"] * bool(moved) + [f"products {', '.join(products)}"] * bool(products)
    b.bounds["rates"] = f"measured in the same run: {'; '.join(parts)}" if parts else ""


def _share(b: Builder, name: str, phase: Phase, rows: list[Row], needed: float | None, rate: float | None, method: str) -> None:
    """A phase's share of one of the machine's rates, over requests."""
    if not needed or not rate:
        b.bare(name, None, 0, method, phase.why)
        return
    share = mean_t([needed / rate / SECONDS[phase.name](r) for r in rows], confidence=b.confidence)
    low = None if share.low is None else max(share.low, 0.0)
    over = ("more than all of it: its own products are faster than the one that was timed",) if (share.value or 0) > 1 else ()
    method = f"{method}; {share.method}; attention not counted"
    b.add(name, replace(share, low=low, method=method, warnings=(*share.warnings, *over)))


def first_token_s(row: Row) -> float:
    """Seconds to the first token of a request that was answered."""
    value = ttft(row["t_submit"], row["t_tokens"])
    assert value is not None  # a request that is ok has tokens
    return value


def each_token_s(row: Row) -> float:
    """Seconds a token after the first, of a request that was answered."""
    value = tpot(row["t_tokens"])
    assert value is not None  # params ask for at least two tokens
    return value


SECONDS: dict[str, Callable[[Row], float]] = {"prefill": first_token_s, "decode": each_token_s}


def _phase(rows: list[Row], meta: Row, who: str, name: str, kv: float | None, confidence: float) -> Phase:
    """One phase of one model, held against the rates of its device."""
    model, load, rates = meta["models"][who], meta["loads"][who], meta["rates"]
    here = load["device"] == rates["device"]
    products = Shape(**model["shape"]).products(model["parameters"])
    rate, experts = rates["matrix"].get(model["dtype"]) if here else None, model["shape"]["experts"]
    prompt = rows[0]["prompt_tokens"]
    time = mean_t([SECONDS[name](r) for r in rows if r["ok"]], confidence=confidence)
    assert time.value is not None  # at least one request is ok
    span = (time.low, time.high) if time.low is not None and time.high is not None and time.low > 0 else None
    if name == "prefill":
        needed, step = float(model["weight_bytes"]), f"for {prompt} prompt tokens"
        work = 2 * (products[0] * prompt + products[1]) if products else None
    else:
        step = "a token"
        needed = model["weight_bytes"] + (kv or 0) * (prompt + rows[0]["output_tokens"] / 2)
        work = 2 * sum(products) if products else None
    if not here or rates["read"] is None:
        why = "the rates of its device were not measured"
    elif experts:
        why = "experts take turns: which weights a token needs is not known"
    else:
        untimed = f"no product in {model['dtype']} could be timed here"
        why = untimed if products else "config.json does not say which weights a token multiplies"
    return Phase(
        name=name, step=step, seconds=time.value, bytes=None if experts else needed, operations=work,
        bandwidth=rates["read"] if here else None, rate=rate, rate_of=model["rate_of"],
        why=why,
        span=span, note="keys and values not counted" if name == "decode" and kv is None else "",
    )  # fmt: skip
