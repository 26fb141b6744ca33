"""Do two processors agree? Answers given here, and once more by processes that take this processor for an older one.

    python tests/bench/processors.py [TIER [VARIANT ...]]      after `make repro`; default: smoke, and what the gate requires

Only answers are given anew, with and without PRETENDED: divergences repeat to a percent between processors. Prints each rule's
two verdicts and how many of the answers' figures overlap; exit 1 where fewer than 95 % do or a variant has another verdict.
Half a minute a variant at tier smoke, on processors that compute 16-bit products; nothing is timed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import yaml

from pipeline.check import BY_TASK
from pipeline.core import artifacts, params
from pipeline.gating import verdicts

ROOT = Path(__file__).resolve().parent.parent.parent
PRETENDED = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
KEPT = ("base", "generations", "models", "reference", "timings", "tokens")


def project(work: Path, tier: str, chosen: list[str]) -> None:
    """A project of the chosen variants: this one's, without answers."""
    data = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    data |= {"tier": tier, "serving": {"variants": {}}}
    data["variants"] = {k: v for k, v in data["variants"].items() if k in (data["reference"], *chosen)}
    data["gate"] |= {"required": chosen}
    (work / "params.yaml").write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    (work / "evalsets").symlink_to(ROOT / "evalsets")
    (work / artifacts.REPORTS).mkdir()
    shutil.copy(artifacts.FLOOR, work / artifacts.FLOOR)
    for name in KEPT:
        shutil.copytree(artifacts.ARTIFACTS.resolve() / name, work / artifacts.ARTIFACTS / name, copy_function=os.symlink)


def measured(work: Path, environment: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """({variant: its results}, the gate's judgement of them)."""

    def stage(*arguments: str) -> None:
        env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
        subprocess.run([sys.executable, "-m", *arguments], cwd=work, env=env, check=True)

    back = Path.cwd()
    os.chdir(work)
    try:
        settings = params.load()
        for name in settings.variants:
            stage("pipeline.evaluate", name)
        for name in settings.variants:
            stage("pipeline.compare", name)
        results = {name: artifacts.read_json(artifacts.metrics(name)) for name in settings.variants}
        return results, verdicts.of(results, settings)
    finally:
        os.chdir(back)


def main(tier: str, chosen: list[str]) -> int:
    found = []
    for environment in ({}, PRETENDED):
        with tempfile.TemporaryDirectory() as work:
            project(Path(work), tier, chosen)
            found.append(measured(Path(work), environment))
    (here, judged), (there, judged_there) = found
    held, apart, turned = 0, [], []
    for name, result in here.items():
        for metric, ours in result["metrics"].items():
            theirs = there[name]["metrics"].get(metric) or {}
            if metric.split("/")[0] not in BY_TASK or ours.get("low") is None or theirs.get("low") is None:
                continue
            meet = ours["low"] <= theirs["high"] and theirs["low"] <= ours["high"]
            held += meet
            if not meet:
                apart.append(f"{name} {metric}: {ours['value']:.4g} and {theirs['value']:.4g}")
    for name, one in judged["variants"].items():
        for rule, other in zip(one["rules"], judged_there["variants"][name]["rules"]):
            print(f"{name} {rule['metric']}: {rule['value']} {rule['verdict']} and {other['value']} {other['verdict']}")
        print(f"{name}: {one['verdict']} and {judged_there['variants'][name]['verdict']}")
        turned += [name] * (one["verdict"] != judged_there["variants"][name]["verdict"])
    print(f"{held} of {held + len(apart)} figures of answers overlap", *apart, sep="\n  ")
    return int(bool(turned) or held < 0.95 * (held + len(apart)))


if __name__ == "__main__":
    tier, *names = sys.argv[1:] or ["smoke"]
    sys.exit(main(tier, names or params.load().gate.required))
