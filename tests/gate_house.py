"""What a gate needs of a project, in its own folder: params, results, DVC's files as after a run, git commits."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from pipeline.core import artifacts, params
from pipeline.gating import baseline, freshness, verdicts
from pipeline.metrics.answers import answer_metrics, pair
from pipeline.metrics.builder import Builder
from pipeline.metrics.definitions import definition
from pipeline.metrics.tokens import token_metrics

DOCUMENTS, EACH, ITEMS = 40, 25, 300
MACHINE = {
    "cpu": "c", "cores": 2, "threads": 2, "memory_bytes": 1, "system": "s", "python": "3", "gpu": None, "llamacpp": None,
    "cpu_capability": "AVX2",
}  # fmt: skip
OTHERS = ("pipeline/protocol.yaml", "pipeline/engines/hf.py")  # what a stage that measures depends on, where a test has it


def alone() -> dict[str, Any]:
    """What a metric has besides value, interval, n and unit, if its units are independent and it has no warnings."""
    return {"method": "", "clusters": None, "weight": None, "between": None, "warnings": [], "confidence": 0.95}


def builder(resamples: int = 200) -> Builder:
    return Builder(params.Compare(resamples=resamples), seed=1)


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def lock(settings: params.Params) -> None:
    """Write dvc.yaml and dvc.lock as if DVC had made rows, metrics and verdict here in three stages."""
    artifacts.write_text(Path(".dvc/config"), "[core]\n    no_scm = true\n")
    folders = [artifacts.ARTIFACTS / kind for kind in ("answers", "base", "models", "serving", "tokens")]
    rows = [p for folder in folders for p in folder.rglob("*") if p.is_file()]
    results = [f(n) for n in settings.variants for f in (artifacts.metrics, artifacts.served)] + [artifacts.FLOOR]
    read = {"measure": map(Path, OTHERS), "compare": rows, "gate": results}
    wrote = {"measure": rows, "compare": results, "gate": [artifacts.GATE]}
    data = yaml.safe_load(params.PARAMS.read_text(encoding="utf-8"))
    stages: dict[str, Any] = {}
    locks: dict[str, Any] = {}
    for name in read:
        deps, outs = (sorted({p.as_posix() for p in own if p.exists()}) for own in (read[name], wrote[name]))
        sections = ["seed", "variants"] if name == "measure" else [] if name == "compare" else ["compare", "gate", "reference"]
        stages[name] = {"cmd": name, "deps": deps, "params": sections}
        stages[name]["outs"] = outs if name == "measure" else [{path: {"cache": False}} for path in outs]
        hashes = {
            key: [{"path": p, "hash": "md5", "md5": md5(Path(p))} for p in own] for key, own in (("deps", deps), ("outs", outs))
        }
        locks[name] = {"cmd": name, **hashes, "params": {"params.yaml": {s: data[s] for s in sections if s in data}}}
    artifacts.write_text(Path("dvc.yaml"), json.dumps({"stages": stages}))
    artifacts.write_text(baseline.LOCK, json.dumps({"schema": "2.0", "stages": locks}))


def run(settings: params.Params) -> dict[str, Any]:
    """Judge the results here and lock them, as `dvc repro` does. Returns the verdict."""
    verdict: Any = verdicts.of(verdicts.load_results(settings), settings)
    artifacts.write_json(artifacts.GATE, verdict | {"inputs": freshness.inputs(settings)})
    lock(settings)
    return verdict


def metric(value: float | None, low: float | None, high: float | None, n: int = 100, **more: Any) -> Any:
    return {"value": value, "low": low, "high": high, "n": n, **alone(), **more}


def result(settings: params.Params, variant: str, metrics: dict[str, Any], **more: Any) -> Any:
    """A variant's results as `compare` writes them with these params."""
    v = settings.variants[variant]
    with_units = {name: {"unit": what.unit, **alone()} | m for name, m in metrics.items() if (what := definition(name))}
    return {
        "status": "ok", "reason": None, "metrics": metrics | with_units, "inputs": {}, "reference": settings.reference,
        "variant": variant, "quantizer": v.quantizer, "engine": v.engine, "asked": v.options, "options": v.options,
        "engine_options": v.engine_options, "model": "m", "base": "b", "machine": None, "kernels": None, "versions": {},
        "curves": {}, "bounds": {},
    } | more  # fmt: skip


def write_manifest(folder: Path, **fields: Any) -> None:
    """Write the manifest of a base or a model, with the files that are there."""
    artifacts.write_json(folder / artifacts.MANIFEST, {
        "status": "ok", "reason": None, "files": artifacts.files_of(folder), "digest": "d", "versions": {}, "source": "path",
        "note": None, "weights": 1, "trust_remote_code": False, "variant": folder.name, "quantizer": "q", "engine": "e",
        "base": "b", "seed": 1, "asked": {}, "options": {}, "engine_options": {},
    } | fields)  # fmt: skip


def write_metrics(settings: params.Params, variant: str, metrics: dict[str, Any], **more: Any) -> None:
    artifacts.write_json(artifacts.metrics(variant), result(settings, variant, metrics, **more))


def token_rows(loss: float, *, documents: int = DOCUMENTS) -> dict[str, Any]:
    """Columns of artifacts/tokens of a variant with a mean KLD of about `loss` nats; all have the same tokens."""
    rng, most, n = np.random.default_rng(5), 100 * EACH, documents * EACH
    hard, likely, ids = rng.gamma(2, 0.5, most)[:n], rng.gamma(2, 1, most)[:n], rng.integers(0, 400, most)[:n]
    kld, logp_ref, top1_ref = loss * hard, -likely, ids  # hard: how easily a token is disturbed, the same in every variant
    return {
        "set": ["news"] * n, "document": [f"d{k // EACH}" for k in range(n)], "window": [f"d{k // EACH}#0" for k in range(n)],
        "token_class": ["words"] * n, "position": [k % EACH + 1 for k in range(n)], "token_id": top1_ref.tolist(),
        "kld": kld.tolist(), "kld_reverse": kld.tolist(), "jsd": (kld / 4).tolist(), "tv": np.sqrt(kld / (4 + kld)).tolist(),
        "logp_ref": logp_ref.tolist(),
        "logp": (logp_ref - loss * hard / 4).tolist(), "entropy_ref": [1.0] * n, "top1_ref": top1_ref.tolist(),
        "top1": np.where(kld > 0.5, top1_ref + 1, top1_ref).tolist(), "top5_overlap": [5] * n,
    }  # fmt: skip


def answer_rows(wrong: int, *, items: int = ITEMS) -> list[dict[str, Any]]:
    """Answers of a variant that gets the first `wrong` items wrong."""
    return [
        {
            "task": "facts", "doc_id": k, "filter": "none", "doc_hash": f"h{k}", "prompt_hash": f"p{k}", "target_hash": "t",
            "first_token_ids": [1], "kind": "multiple_choice", "target": 0, "cluster": f"c{k}", "truncated": False, "empty": False,
            "acc": float(k >= wrong), "loglikelihoods": [-1.0, -2.0], "item": None, "slice": None, "n_tokens": 1, "prediction": 0,
            "non_finite": 0,
        }
        for k in range(items)
    ]  # fmt: skip


def make(settings: params.Params, variant: str, loss: float, wrong: int, **sizes: int) -> None:
    """Write a variant's rows and results, also into DVC's cache."""
    tokens = {k: v for k, v in sizes.items() if k == "documents"}
    items = {k: v for k, v in sizes.items() if k == "items"}
    artifacts.tokens(variant).parent.mkdir(parents=True, exist_ok=True)
    columns, rows = token_rows(loss, **tokens), answer_rows(wrong, **items)
    pq.write_table(pa.table(columns), artifacts.tokens(variant))
    artifacts.write_jsonl(artifacts.answers(variant), rows)
    b = Builder(settings.compare, settings.seed)
    token_metrics(b, columns)
    answer_metrics(b, pair(rows, answer_rows(20, **items)), False)
    files = (artifacts.tokens(variant), artifacts.answers(variant))
    for file in files:
        kept = baseline.CACHE / md5(file)[:2] / md5(file)[2:]
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, kept)
    inputs = {str(f): artifacts.sha256_file(f) for f in files}
    write_metrics(settings, variant, b.metrics, inputs=inputs, base="b", model=f"{variant} {loss}", machine=MACHINE)


def git(*words: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *identity, *words], check=True, capture_output=True, text=True).stdout.strip()


def commit(message: str) -> str:
    git("add", "-A")
    git("commit", "--quiet", "--allow-empty", "--message", message)
    return git("rev-parse", "HEAD")


def finish(settings: params.Params, message: str) -> str:
    """Judge, lock and commit the results here."""
    run(settings)
    return commit(message)
