"""Do two processors agree? Quality is measured here, and again by processes that take this processor for an older one.

    python tests/bench/processors.py [VARIANT ...]             after `make repro`; int8, int4-rtn, gguf-q4_0

Store, floor, divergences, replies and answers are made anew with and without PRETENDED; models and timings are this project's.
Prints each figure that has an interval twice, and each verdict by this project's rules; exit 1 where fewer than 95 % of the
intervals overlap or a verdict differs. Without AVX-512, products in bf16 take ten times as long, and sums depend so much on the
number of rows that `takes_forests` leaves tasks to lm-eval's own class: hence small amounts, and both at once, a thread each.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness

from pipeline.core import artifacts, params, records
from pipeline.gating import verdicts
from pipeline.metrics.definitions import timed
from pipeline.reporting import text
from tools import machines

PRETENDED = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
AMOUNT: dict[str, Any] = {
    "tasks": {"facts": 24, "grammar": 40, "arithmetic_copy": 6, "prose_ppl": 1}, "documents": 3, "trajectories": 4, "stop": "never",
    "floor": {"tokens": 300, "stepwise": 16},
}  # fmt: skip


def measured(chosen: list[str], environment: dict[str, str]) -> tuple[dict[str, records.VariantResult], records.Verdict]:
    """({variant: its results}, the gate's judgement of them), in a project with this one's models and timings."""
    data = harness.settings()
    names = [data["reference"], *chosen]
    data |= {"tier": "smoke", "threads": 1, "serving": {"variants": {}}, "variants": {n: data["variants"][n] for n in names}}
    data["tiers"]["smoke"] |= AMOUNT
    data["gate"] |= {"required": chosen}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        harness.project(work, data, artifacts.BASE, artifacts.model_dir(""), artifacts.timings("").parent)
        stages = [("reference",), ("floor",), *((verb, n) for verb in ("diverge", "evaluate", "compare") for n in names)]
        for stage in stages:
            harness.stage(work, *stage, **environment)
        results = {name: records.read(work / artifacts.metrics(name), records.VariantResult) for name in names}
        return results, verdicts.of(results, params.load(work / "params.yaml"))


def compared(name: str, here: records.VariantResult, there: records.VariantResult) -> list[str]:
    """Print a variant's figures; how each pair compares, where either has an interval and no clock made it."""
    comparisons = []
    for metric in here["metrics"] | there["metrics"]:
        pair = [side["metrics"].get(metric) for side in (here, there)]
        if timed(metric) or all(m is None or m["low"] == m["high"] for m in pair):
            continue
        comparisons.append(machines.compared(*pair))
        print(harness.row(name, metric, *map(text.with_unit, pair), comparisons[-1]))
    return comparisons


def main(chosen: list[str]) -> int:
    with ThreadPoolExecutor() as both:
        (here, judged), (there, judged_there) = both.map(measured, [chosen] * 2, ({}, PRETENDED))
    print(harness.head("variant", "metric", "here", "pretended", "intervals"))
    counts = Counter(one for name in here for one in compared(name, here[name], there[name]))
    same = True
    for name, one in judged["variants"].items():
        other = judged_there["variants"][name]
        same &= one["verdict"] == other["verdict"]
        print(f"{name}: {one['verdict']} and {other['verdict']}")
        for rule, rule_there in zip(one["rules"], other["rules"]):
            print(f"  {rule['metric']}: {rule['verdict']} and {rule_there['verdict']}")
    share = (counts["equal"] + counts["overlap"]) / counts.total()
    print(f"{100 * share:.1f} % of {counts.total()} intervals overlap {dict(counts)}; {'the same' if same else 'other'} verdicts")
    return int(not same or share < 0.95)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["int8", "int4-rtn", "gguf-q4_0"]))
