"""Requests become metrics: drift cancels in ratios, phases keep apart, memory is a slope, cliffs are named, bounds are said."""

from typing import Any

import numpy as np
import pytest
from scipy import stats

from pipeline.core.params import Compare
from pipeline.core.records import Metrics
from pipeline.metrics.builder import Builder
from pipeline.metrics.definitions import timed
from pipeline.metrics.speed import timing_metrics
from pipeline.speed.rounds import tpot, ttft

# 2 layers, 2 key-value heads of 16, vocabulary of 10 x 64: 640 weights in the tied head, 1360 in the body, 8 bytes in the cache
SHAPE = {"layers": 2, "kv_heads": 1, "head_dim": 1, "hidden": 64, "vocab": 10, "tied": True, "experts": None}


def request(k: int | None, who: str, first: float, step: float, n: int = 5, **more: Any) -> Any:
    begin = float(k or 0)
    times = [begin + first + step * i for i in range(n)]
    return {
        "round": k, "scenario": "single", "who": who, "warmup": False, "ok": True, "error": None, "t_submit": begin,
        "t_first": times[0], "t_tokens": times, "prompt_tokens": 100, "output_tokens": n, "kv_bytes_per_token": 10.0,
        "cache_bytes": 1040, "cache_tokens": 104, "cache_element_bytes": 2.5, "peak_memory_bytes": 1000, "cuda_memory": None,
        "cold": False, "batch": 1,
        "phases": {"tokenize": 0.001, "prefill": first * 0.9, "decode": [step * 0.8] * (n - 1), "sampling": [step * 0.1] * n,
                   "detokenize": 0.002}, "phases_unknown": {}, **more,
    }  # fmt: skip


def meta(**more: Any) -> Any:
    model = {"engine": "hf", "weight_bytes": 1000, "parameters": 2000, "dtype": "float32", "rate_of": "float32", "shape": SHAPE}
    load = {"load_s": 1.0, "load_memory_bytes": 5, "load_cuda_memory": None, "device": "cpu"}
    return {
        "model": "m", "reference": "r", "memory_bandwidth": 1e6, "loads": {"variant": load, "reference": load},
        "rates": {"device": "cpu", "read": 1e6, "copy": 1e6, "matrix": {"float32": 1e7}},
        "models": {"variant": model | {"name": "int4"}, "reference": model | {"name": "bf16", "weight_bytes": 4000}},
        "looks": {"planned": 1, "taken": 1, "bounds": []}, "sweep": {"notes": {}, "missing": {}}, **more,
    }  # fmt: skip


def built(rows: list[Any], **more: Any) -> Builder:
    b = Builder(Compare(), seed=1)
    timing_metrics(b, rows, meta(**more))
    return b


def timings(rows: list[Any], **more: Any) -> Metrics:
    return built(rows, **more).metrics


FIVE = [request(k, "variant", 0.2, 0.05) for k in range(5)]
PAIRED = [r for k in range(5) for r in (request(k, "variant", 0.2, 0.05 + k / 1000), request(k, "reference", 0.4, 0.1))]


def test_what_a_benchmark_measures_is_never_compared_with_another_machine_s() -> None:
    memory = {"allocated": 1, "reserved": 2, "nvml": 3}
    found = timings([r | {"cuda_memory": memory} for r in PAIRED])
    assert {name.split("/")[0] for name in found if not timed(name)} == {"kv_bytes_per_token"}


def test_ratios_are_taken_round_by_round_so_that_drift_cancels() -> None:
    drift = [1.0, 1.5, 3.0, 0.7, 2.0]
    rows = [request(k, "variant", 0.2 * d, 0.05 * d) for k, d in enumerate(drift)]
    m = timings(rows + [request(k, "reference", 0.4 * d, 0.1 * d) for k, d in enumerate(drift)])
    assert m["speed_ratio"]["value"] == pytest.approx(2.0) and m["speed_ratio"]["high"] == pytest.approx(2.0)
    assert m["ttft_ms"]["value"] == pytest.approx(200 * np.mean(drift))
    assert m["ttft_ms"]["low"] < m["ttft_ms"]["value"] < m["ttft_ms"]["high"]


def test_drift_of_the_machine_is_detected_and_a_warning() -> None:
    wobble = [0.001, -0.002, 0.0015, -0.001, 0.0005]
    m = timings(FIVE + [request(k, "reference", 0.4, 0.1 * 1.03**k * (1 + w)) for k, w in enumerate(wobble)])
    line = stats.linregress(range(5), np.log([0.1 * 1.03**k * (1 + w) for k, w in enumerate(wobble)]))
    assert m["reference_drift"]["value"] == pytest.approx(np.expm1(line.slope)) and m["reference_drift"]["low"] > 0
    assert m["reference_drift"]["high"] == pytest.approx(np.expm1(line.slope + stats.t.ppf(0.975, 3) * line.stderr))
    assert any("drifted" in w and "+3" in w for w in m["speed_ratio"]["warnings"])
    steady = [request(k, "reference", 0.4, 0.1 * (1 + w)) for k, w in enumerate(wobble)] + FIVE
    assert timings(steady)["speed_ratio"]["warnings"] == []


def test_two_planned_looks_widen_the_ratio_as_bonferroni_says() -> None:
    one = timings(PAIRED)["speed_ratio"]
    two = timings(PAIRED, looks={"planned": 2, "taken": 1, "bounds": [0.9]})["speed_ratio"]
    width = [np.log(m["high"] / m["low"]) for m in (one, two)]
    assert width[1] / width[0] == pytest.approx(stats.t.ppf(1 - 0.0125, 4) / stats.t.ppf(1 - 0.025, 4))
    assert "2 planned looks" in two["method"] and two["value"] == one["value"]


def test_warmups_and_failures_are_out_of_the_rates_but_counted() -> None:
    failed = request(4, "variant", 0, 0, ok=False, error="reset", t_tokens=[])
    m = timings([*FIVE[:4], request(9, "variant", 9.0, 9.0, warmup=True), failed])
    assert m["failure_rate"]["value"] == pytest.approx(1 / 5) and m["tpot_ms"]["value"] == pytest.approx(50)
    assert m["decode_tok_s"]["n"] == 4
    alone = timings([failed])
    assert alone["failure_rate"]["value"] == 1 and "decode_tok_s" not in alone


def test_one_token_has_no_tpot_and_none_has_no_ttft() -> None:
    assert tpot([1.0]) is None and ttft(0.0, []) is None


def test_the_cold_first_request_stands_by_itself() -> None:
    m = timings([request(None, "variant", 3.0, 0.05, warmup=True, cold=True), *FIVE])
    assert m["ttft_cold_ms"]["value"] == pytest.approx(3000) and m["ttft_ms"]["value"] == pytest.approx(200)
    failed = request(None, "variant", 3.0, 0.05, warmup=True, cold=True, ok=False, t_tokens=[], error="x")
    assert timings([failed, *FIVE])["ttft_cold_ms"]["value"] is None


def test_phases_are_metrics_of_their_own_and_what_is_unknown_says_why() -> None:
    m = timings(FIVE)
    assert m["phase_ms/prefill"]["value"] == pytest.approx(180) and m["phase_ms/decode"]["value"] == pytest.approx(40)
    assert m["phase_ms/sampling"]["value"] == pytest.approx(5) and m["phase_ms/tokenize"]["value"] == pytest.approx(1)
    blind = FIVE[0]["phases"] | {"sampling": None}
    m = timings([r | {"phases": blind, "phases_unknown": {"sampling": "one call does both"}} for r in FIVE])
    assert m["phase_ms/sampling"]["value"] is None and m["phase_ms/sampling"]["warnings"] == ["one call does both"]


def test_p99_of_few_gaps_carries_a_warning() -> None:
    assert any("few" in w for w in timings(FIVE)["itl_p99_ms"]["warnings"])


def test_cache_bytes_are_a_slope_over_contexts_so_that_a_constant_does_not_count() -> None:
    more = [request(0, "variant", 0.2, 0.05, scenario=f"context-{n}", cache_tokens=n, cache_bytes=500 + 10 * n) for n in (50, 400)]
    rows = [r | {"cache_bytes": 500 + 10 * 104} for r in FIVE] + more
    kv = timings(rows)["kv_bytes_per_token"]
    assert kv["value"] == pytest.approx(10) and kv["warnings"] == [] and "3 lengths, 50 to 400" in kv["method"]


@pytest.mark.parametrize("element, warned", [(2.5, False), (2.4, False), (2.0, True), (3.0, True)])
def test_a_cache_that_is_not_what_the_config_says_is_a_warning(element: float, warned: bool) -> None:
    kv = timings([r | {"cache_element_bytes": element} for r in FIVE])["kv_bytes_per_token"]  # by the config: 4 x element
    assert kv["value"] == 10 and bool(kv["warnings"]) == warned


def test_an_engine_that_does_not_say_its_cache_has_no_mbu_and_a_reason() -> None:
    b = built([r | {"cache_bytes": None, "cache_tokens": None, "kv_bytes_per_token": None} for r in FIVE])
    assert b.metrics["kv_bytes_per_token"]["value"] is b.metrics["mbu"]["value"] is None
    assert "does not say" in b.metrics["mbu"]["warnings"][0] and "keys and values not counted" in b.bounds["decode"]


def test_memory_of_a_gpu_is_allocated_reserved_and_in_use() -> None:
    rows = [r | {"cuda_memory": {"allocated": 10 + k, "reserved": 20, "nvml": None}} for k, r in enumerate(FIVE)]
    load = meta()["loads"]["variant"] | {"load_cuda_memory": {"allocated": 7, "reserved": 8, "nvml": None}}
    m = timings(rows, loads={"variant": load, "reference": load})
    assert m["cuda_allocated_bytes/load"]["value"] == 7 and m["nvml_used_bytes/load"]["value"] is None
    assert m["cuda_allocated_bytes"]["value"] == 14 and m["cuda_reserved_bytes"]["value"] == 20
    assert m["nvml_used_bytes"]["value"] is None and "NVML" in m["nvml_used_bytes"]["warnings"][0]
    assert "cuda_allocated_bytes" not in timings(FIVE)


def swept(scenario: str, prompt: int, first: float, step: float, **more: Any) -> list[Any]:
    return [request(k, "variant", first * (1 + k / 100), step, scenario=scenario, prompt_tokens=prompt, **more) for k in range(2)]


def test_sweeps_are_parts_and_leave_the_paired_metrics_alone() -> None:
    rows = [*PAIRED, *swept("context-256", 248, 0.248, 0.05), *swept("batch-4", 64, 0.3, 0.08, batch=4)]
    m, plain = timings(rows), timings(PAIRED)
    alone = {k: v for k, v in m.items() if "-" not in k.partition("/")[2]}
    assert alone.pop("kv_bytes_per_token")["n"] == 9 and plain.pop("kv_bytes_per_token")["n"] == 5
    assert alone == plain
    assert m["decode_tok_s/batch-4"]["value"] == pytest.approx(4 / 0.08), "all sequences together"
    assert m["ttft_ms/context-256"]["n"] == 2 and m["ttft_ms/context-256"]["value"] == pytest.approx(249.24)
    assert m["prefill_tok_s/context-256"]["low"] < 1000 < m["prefill_tok_s/context-256"]["high"]


@pytest.mark.parametrize("growth, cliffs", [(1.9, 0), (2.1, 1)])
def test_a_cliff_in_the_cost_of_a_token_is_named(growth: float, cliffs: int) -> None:
    rows = [*PAIRED, *swept("context-1024", 1016, growth * 1.016, 0.05), *swept("context-256", 248, 0.248, 0.05)]
    b = built(rows)
    assert len(b.bounds["cliffs"]) == cliffs == sum("cliff" in w for w in b.metrics["ttft_ms/context-1024"]["warnings"])
    assert not cliffs or "2.1 times from context-256 to context-1024" in b.bounds["cliffs"][0]
    assert "cliff" not in str(b.metrics["tpot_ms/context-1024"]["warnings"])


@pytest.mark.parametrize("repeats, spread, settled", [(2, 0.001, True), (2, 0.1, False), (1, 0.0, False)])
def test_a_cliff_says_of_how_many_requests_and_whether_that_settles_it(repeats: int, spread: float, settled: bool) -> None:
    sweeps = [  # 12.7 times half their distance is a t interval's reach; one has none
        request(k, "variant", first * (1 + k * spread), 0.05, scenario=f"context-{prompt + 8}", prompt_tokens=prompt)
        for prompt, first in ((1016, 2.5 * 1.016), (248, 0.248)) for k in range(repeats)
    ]  # fmt: skip
    (cliff,) = built([*PAIRED, *sweeps]).bounds["cliffs"]
    assert "2.5 times from context-256 to context-1024" in cliff and f"n = {repeats} and {repeats}" in cliff
    assert ("not settled" in cliff) is not settled


def test_one_disturbed_repetition_is_no_cliff_and_no_time_is_below_zero() -> None:
    disturbed = swept("context-1024", 1016, 1.016, 0.05)
    disturbed[1] = request(1, "variant", 5.0, 0.5, scenario="context-1024", prompt_tokens=1016)
    b = built([*PAIRED, *disturbed, *swept("context-256", 248, 0.248, 0.05)])
    assert b.bounds["cliffs"] == [] and b.metrics["ttft_ms/context-1024"]["low"] == 0


def test_what_a_sweep_lacks_is_null_with_its_reason() -> None:
    sweep = {"notes": {"context-1000": "4096 tokens were asked for"}, "missing": {"prefix-warm": "keeps no prefix"}}
    broken = request(0, "variant", 0, 0, scenario="batch-8", ok=False, t_tokens=[], error="MemoryError: no room")
    m = timings([*PAIRED, *swept("context-1000", 992, 1.0, 0.05), broken], sweep=sweep)
    assert m["ttft_ms/prefix-warm"]["value"] is None and m["ttft_ms/prefix-warm"]["warnings"] == ["keeps no prefix"]
    assert m["decode_tok_s/batch-8"]["value"] is None and "MemoryError" in m["decode_tok_s/batch-8"]["warnings"][0]
    assert "4096" in m["tpot_ms/context-1000"]["warnings"][0]


def test_shares_of_a_rate_are_what_is_needed_over_time_and_rate() -> None:
    """1360 weights multiply every prompt token, 640 of the head the last one only."""
    m = timings(FIVE)
    assert m["mbu"]["value"] == pytest.approx((1000 + 10 * 102.5) / 0.05 / 1e6)
    assert m["mfu"]["value"] == pytest.approx(2 * (1360 * 100 + 640) / 0.2 / 1e7)
    assert m["mbu/prefill"]["value"] == pytest.approx(1000 / 0.2 / 1e6)
    assert m["mfu/decode"]["value"] == pytest.approx(2 * (1360 + 640) / 0.05 / 1e7)


def test_a_share_above_all_of_a_rate_is_no_share_and_binds_nothing() -> None:
    b = built(FIVE, rates={"device": "cpu", "read": 1e6, "copy": 1e6, "matrix": {"float32": 1e6}})
    assert b.metrics["mfu"]["value"] > 1 and "more than all of it" in b.metrics["mfu"]["warnings"][-1]
    assert b.bounds["prefill"].startswith("what bounds prefill is not known (its own products are faster")


def test_experts_that_take_turns_have_neither_and_a_reason() -> None:
    models = {who: m | {"shape": m["shape"] | {"experts": 8}} for who, m in meta()["models"].items()}
    b = built(PAIRED, models=models)
    assert b.metrics["mfu"]["value"] is b.metrics["mbu"]["value"] is None
    assert "experts take turns" in b.metrics["mbu"]["warnings"][0] and "not known (experts" in b.bounds["decode"]


@pytest.mark.parametrize("rates, why", [
    ({"device": "mixed", "read": None, "copy": None, "matrix": {"float32": None}}, "rates of its device were not measured"),
    ({"device": "cpu", "read": 1e6, "copy": 1e6, "matrix": {"float32": None}}, "no product in float32 could be timed"),
])  # fmt: skip
def test_a_rate_that_could_not_be_measured_says_so(rates: dict[str, Any], why: str) -> None:
    load = meta()["loads"]["variant"] | {"device": rates["device"]}
    b = built(PAIRED, rates=rates, loads={"variant": load, "reference": load})
    assert b.metrics["mfu"]["value"] is None and why in b.metrics["mfu"]["warnings"][0]
    assert "is not known" in b.bounds["prefill"] and why in b.bounds["prefill"]


def test_the_bounds_say_why_a_variant_is_faster() -> None:
    b = built(PAIRED)
    decode = "decode is overhead-bound: it takes 52 ms a token, reads 0.00202 MB, 4 % of the 0.001 GB/s"
    assert b.bounds["decode"].startswith(decode)
    assert b.bounds["against"].startswith("int4 is faster than bf16 here: its decode rate is 1.9")
    assert "instead of 0.00502, which alone would make it 2.48 times as fast" in b.bounds["against"]
    prefill = "int4 is faster than bf16 here: its prefill rate is 2.00 times as high (200 ms for"
    assert b.bounds["against_prefill"].startswith(prefill)
    assert "memory read 0.001 GB/s and copied 0.001 GB/s; products 0.01 GFLOP/s in float32" in b.bounds["rates"]
    alone = built(PAIRED, model="r").bounds
    assert "against" not in alone and "against_prefill" not in alone, "the reference is not compared with itself"
