"""Speed in process, all of it: a row a figure, a column a variant, as text. Pure: figures in, rows out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ROWS: dict[str, tuple[str, float]] = {  # label: (metric, scale)
    "load (s)": ("load_s", 1.0),
    "TTFT of the first request after loading (ms)": ("ttft_cold_ms", 1.0),
    "TTFT (ms)": ("ttft_ms", 1.0),
    "TTFT, prefix not seen before (ms)": ("ttft_ms/prefix-cold", 1.0),
    "TTFT, prefix kept (ms)": ("ttft_ms/prefix-warm", 1.0),
    "TPOT (ms)": ("tpot_ms", 1.0),
    "gap between tokens p50 (ms)": ("itl_p50_ms", 1.0),
    "gap between tokens p95 (ms)": ("itl_p95_ms", 1.0),
    "gap between tokens p99 (ms)": ("itl_p99_ms", 1.0),
    "end to end (ms)": ("e2e_ms", 1.0),
    "tokenizing (ms)": ("phase_ms/tokenize", 1.0),
    "prefill pass (ms)": ("phase_ms/prefill", 1.0),
    "decode pass, a token (ms)": ("phase_ms/decode", 1.0),
    "choosing a token (ms)": ("phase_ms/sampling", 1.0),
    "detokenizing (ms)": ("phase_ms/detokenize", 1.0),
    "prefill tok/s": ("prefill_tok_s", 1.0),
    "MFU of prefill (%)": ("mfu", 100.0),
    "MBU of prefill (%)": ("mbu/prefill", 100.0),
    "MBU of decoding (%)": ("mbu", 100.0),
    "MFU of decoding (%)": ("mfu/decode", 100.0),
    "keys and values, a token (bytes)": ("kv_bytes_per_token", 1.0),
    "memory while loading (MB)": ("load_memory_bytes", 1e-6),
    "memory of requests (MB)": ("peak_memory_bytes", 1e-6),
    "reference's time per token, change a round (%)": ("reference_drift", 100.0),
}


def table(results: dict[str, Any], show: Callable[..., str]) -> dict[str, list[str]]:
    """{label: a cell for each variant}; rows that no variant has are left out. show(metric, scale=1): value and interval."""
    found = {}
    for label, (name, scale) in ROWS.items():
        metrics = [r["metrics"].get(name) for r in results.values()]
        if any(m and m["value"] is not None for m in metrics):
            found[label] = [show(m, scale=scale) for m in metrics]
    return found
