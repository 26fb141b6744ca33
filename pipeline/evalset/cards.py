"""What each shipped set measures and how finely: its card, and what a run of the pipeline showed of it (`record`).

reports/evalsets.json keeps the record with the hashes of the sets: a set that has changed since has none, and says so.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pipeline.core import artifacts
from pipeline.core.artifacts import sha256_file
from pipeline.core.droppings import data_files
from pipeline.core.errors import DataError
from pipeline.core.params import Params
from pipeline.evalset import Row, load_prompts, load_texts
from pipeline.evalset.tasks import load_task, local_tasks, task_files
from pipeline.metrics.answers import answer_metrics, pair
from pipeline.metrics.builder import Builder
from pipeline.stats.intervals import POWER, mean_t, resolvable

HOME = Path("evalsets")
WORDS = HOME / "cards.yaml"
MEASURED = artifacts.REPORTS / "evalsets.json"
KINDS = {"corpus": "documents", "prompts": "prompts", "calibration": "documents"}


def cards() -> list[dict[str, Any]]:
    """One card a set, checked on the way: name, n, unit, files with sha256, and the words of cards.yaml."""
    words = yaml.safe_load(WORDS.read_text(encoding="utf-8"))
    result = []
    for name in local_tasks():
        _, rows = load_task(name)
        clusters = len({row.get("cluster") or row["id"] for row in rows})
        unit = "items" if clusters == len(rows) else f"items in {clusters} families"
        result.append(_card(f"tasks/{name}", task_files(name), len(rows), unit, words))
    for kind, unit in KINDS.items():
        load = load_prompts if kind == "prompts" else load_texts
        load(HOME / kind)  # as a whole: an id may not come twice in the folder
        for file in data_files(HOME / kind, "*.jsonl"):
            result.append(_card(f"{kind}/{file.stem}", [file], len(load(file)), unit, words))
    return result


def _card(name: str, files: list[Path], n: int, unit: str, words: dict[str, Any]) -> dict[str, Any]:
    kind = name.split("/")[0]
    described = {"measures": None, "source": None, "weaknesses": None} | words.get(kind, {}) | words.get(name, {})
    return {"set": name, "n": n, "unit": unit, "files": {str(f): sha256_file(f) for f in files}, **described}


def measured() -> dict[str, Any]:
    """What `record` wrote; empty where nothing was recorded."""
    return dict(artifacts.read_json(MEASURED)) if MEASURED.exists() else {}


def figures(card: dict[str, Any], record: dict[str, Any]) -> dict[str, Any] | None:
    """The record of a set, or None if there is none or its files have changed since."""
    entry = record.get("sets", {}).get(card["set"])
    return dict(entry) if entry is not None and entry["files"] == card["files"] else None


def record(settings: Params) -> dict[str, Any]:
    """Measure every set of the present tier from the rows in artifacts/.
    The probe is the first variant that the gate requires: what a set can resolve depends on how many answers it changes. The
    other variants with rows show whether the set tells them from the probe."""
    probe, reference = settings.gate.required[0], settings.reference
    usable = [v for v in settings.variants if v in (probe, reference) or _has_rows(v)]
    others = [v for v in usable if v not in (probe, reference)]
    sets: dict[str, Any] = {}
    for card in cards():
        kind, _, name = card["set"].partition("/")
        if kind == "tasks" and name in settings.amount.tasks:
            _same_files(card, [artifacts.meta_of(artifacts.answers(v)) for v in usable])
            sets[card["set"]] = {"files": card["files"], **_task(name, card["n"], probe, others, settings)}
        elif kind == "corpus":
            _same_files(card, [artifacts.REFERENCE / artifacts.MANIFEST])
            ids = {row["id"] for row in load_texts(HOME / "corpus" / f"{name}.jsonl")}
            sets[card["set"]] = {"files": card["files"], **_corpus(name, ids, probe, others, settings)}
    base = artifacts.read_manifest(artifacts.BASE)
    return {
        "reference": reference, "probe": probe, "confidence": settings.compare.confidence, "power": POWER,
        "seed": settings.seed, "base": base["digest"], "versions": artifacts.versions(),
        "variants": {v: settings.variants[v].model_dump() for v in usable}, "sets": sets,
    }  # fmt: skip


def _has_rows(variant: str) -> bool:
    metas = [artifacts.meta_of(make(variant)) for make in (artifacts.answers, artifacts.tokens)]
    return all(m.exists() and artifacts.read_json(m)["status"] == "ok" for m in metas)


def _same_files(card: dict[str, Any], sources: list[Path]) -> None:
    """Raise if rows were made from other files of a set than are here now."""
    for source in sources:
        then = artifacts.read_json(source)["sets"]
        changed = [f for f, sha in card["files"].items() if then.get(f) != sha]
        if changed:
            raise DataError(f"{source} was made with another {changed[0]}; run the pipeline with `tier: full` first")


def _answers(variant: str, task: str) -> list[Row]:
    return [row for row in artifacts.read_jsonl(artifacts.answers(variant)) if row["task"] == task]


def _task(name: str, n: int, probe: str, others: list[str], settings: Params) -> dict[str, Any]:
    ref = _answers(settings.reference, name)
    if len(ref) != n:
        raise DataError(f"task {name!r}: {len(ref)} of its {n} items were answered; measure with `tier: full` first")
    choices = [len(r["loglikelihoods"]) for r in ref if r["kind"] == "multiple_choice"]
    result: dict[str, Any] = {"n": n, "chance": float(np.mean([1 / c for c in choices])) if choices else 0.0}
    if ref[0]["acc"] is None:
        return result
    b = Builder(settings.compare, settings.seed)
    answer_metrics(b, pair(_answers(probe, name), ref), True)
    delta = b.metrics[f"acc_delta/{name}"]
    if delta["low"] is None:  # both at chance: it resolves nothing
        return result
    result |= {
        "reference": sum(r["acc"] for r in ref) / n,
        "changed": (b.metrics[f"flips_to_wrong/{name}"]["value"] + b.metrics[f"flips_to_right/{name}"]["value"]) / n,
        "delta": {probe: delta}, "half_width": (delta["high"] - delta["low"]) / 2,
        "resolvable": resolvable(delta["low"], delta["high"], confidence=settings.compare.confidence),
        "told": {},
    }  # fmt: skip
    for other in others:
        b = Builder(settings.compare, settings.seed)
        answer_metrics(b, pair(_answers(other, name), _answers(probe, name)), True)
        result["delta"][other] = apart = b.metrics[f"acc_delta/{name}"]
        result["told"][other] = apart["low"] is not None and not apart["low"] <= 0 <= apart["high"]
    return result


def _tokens(variant: str, ids: set[str]) -> dict[str, Any]:
    """Columns of a variant's token rows in these documents."""
    import pyarrow.parquet as pq

    table = pq.read_table(artifacts.tokens(variant), columns=["document", "set", "kld", "logp", "logp_ref"]).to_pydict()
    keep = [d in ids and s != "trajectory" for d, s in zip(table["document"], table["set"])]
    return {k: np.asarray(v)[keep] for k, v in table.items()}


def _corpus(name: str, ids: set[str], probe: str, others: list[str], settings: Params) -> dict[str, Any]:
    rows = _tokens(probe, ids)
    missing = ids - set(rows["document"])
    if missing:
        raise DataError(
            f"corpus/{name}: {len(missing)} of its {len(ids)} documents were not scored; measure with `tier: full` first"
        )
    c = settings.compare.confidence
    loss = mean_t(_by_document(rows, rows["logp_ref"] - rows["logp"]), confidence=c)
    assert loss.low is not None and loss.high is not None  # several documents: every file has
    result: dict[str, Any] = {
        "n": len(ids), "tokens": len(rows["kld"]), "told": {},
        "kld": {probe: asdict(mean_t(_by_document(rows, rows["kld"]), confidence=c))},
        "ppl_half_width": float(np.expm1((loss.high - loss.low) / 2)),
        "resolvable_ppl": float(np.expm1(resolvable(loss.low, loss.high, confidence=c))),
    }  # fmt: skip
    for other in others:
        theirs = _tokens(other, ids)
        result["kld"][other] = asdict(mean_t(_by_document(theirs, theirs["kld"]), confidence=c))
        apart = mean_t(_by_document(rows, theirs["kld"] - rows["kld"]), confidence=c)
        result["told"][other] = apart.low is not None and apart.high is not None and not apart.low <= 0 <= apart.high
    return result


def _by_document(rows: dict[str, Any], values: Any) -> list[float]:
    """The mean of each document: the independent units, so few here that only a t interval is honest."""
    return [float(values[rows["document"] == d].mean()) for d in sorted(set(rows["document"]))]
