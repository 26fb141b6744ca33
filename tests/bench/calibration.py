"""Which calibration text makes a better int4: own text or the model's own samples, on domains seen and unseen.

    python tests/bench/calibration.py [WORK_FOLDER]      -> reports/calibration.json

Each run calibrates GPTQ (the params' int4-gptq) in its own way and measures the divergence to the reference on the whole
corpus. "prose only" leaves code, data, mathematics and Chinese out of the calibration: those domains are then held out.
About three minutes a run on 2 cores; nothing is timed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import yaml

from pipeline.core import artifacts, params
from pipeline.evalset import sets_digest
from pipeline.metrics.builder import Builder

ROOT = Path(__file__).resolve().parent.parent.parent
VARIANT = "int4-gptq"
PROSE = ("narrative", "dialogue", "news", "technical")
ROWS = 20  # as many as the smallest of these texts fills: no run has more than another
RUNS = {  # name: settings of the calibration section, and the domains its text is taken from
    "text, all domains": ({"source": "text"}, None),
    "self, openings of all domains": ({"source": "self"}, None),
    "text, prose only": ({"source": "text"}, PROSE),
    "self, openings of prose only": ({"source": "self"}, PROSE),
}


def stage(work: Path, *arguments: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", *arguments], cwd=work, env=environment, check=True)


def settings_for(work: Path, change: dict[str, Any], domains: tuple[str, ...] | None) -> None:
    """params.yaml of a run: the project's, at full tier, with only the reference and the one variant."""
    data = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    data["tier"] = "full"
    data["variants"] = {k: v for k, v in data["variants"].items() if k in (data["reference"], VARIANT)}
    data["gate"] |= {"required": [VARIANT]}
    rows = artifacts.read_jsonl(ROOT / "evalsets/calibration/own.jsonl")
    artifacts.write_jsonl(work / "calibration.jsonl", (r for r in rows if domains is None or r["domain"] in domains))
    data["calibration"] |= change | {"set": "calibration.jsonl", "rows": ROWS}
    (work / "params.yaml").write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")


def divergence(work: Path) -> dict[str, Any]:
    """KLD over all documents, over prose and over the rest, and by domain."""
    table = pq.read_table(work / artifacts.tokens(VARIANT)).to_pydict()
    kld, sets, documents = (np.asarray(table[k]) for k in ("kld", "set", "document"))
    b = Builder(params.Compare(), seed=1)
    prose = np.isin(sets, PROSE)
    parts = {"all": sets != "trajectory", "prose": prose, "code, data, math, Chinese": ~prose & (sets != "trajectory")}
    parts |= {str(name): sets == name for name in sorted(set(sets))}
    return {name: asdict(b.resampled(name, kld[own], np.ones(own.sum()), documents[own])) for name, own in parts.items()}


def main(work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "evalsets").exists():
        (work / "evalsets").symlink_to(ROOT / "evalsets")
    if not (work / artifacts.BASE).exists():
        shutil.copytree(ROOT / artifacts.BASE, work / artifacts.BASE)
    report = ROOT / artifacts.REPORTS / "calibration.json"
    made_with = {
        "base": artifacts.read_manifest(ROOT / artifacts.BASE)["digest"], "versions": artifacts.versions(),
        "sets": sets_digest(ROOT / "evalsets/calibration") | sets_digest(ROOT / "evalsets/corpus"),
        "variant": params.load(ROOT / "params.yaml").variants[VARIANT].options,
    }  # fmt: skip
    made_with["sets"] = {str(Path(f).relative_to(ROOT)): sha for f, sha in made_with["sets"].items()}
    old = artifacts.read_json(report) if report.exists() else {}
    found: dict[str, Any] = old["runs"] if artifacts.jsonable(made_with) == {k: old.get(k) for k in made_with} else {}
    for name, (change, domains) in RUNS.items():
        if name in found:
            print(f"{name}: already in {report}; delete that file to measure anew")
            continue
        settings_for(work, change, domains)
        if not (work / artifacts.REFERENCE).exists():
            stage(work, "pipeline.quantize", "bf16")
            stage(work, "pipeline.reference")
        for arguments in (("pipeline.calibrate",), ("pipeline.quantize", VARIANT), ("pipeline.diverge", VARIANT)):
            stage(work, *arguments)
        manifest = artifacts.read_manifest(work / artifacts.CALIBRATION)
        found[name] = {"rows": manifest["rows_used"], "tokens_per_row": manifest["tokens_per_row"], "kld": divergence(work)}
        print(name, json.dumps({k: round(v["value"], 4) for k, v in found[name]["kld"].items()}), flush=True)
        artifacts.write_json(report, made_with | {"runs": found})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="quantgate-calibration-")))
