"""Results as the stages write them, in memory, for tests of what is said of them: what a variant is, and nothing measured."""

from __future__ import annotations

from typing import Any

MACHINE = {
    "cpu": "A CPU", "cores": 2, "threads": 2, "memory_bytes": 2**34, "system": "Linux x86_64", "python": "3.11.7", "gpu": None,
    "cpu_capability": "AVX2",
}  # fmt: skip
BITS = {"bf16": 16, "int8": 8, "int8-slow": 8, "int4": 4, "int4-fast": 4}


def metric(
    value: float | None, low: float | None = None, high: float | None = None, n: int = 100, unit: str = ""
) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "n": n, "unit": unit, "method": "", "warnings": []}


def around(value: float, share: float = 0.02, **more: Any) -> dict[str, Any]:
    """A figure whose interval reaches a share of it to both sides."""
    return metric(value, value * (1 - share), value * (1 + share), **more)


def result(name: str, speed: float, kld: float, size: float, **more: Any) -> dict[str, Any]:
    """A variant's metrics file with so much of it as the report's words need."""
    metrics = {
        "speed_ratio": around(speed, n=5), "kld_mean": around(kld) if kld else metric(0.0, 0.0, 0.0),
        "weight_bytes": metric(size * 1e6, size * 1e6, size * 1e6, n=1), "decode_tok_s": around(20 * speed, n=5),
        "top1_agreement": around(0.95), "acc_delta/all": metric(-0.5, -1.0, 0.1), "bits_per_weight": metric(BITS.get(name, 4)),
    }  # fmt: skip
    bits = BITS.get(name, 4)
    options = {"dtype": "bfloat16"} if bits == 16 else {"bits": bits, "group_size": 64}
    return {
        "variant": name, "reference": "bf16", "status": "ok", "reason": None, "quantizer": "rtn", "asked": options,
        "options": options, "engine": "hf", "engine_options": {}, "model": name[0] * 64, "base": "b" * 64, "machine": MACHINE,
        "versions": {"torch": "2.13.0"}, "inputs": {}, "metrics": metrics, "curves": {},
    } | more  # fmt: skip


def rule(name: str, verdict: str, **more: Any) -> dict[str, Any]:
    """A judged rule as in gate.json."""
    return {
        "metric": name, "bound": "margin", "threshold": 0.02, "better": "lower", "unit": "nats", "required": True,
        "verdict": verdict, "reason": f"{name} says {verdict}", "settle": None, "value": 0.1, "low": 0.09, "high": 0.11, "n": 4914,
        "clusters": 27,
    } | more  # fmt: skip


def judged(verdict: str, *rules: dict[str, Any], required: bool = True, reason: str = "because") -> dict[str, Any]:
    """A judged variant as in gate.json."""
    return {"verdict": verdict, "reason": reason, "required": required, "rules": list(rules), "family": {}}


def verdicts(**variants: dict[str, Any]) -> dict[str, Any]:
    """gate.json; names with `_` for `-`."""
    return {"verdict": "PASS", "inputs": {}, "variants": {n.replace("_", "-"): v for n, v in variants.items()}}
