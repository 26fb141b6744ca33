"""Results as the stages write them, invented, for tests of the report's words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml
from gate_house import MACHINE, alone

from pipeline.metrics.definitions import DEFINITIONS

ROOT = Path(__file__).resolve().parent.parent
BITS = {"bf16": 16, "int8": 8, "int8-slow": 8, "int4": 4, "int4-fast": 4}


def metric(
    value: float | None, low: float | None = None, high: float | None = None, n: int = 100, unit: str = ""
) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "n": n, "unit": unit, **alone()}


def around(value: float, share: float = 0.02, **more: Any) -> dict[str, Any]:
    """A metric whose interval is plus or minus a share of its value."""
    return metric(value, value * (1 - share), value * (1 + share), **more)


def result(name: str, speed: float, kld: float, size: float, **more: Any) -> dict[str, Any]:
    """A variant's metrics file, as far as the report's words need it."""
    metrics = {
        "speed_ratio": around(speed, n=5), "kld_mean": around(kld) if kld else metric(0.0, 0.0, 0.0),
        "weight_bytes": metric(size * 1e6, size * 1e6, size * 1e6, n=1), "decode_tok_s": around(20 * speed, n=5),
        "top1_agreement": around(0.95), "acc_delta/all": metric(-0.5, -1.0, 0.1), "bits_per_weight": metric(BITS.get(name, 4)),
    }  # fmt: skip
    for key, m in metrics.items():
        m["unit"] = DEFINITIONS[key.split("/")[0]].unit
    bits = BITS.get(name, 4)
    options = {"dtype": "bfloat16"} if bits == 16 else {"bits": bits, "group_size": 64}
    return {
        "variant": name, "reference": "bf16", "status": "ok", "reason": None, "quantizer": "rtn", "asked": options,
        "options": options, "engine": "hf", "engine_options": {}, "model": name[0] * 64, "base": "b" * 64, "machine": MACHINE,
        "versions": {"torch": "2.13.0"}, "inputs": {}, "metrics": metrics, "curves": {}, "bounds": {}, "kernels": None,
    } | more  # fmt: skip


def rule(name: str, verdict: str, **more: Any) -> dict[str, Any]:
    """A judged rule as in gate.json."""
    return {
        "metric": name, "against": "reference", "bound": "margin 0.02 nats", "threshold": 0.02, "better": "lower", "unit": "nats",
        "required": True, "verdict": verdict, "reason": f"{name} says {verdict}", "settle": None, "value": 0.1, "low": 0.09,
        "high": 0.11, "n": 4914, "neutral": 0.0, "p_fail": None, "p_fail_holm": None, "clusters": None, "between": None,
    } | more  # fmt: skip


def judged(verdict: str, *rules: dict[str, Any], required: bool = True, reason: str = "because") -> dict[str, Any]:
    """A judged variant as in gate.json."""
    family = {"rules": 1, "correction": "Holm 1979", "level": 0.025, "sided": "one"}
    return {"verdict": verdict, "reason": reason, "required": required, "rules": list(rules), "family": family}


def verdicts(**variants: dict[str, Any]) -> dict[str, Any]:
    """gate.json; names with `_` for `-`."""
    return {"verdict": "PASS", "inputs": {}, "variants": {n.replace("_", "-"): v for n, v in variants.items()}}


def broken(name: str) -> dict[str, Any]:
    """artifacts/broke/<variant>.json with one row in each list, of long and odd texts."""
    long = "a_very_long_identifier_without_any_place_to_break_it" * 6
    token = {
        "set": "corpus", "document": "news-001", "window": "news-001", "position": 17, "kld": 3.2, "not_finite": False,
        "context": long, "token": " <b>", "token_id": 1, "reference_says": "\n", "reference_says_id": 2, "variant_says": "x" * 60,
        "variant_says_id": 3, "p_reference": 0.5, "p_variant": 0.1,
    }  # fmt: skip
    answer = {
        "task": "facts", "item": "facts-1", "prompt": long, "unknown": None, "right": "Madrid", "reference_answers": "Madrid",
        "variant_answers": long, "margin_reference": 0.4, "margin_variant": -0.2,
    }  # fmt: skip
    reply = {
        "prompt_id": "p-1", "departs_at": 3, "faults": ["loop"], "reference_faults": [], "prompt": long, "reference_reply": "a",
        "variant_reply": long,
    }  # fmt: skip
    whole = {"clusters": 11, "weight": 9.0, "between": None}
    group = {
        "by": "domain", "group": "news", "mean": metric(0.4) | whole, "rest": metric(0.2, 0.1, 0.3) | whole, "ratio": 2.0,
        "stands_out": False,
    }  # fmt: skip
    rows = {"worst_tokens": token, "worst_items": answer, "flips_to_wrong": answer, "flips_to_right": answer, "replies": reply}
    spread = {
        "kind": "uniform", "settled": True, "n": 1, "worst_share": None, "median_over_mean": 0.5, "groups": [group], "words": "",
    }  # fmt: skip
    return {
        "variant": name, "reference": "bf16", "missing": {}, "notes": [], "words": f"uniform shift of {name}", "spread": spread,
        **{k: {"shown": 1, "total": 1, "of": 1, "by_task": {}, "rows": [row]} for k, row in rows.items()},
    }  # fmt: skip


def reports(folder: Path, keep: tuple[str, ...] = ()) -> Path:
    """Fill a folder with committed results and params, and with what the report reads of artifacts/. keep: only these variants."""
    data = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    have = {f.stem for f in (ROOT / "reports/metrics").glob("*.json")}
    data["variants"] = {k: v for k, v in data["variants"].items() if k in have and (not keep or k in keep)}
    data["serving"]["variants"] = {k: v for k, v in data["serving"]["variants"].items() if k in data["variants"]}
    gate = json.loads((ROOT / "reports/gate.json").read_text(encoding="utf-8"))
    gate["variants"] = {k: v for k, v in gate["variants"].items() if k in data["variants"]}
    made = {"gate.json": gate} | {f"../artifacts/broke/{name}.json": broken(name) for name in data["variants"]}
    made["../artifacts/base/manifest.json"] = {
        "status": "ok", "files": {}, "digest": "b" * 64, "versions": {}, "source": "package", "license": "Apache-2.0",
        "note": "a note", "weights": 1, "trust_remote_code": False, "repairs": [],
    }  # fmt: skip
    for name in ("reports/metrics", "artifacts/base", "artifacts/broke"):
        (folder / name).mkdir(parents=True)
    for name in ("floor.json", *(f"metrics/{v}.json" for v in data["variants"])):
        shutil.copy(ROOT / "reports" / name, folder / "reports" / name)
    for name, value in made.items():
        (folder / "reports" / name).write_text(json.dumps(value), encoding="utf-8")
    (folder / "params.yaml").write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    (folder / "evalsets").symlink_to(ROOT / "evalsets")
    return folder
