"""A project in a folder of its own as far as a gate looks: params, results that dvc.lock vouches for, a ledger, git commits."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from pipeline import gate
from pipeline.core import artifacts, params
from pipeline.figures.answer_figures import answer_metrics, pair
from pipeline.figures.builder import Builder
from pipeline.figures.token_figures import token_metrics
from pipeline.judging import ledger, locked, stale

EVIDENCE = {
    "of": "int8", "n": 100, "value": 0.0, "low": 0.0, "high": 0.0, "unit": "x", "noise": 0.0, "date": "2026-11-30",
    "figures": "first",
}  # fmt: skip
DOCUMENTS, EACH, ITEMS = 40, 25, 300


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def lock(settings: params.Params, *also: Path) -> None:
    """Write dvc.lock as a run of the pipeline would: results and whatever else is here are what their stages wrote."""
    if not params.PARAMS.exists():  # read beside dvc.lock: what was measured with other params is stale
        shutil.copy(Path(__file__).parent.parent / params.PARAMS, params.PARAMS)
    files = [artifacts.metrics(n) for n in settings.variants] + [artifacts.FLOOR, *also]
    outs = [{"path": f.as_posix(), "hash": "md5", "md5": md5(f)} for f in files if f.exists()]
    stages = {"compare": {"cmd": "python -m pipeline.compare", "outs": outs}}
    artifacts.write_text(locked.LOCK, yaml.safe_dump({"schema": "2.0", "stages": stages}))


def keep_ledger(settings: params.Params) -> None:
    """Write a ledger with the rules as they are now."""
    rules = [{"rule": r.model_dump(exclude_defaults=True), "reason": None, "evidence": [EVIDENCE]} for r in settings.gate.rules]
    policy = {"required": settings.gate.required, "inconclusive": settings.gate.inconclusive, "reason": None}
    policy |= {"confidence": settings.compare.confidence, "reference": settings.reference}
    policy |= {"between_runs": settings.compare.between_runs.model_dump()}
    ledger.write({"policy": ledger.sealed(policy), "rules": [ledger.sealed(r) for r in rules]})


def vouch(settings: params.Params) -> None:
    """Lock and ledger for what is here now."""
    lock(settings)
    keep_ledger(settings)


def judge(settings: params.Params) -> dict[str, Any]:
    """What the stage writes."""
    found = gate.judged(settings) | {"inputs": stale.inputs(settings)}
    artifacts.write_json(artifacts.GATE, found)
    return found


# --- rows, and commits of them -----------------------------------------------------------------------------------


def token_rows(loss: float, *, documents: int = DOCUMENTS) -> dict[str, Any]:
    """Columns of artifacts/tokens of a variant whose mean KLD is about `loss` nats; the same tokens whatever the loss."""
    rng, most, n = np.random.default_rng(5), 100 * EACH, documents * EACH
    hard, likely, ids = rng.gamma(2, 0.5, most)[:n], rng.gamma(2, 1, most)[:n], rng.integers(0, 400, most)[:n]
    kld, logp_ref, top1_ref = loss * hard, -likely, ids  # hard: how easily a token is disturbed, the same in every variant
    return {
        "set": ["news"] * n, "document": [f"d{k // EACH}" for k in range(n)], "window": [f"d{k // EACH}#0" for k in range(n)],
        "token_class": ["words"] * n, "position": [k % EACH + 1 for k in range(n)], "token_id": top1_ref.tolist(),
        "kld": kld.tolist(), "kld_reverse": kld.tolist(), "jsd": (kld / 4).tolist(), "logp_ref": logp_ref.tolist(),
        "logp": (logp_ref - loss * hard / 4).tolist(), "entropy_ref": [1.0] * n, "top1_ref": top1_ref.tolist(),
        "top1": np.where(kld > 0.5, top1_ref + 1, top1_ref).tolist(), "top5_overlap": [5] * n,
    }  # fmt: skip


def answer_rows(wrong: int, *, items: int = ITEMS) -> list[dict[str, Any]]:
    """Answers of a variant that gets the first `wrong` items wrong."""
    return [
        {
            "task": "facts", "doc_id": k, "filter": "none", "doc_hash": f"h{k}", "prompt_hash": f"p{k}", "target_hash": "t",
            "first_token_ids": [1], "kind": "multiple_choice", "target": 0, "cluster": f"c{k}", "truncated": False, "empty": False,
            "acc": float(k >= wrong), "loglikelihoods": [-1.0, -2.0],
        }
        for k in range(items)
    ]  # fmt: skip


def make(settings: params.Params, variant: str, loss: float, wrong: int, **sizes: int) -> None:
    """Rows and results of a variant, in place, and in DVC's cache."""
    tokens = {k: v for k, v in sizes.items() if k == "documents"}
    items = {k: v for k, v in sizes.items() if k == "items"}
    artifacts.tokens(variant).parent.mkdir(parents=True, exist_ok=True)
    columns, rows = token_rows(loss, **tokens), answer_rows(wrong, **items)
    pq.write_table(pa.table(columns), artifacts.tokens(variant))
    artifacts.write_jsonl(artifacts.answers(variant), rows)
    b = Builder(settings.compare, settings.seed)
    token_metrics(b, columns)
    answer_metrics(b, pair(rows, answer_rows(20, **items)), False)
    v = settings.variants[variant]
    files = (artifacts.tokens(variant), artifacts.answers(variant))
    for file in files:
        kept = locked.CACHE / md5(file)[:2] / md5(file)[2:]
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, kept)
    artifacts.write_json(artifacts.metrics(variant), {
        "status": "ok", "reason": None, "metrics": b.metrics, "inputs": {str(f): artifacts.sha256_file(f) for f in files},
        "reference": settings.reference, "quantizer": v.quantizer, "engine": v.engine, "asked": v.options, "base": "b",
        "engine_options": v.engine_options, "model": f"{variant} {loss}", "machine": {"cpu": "c"},
    })  # fmt: skip


def rows_of(settings: params.Params) -> list[Path]:
    made = (artifacts.tokens, artifacts.answers, artifacts.served)
    return [f(n) for n in settings.variants for f in made if f(n).exists()]


def git(*words: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *identity, *words], check=True, capture_output=True, text=True).stdout.strip()


def commit(message: str) -> str:
    git("add", "-A")
    git("commit", "--quiet", "--allow-empty", "--message", message)
    return git("rev-parse", "HEAD")


def finish(settings: params.Params, message: str) -> str:
    """Lock, judge and commit what is here."""
    lock(settings, *rows_of(settings))
    judge(settings)
    return commit(message)
