"""Do two processors agree? Quality is measured here, and again by processes that take this processor for an older one.

    python tests/bench/processors.py [VARIANT ...]             after `make repro`; int8, int4-rtn, gguf-q4_0

Store, floor, divergences, replies and answers are made anew with and without PRETENDED; models and timings are this project's.
Prints each figure that has an interval twice, and each verdict by this project's rules; exit 1 where fewer than 95 % of the
intervals overlap or a verdict differs. Without AVX-512, products in bf16 take ten times as long, and sums depend so much on the
number of rows that `takes_forests` leaves tasks to lm-eval's own class: hence small amounts, and both at once, a thread each.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import yaml

from pipeline.core import artifacts, params
from pipeline.gating import verdicts
from pipeline.gating.paired_difference import timed
from pipeline.metrics.definitions import DEFINITIONS
from pipeline.reporting import text
from tools import machines

ROOT = Path(__file__).resolve().parent.parent.parent
PRETENDED = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
AMOUNT: dict[str, Any] = {
    "tasks": {"facts": 24, "grammar": 40, "arithmetic_copy": 6, "prose_ppl": 1},
    "documents": 3,
    "trajectories": 4,
    "floor": {"tokens": 300, "stepwise": 16},
}


def project(work: Path, chosen: list[str]) -> None:
    """A project of the reference and the chosen variants, in which only their models and timings are there."""
    data = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    data |= {"tier": "smoke", "threads": 1, "serving": {"variants": {}}}
    data["tiers"]["smoke"] |= AMOUNT
    data["variants"] = {name: data["variants"][name] for name in (data["reference"], *chosen)}
    data["gate"] |= {"required": chosen}
    (work / "params.yaml").write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    (work / "evalsets").symlink_to(ROOT / "evalsets")
    for folder in (artifacts.BASE, artifacts.model_dir(""), artifacts.timings("").parent):
        shutil.copytree((ROOT / folder).resolve(), work / folder, copy_function=os.symlink)


def measured(chosen: list[str], environment: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """({variant: its results}, the gate's judgement of them)."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        project(work, chosen)
        settings = params.load(work / "params.yaml")
        each = [[f"pipeline.{verb}", name] for verb in ("diverge", "evaluate", "compare") for name in settings.variants]
        for stage in (["pipeline.reference"], ["pipeline.floor"], *each):
            env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
            subprocess.run([sys.executable, "-m", *stage], cwd=work, env=env, check=True)
        results = {name: artifacts.read_json(work / artifacts.metrics(name)) for name in settings.variants}
        return results, verdicts.of(results, settings)


def compared(name: str, here: dict[str, Any], there: dict[str, Any]) -> list[str]:
    """Print a variant's figures; how each pair compares, where either has an interval and no clock made it."""
    said = []
    for metric in here["metrics"] | there["metrics"]:
        pair = [side["metrics"].get(metric) for side in (here, there)]
        if timed(metric) or all(m is None or m["low"] == m["high"] for m in pair):
            continue
        said.append(machines.compared(*pair))
        unit = {"unit": DEFINITIONS[metric.split("/")[0]].unit}
        print(f"| {name} | {metric} | {' | '.join(text.with_unit(m and m | unit) for m in pair)} | {said[-1]} |")
    return said


def main(chosen: list[str]) -> int:
    with ThreadPoolExecutor() as both:
        (here, judged), (there, judged_there) = both.map(measured, [chosen] * 2, ({}, PRETENDED))
    print("| variant | metric | here | pretended | intervals |", "|---|---|---|---|---|", sep="\n")
    said = Counter(one for name in here for one in compared(name, here[name], there[name]))
    same = True
    for name, one in judged["variants"].items():
        other = judged_there["variants"][name]
        same &= one["verdict"] == other["verdict"]
        print(f"{name}: {one['verdict']} and {other['verdict']}")
        for ours, theirs in zip(one["rules"], other["rules"]):
            print(f"  {ours['metric']}: {ours['verdict']} and {theirs['verdict']}")
    held = (said["equal"] + said["overlap"]) / said.total()
    print(f"{100 * held:.1f} % of {said.total()} intervals overlap {dict(said)}; {'the same' if same else 'other'} verdicts")
    return int(not same or held < 0.95)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["int8", "int4-rtn", "gguf-q4_0"]))
