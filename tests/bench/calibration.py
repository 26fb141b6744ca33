"""Which calibration text makes a better int4: own text or the model's own samples, on domains seen and unseen.

    python tests/bench/calibration.py [WORK_FOLDER]      -> reports/calibration.json

Each run calibrates GPTQ (the params' int4-gptq) in its own way and measures the divergence to the reference on the whole
corpus. "prose only" leaves code, data, mathematics and Chinese out of the calibration: those domains are then held out.
About three minutes a run on 2 cores; nothing is timed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import harness
import numpy as np

from pipeline.core import artifacts, params
from pipeline.evalset import sets_digest
from pipeline.metrics.builder import Builder

VARIANT = "int4-gptq"
PROSE = ("narrative", "dialogue", "news", "technical")
ROWS = 20  # as many as the smallest of these texts fills: no run has more than another
RUNS = {  # name: source of the text, and the domains it is taken from
    "text, all domains": ("text", None),
    "self, openings of all domains": ("self", None),
    "text, prose only": ("text", PROSE),
    "self, openings of prose only": ("self", PROSE),
}


def prepare(work: Path, source: str, domains: tuple[str, ...] | None) -> None:
    """The project at full tier, with only the reference and the one variant."""
    data = harness.settings()
    data |= {"tier": "full", "variants": {k: v for k, v in data["variants"].items() if k in (data["reference"], VARIANT)}}
    data["gate"] |= {"required": [VARIANT]}
    data["calibration"] |= {"source": source, "set": "calibration.jsonl", "rows": ROWS}
    harness.project(work, data, artifacts.BASE)
    rows = artifacts.read_jsonl(harness.ROOT / "evalsets/calibration/own.jsonl")
    artifacts.write_jsonl(work / "calibration.jsonl", (r for r in rows if domains is None or r["domain"] in domains))


def divergence(work: Path) -> dict[str, Any]:
    """KLD over all documents, over prose and over the rest, and by domain."""
    table = artifacts.read_columns(work / artifacts.tokens(VARIANT))
    kld, sets, documents = (np.asarray(table[k]) for k in ("kld", "set", "document"))
    b, texts, prose = Builder(params.Compare(), seed=1), sets != "trajectory", np.isin(sets, PROSE)
    parts = {"all": texts, "prose": prose, "code, data, math, Chinese": ~prose & texts}
    parts |= {str(name): sets == name for name in sorted(set(sets))}
    return {name: asdict(b.resampled(name, kld[part], np.ones(part.sum()), documents[part])) for name, part in parts.items()}


def main(work: Path) -> None:
    report = harness.ROOT / artifacts.REPORTS / "calibration.json"
    digests = {k: v for folder in ("calibration", "corpus") for k, v in sets_digest(harness.ROOT / "evalsets" / folder).items()}
    made_with = {
        "base": artifacts.read_manifest(harness.ROOT / artifacts.BASE)["digest"], "versions": artifacts.versions(),
        "sets": {str(Path(file).relative_to(harness.ROOT)): digest for file, digest in digests.items()},
        "variant": params.load(harness.ROOT / "params.yaml").variants[VARIANT].options,
    }  # fmt: skip
    results: dict[str, Any] = {}
    for name, (source, domains) in RUNS.items():
        prepare(work, source, domains)
        if not (work / artifacts.REFERENCE).exists():
            harness.stage(work, "quantize", "bf16")
            harness.stage(work, "reference")
        harness.stage(work, "calibrate")
        harness.stage(work, "quantize", VARIANT)
        harness.stage(work, "diverge", VARIANT)
        manifest = artifacts.read_manifest(work / artifacts.CALIBRATION)
        results[name] = {"rows": manifest["rows_used"], "tokens_per_row": manifest["tokens_per_row"], "kld": divergence(work)}
        print(name, json.dumps({k: round(v["value"], 4) for k, v in results[name]["kld"].items()}), flush=True)
        artifacts.write_json(report, made_with | {"runs": results})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="quantgate-calibration-")))
