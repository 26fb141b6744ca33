"""Record what each shipped set can resolve, from the rows of the last run (`tier: full`) -> reports/evalsets.json

    python -m tools.evalset_record

The probe is the first variant that the gate requires: what a set can resolve depends on how many answers it changes. The other
variants with rows show whether the set tells them from the probe. `python -m pipeline.evalset` prints the record.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.core import artifacts, cli, params, records
from pipeline.core.errors import DataError
from pipeline.core.params import Params
from pipeline.core.records import AnswerRow, EvalsetsRecord, Metric, RowsMeta, SetRecord
from pipeline.evalset import cards, load_texts
from pipeline.evalset.cards import Card
from pipeline.metrics.answers import answer_metrics, pair
from pipeline.metrics.builder import Builder
from pipeline.stats.intervals import POWER, Estimate, mean_t, resolvable


def record(settings: Params) -> EvalsetsRecord:
    """Measure every set of the present tier from the rows in artifacts/."""
    probe, reference = settings.gate.required[0], settings.reference
    usable = [v for v in settings.variants if v in (probe, reference) or _has_rows(v)]
    others = [v for v in usable if v not in (probe, reference)]
    sets: dict[str, SetRecord] = {}
    for card in cards.cards():
        kind, _, name = card.name.partition("/")
        if kind == "tasks" and name in settings.amount.tasks:
            _same_files(card, [artifacts.meta_of(artifacts.answers(v)) for v in usable])
            sets[card.name] = _task(card, name, probe, others, settings)
        elif kind == "corpus":
            _same_files(card, [artifacts.REFERENCE / artifacts.MANIFEST])
            sets[card.name] = _corpus(card, probe, others, settings)
    return {
        "reference": reference, "probe": probe, "confidence": settings.compare.confidence, "power": POWER,
        "seed": settings.seed, "base": artifacts.read_manifest(artifacts.BASE)["digest"], "versions": artifacts.versions(),
        "variants": {v: settings.variants[v].model_dump() for v in usable}, "sets": sets,
    }  # fmt: skip


def _has_rows(variant: str) -> bool:
    metas = [artifacts.meta_of(make(variant)) for make in (artifacts.answers, artifacts.tokens)]
    return all(m.exists() and records.read(m, RowsMeta)["status"] == "ok" for m in metas)


def _same_files(card: Card, sources: list[Path]) -> None:
    """Raise if rows were made from other files of a set than are here now."""
    for source in sources:
        measured = artifacts.read_json(source)["sets"]
        changed = [f for f, sha in card.files.items() if measured.get(f) != sha]
        if changed:
            raise DataError(f"{source} was made with another {changed[0]}; run the pipeline with `tier: full` first")


def _answers(variant: str, task: str) -> list[Any]:
    return [row for row in records.read_rows(artifacts.answers(variant), AnswerRow) if row["task"] == task]


def _delta(settings: Params, name: str, rows: list[Any], reference: list[Any]) -> tuple[Any, float]:
    """(paired difference in accuracy, share of answers that changed)."""
    b = Builder(settings.compare, settings.seed)
    answer_metrics(b, pair(rows, reference), True)
    changed = sum(b.metrics[f"flips_to_{way}/{name}"]["value"] or 0 for way in ("wrong", "right"))
    return b.metrics[f"acc_delta/{name}"], changed / len(reference)


def _apart(interval: Metric | Estimate) -> bool:
    low, high = (interval.low, interval.high) if isinstance(interval, Estimate) else (interval["low"], interval["high"])
    return low is not None and high is not None and not low <= 0 <= high


def _task(card: Card, name: str, probe: str, others: list[str], settings: Params) -> SetRecord:
    reference = _answers(settings.reference, name)
    if len(reference) != card.n:
        raise DataError(f"task {name!r}: {len(reference)} of its {card.n} items were answered; measure with `tier: full` first")
    choices = [len(r["loglikelihoods"] or ()) for r in reference if r["kind"] == "multiple_choice"]
    chance = float(np.mean([1 / c for c in choices])) if choices else 0.0
    result: SetRecord = {"files": card.files, "n": card.n, "chance": chance}
    right = [r["acc"] for r in reference if r["acc"] is not None]
    if not right:
        return result
    rows = _answers(probe, name)
    delta, changed = _delta(settings, name, rows, reference)
    if delta["low"] is None or delta["high"] is None:  # both at chance: it resolves nothing
        return result
    deltas = {probe: delta} | {v: _delta(settings, name, _answers(v, name), rows)[0] for v in others}
    result.update({
        "reference": sum(right) / card.n, "changed": changed, "delta": deltas, "half_width": (delta["high"] - delta["low"]) / 2,
        "resolvable": resolvable(delta["low"], delta["high"], confidence=settings.compare.confidence),
        "told": {v: _apart(deltas[v]) for v in others},
    })  # fmt: skip
    return result


def _tokens(variant: str, documents: set[str]) -> dict[str, NDArray[Any]]:
    """Columns of a variant's token rows in these documents."""
    table = artifacts.read_columns(artifacts.tokens(variant))
    keep = [d in documents and s != "trajectory" for d, s in zip(table["document"], table["set"])]
    return {k: np.asarray(table[k])[keep] for k in ("document", "kld", "logp", "logp_ref")}


def _corpus(card: Card, probe: str, others: list[str], settings: Params) -> SetRecord:
    documents = {row["id"] for file in card.files for row in load_texts(Path(file))}
    tokens = {v: _tokens(v, documents) for v in (probe, *others)}
    rows, level = tokens[probe], settings.compare.confidence
    if missing := documents - set(rows["document"]):
        n = len(documents)
        raise DataError(f"{card.name}: {len(missing)} of its {n} documents were not scored; measure with `tier: full` first")

    def mean(values: Iterable[float]) -> Estimate:
        """Over documents, the independent units: so few here that only a t interval is honest."""
        by_row = np.asarray(values)
        return mean_t([float(by_row[rows["document"] == d].mean()) for d in sorted(documents)], confidence=level)

    loss = mean(rows["logp_ref"] - rows["logp"])
    assert loss.low is not None and loss.high is not None  # several documents: every file has
    return {
        "files": card.files, "n": len(documents), "tokens": len(rows["kld"]),
        "told": {v: _apart(mean(tokens[v]["kld"] - rows["kld"])) for v in others},
        "kld": {v: asdict(mean(columns["kld"])) for v, columns in tokens.items()},
        "ppl_half_width": float(np.expm1((loss.high - loss.low) / 2)),
        "resolvable_ppl": float(np.expm1(resolvable(loss.low, loss.high, confidence=level))),
    }  # fmt: skip


def main() -> None:
    """Record what each set resolves, from the rows of the last run."""
    recorded = record(params.load())
    artifacts.write_json(cards.RECORD, recorded)
    cli.say("evalset", f"{len(recorded['sets'])} sets are recorded in {cards.RECORD}")


if __name__ == "__main__":
    cli.run(main)
