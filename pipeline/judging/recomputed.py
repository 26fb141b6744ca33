"""What is judged, computed once more from the rows where they are here.

dvc.lock is a text file: who edits results and their md5 in it leaves two files that agree. The rows are a third. Not seen
are rows that are made up, and edits where no rows are (a clone): `--enforce` names what was not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pipeline.core import artifacts
from pipeline.core.params import Params
from pipeline.figures import free_figures
from pipeline.figures.answer_figures import answer_metrics, pair
from pipeline.figures.builder import Builder, Metrics, size_metrics
from pipeline.figures.speed_figures import timing_metrics
from pipeline.figures.token_figures import token_metrics

Row = dict[str, Any]
CLOSE = 1e-6  # another machine's sums end in other digits


def differing(results: dict[str, Row], settings: Params) -> list[str]:
    """Figures of required variants that rules name and that are not what their rows say, in words. results: {variant: its
    metrics/<variant>.json}."""
    found = []
    for name in settings.gate.required:
        result = results.get(name)
        if result is None or result["status"] != "ok":  # never a PASS
            continue
        asked = {rule.metric for rule in settings.gate.rules if rule.variants is None or name in rule.variants}
        again, faults = _again(name, settings)
        found += [f"{artifacts.metrics(name)}: {fault}, by its rows" for fault in faults]
        for metric in sorted(asked & again.keys() & result["metrics"].keys()):
            if not _same(result["metrics"][metric], again[metric]):
                told = (f"{m['value']} [{m['low']}, {m['high']}], n = {m['n']}" for m in (result["metrics"][metric], again[metric]))
                found.append(f"{artifacts.metrics(name)}: {metric} is {' and, by its rows, '.join(told)}")
    return found


def _same(one: Row, other: Row) -> bool:
    exact = all(one.get(k) == other.get(k) for k in ("n", "clusters", "confidence", "unit"))
    return exact and all(_close(one.get(k), other.get(k)) for k in ("value", "low", "high", "weight", "between"))


def _close(a: float | None, b: float | None) -> bool:
    return a == b if a is None or b is None else math.isclose(a, b, rel_tol=CLOSE, abs_tol=1e-12)


def _again(name: str, settings: Params) -> tuple[Metrics, list[str]]:
    """(a variant's metrics from those rows that are here, why some give none)."""
    b, both = Builder(settings.compare, settings.seed), (name, settings.reference)
    tokens, timings = artifacts.tokens(name), artifacts.timings(name)
    answers, replies = [artifacts.answers(v) for v in both], [artifacts.generations(v) for v in both]
    models = [artifacts.model_dir(v) / artifacts.MANIFEST for v in both]
    meta, limits = artifacts.meta_of(timings), artifacts.meta_of(replies[0])
    read, truncated = artifacts.read_jsonl, settings.evaluate.allow_truncated
    parts: list[tuple[Iterable[Path], Callable[[], str | None]]] = [
        (models, lambda: size_metrics(b, *(artifacts.read_manifest(m.parent) for m in models))),
        ([tokens], lambda: token_metrics(b, artifacts.read_columns(tokens))),
        (answers, lambda: answer_metrics(b, pair(*map(read, answers)), truncated)),
        ([timings, meta], lambda: timing_metrics(b, read(timings), artifacts.read_json(meta))),
        ([*replies, limits], lambda: _replies(b, replies, limits)),
    ]
    faults = [make() for files, make in parts if all(f.exists() for f in files)]
    return b.metrics, [fault for fault in faults if fault]


def _replies(b: Builder, files: list[Path], limits: Path) -> str | None:
    pairs = free_figures.pair(*map(artifacts.read_jsonl, files))
    return free_figures.free_metrics(b, pairs, artifacts.read_json(limits)["tokens"], False)
