"""Answers -> scores, differences paired by item with the reference's answers, and flips, a task at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from pipeline.core.errors import ArtifactError
from pipeline.metrics.builder import Builder
from pipeline.metrics.definitions import bounds_of
from pipeline.stats.intervals import Estimate, arithmetic_error, mcnemar, outer, paired_difference, paired_p, widened, wilson

Row = dict[str, Any]


def pair(rows: list[Row], reference: list[Row]) -> list[tuple[Row, Row]]:
    """Pairs of the same items, in order. Raises `ArtifactError` if they are not the same items asked in the same way."""
    asked = [(r["task"], r["doc_id"], r["filter"]) for r in rows]
    if len(set(asked)) < len(asked):
        raise ArtifactError("an item was answered twice; it would count as two")
    if len(rows) != len(reference):
        raise ArtifactError(f"{len(rows)} answers cannot be paired with the reference's {len(reference)}; `dvc repro` them")
    for ours, theirs in zip(rows, reference):
        for key in ("task", "doc_id", "filter", "doc_hash", "prompt_hash", "target_hash", "first_token_ids"):
            if ours[key] != theirs[key]:
                raise ArtifactError(
                    f"task {ours['task']} item {ours['doc_id']}: {key} is {ours[key]!r}, the reference's {theirs[key]!r}; "
                    "they were not asked the same thing"
                )
    return list(zip(rows, reference))


def answer_metrics(b: Builder, pairs: list[tuple[Row, Row]], allow_truncated: bool, once: str | None = None) -> str | None:
    """Scores, paired differences and flips per task; returns why the variant is invalid, or None. once: why the reference answered
    in one arithmetic only. Where it answered in two, differences count from the mean of both."""
    note = (f"how far its arithmetic moves the reference's answers is not in it: {once}",) if once else ()
    tasks: dict[str, list[tuple[Row, Row]]] = {}
    first = {ours["task"]: ours["filter"] for ours, _ in reversed(pairs)}
    for ours, theirs in pairs:  # a task with several filters scores each item several times: the first one counts
        if ours["filter"] == first[ours["task"]]:
            tasks.setdefault(ours["task"], []).append((ours, theirs))
    pairs = [p for own in tasks.values() for p in own]
    cut = sum(ours["truncated"] for ours, _ in pairs)
    b.exact("truncated", cut, len(pairs), "count")
    for task, own in tasks.items():
        b.exact(f"truncated/{task}", sum(ours["truncated"] for ours, _ in own), len(own), "count")
    b.exact("empty_outputs", sum(ours["empty"] for ours, _ in pairs), len(pairs), "count")
    for task, own in tasks.items():
        if own[0][0]["kind"] == "loglikelihood_rolling":
            _rolling(b, task, own)
        elif own[0][0]["acc"] is not None:
            _accuracy(b, task, own, note)
    scored = [p for p in pairs if p[0]["acc"] is not None]
    if scored:
        _accuracy(b, "all", scored, note)
    if cut and not allow_truncated:
        return f"{cut} items are longer than the model's window (evaluate.allow_truncated is false)"
    return None


def _accuracy(b: Builder, task: str, pairs: list[tuple[Row, Row]], note: tuple[str, ...]) -> None:
    n, clusters, ones = len(pairs), _families(pairs), np.ones(len(pairs))
    ours, theirs = (_twice(rows, lambda row: float(row["acc"] > 0.5)) for rows in zip(*pairs))
    right, right_ref, x, y = ours[0] > 0, theirs[0] > 0, ours.mean(0), theirs.mean(0)
    lost, won = int((right_ref & ~right).sum()), int((right & ~right_ref).sum())
    cells = (float(c.sum()) for c in (np.minimum(x, y), np.maximum(y - x, 0), np.maximum(x - y, 0), 1 - np.maximum(x, y)))
    score, delta = wilson(int(right.sum()), n, confidence=b.confidence), paired_difference(*cells, confidence=b.confidence)
    if len(set(clusters)) < n:  # items of one family rise and fall together: take the outer limits
        delta = outer(delta, b.resampled(f"acc_delta/{task}", x - y, ones, clusters))
        score = outer(score, b.resampled(f"acc/{task}", right, ones, clusters))
    b.add(f"acc/{task}", score)
    blind = _blind(right, right_ref, pairs, b.confidence)  # that nothing was lost of nothing is no finding
    error = arithmetic_error(ours - theirs, n)
    _add(b, f"acc_delta/{task}", delta, error, note, blind, 100.0)
    for name, hit in (("flips_to_wrong", right_ref & ~right), ("flips_to_right", right & ~right_ref)):
        share = wilson(int(hit.sum()), n, confidence=b.confidence)
        if len(set(clusters)) < n:
            share = outer(share, b.resampled(f"acc/{name}/{task}", hit, ones, clusters))  # a share, as accuracy is
        _add(b, f"{name}/{task}", share, 0.0, (), blind, n)
        b.metrics[f"{name}/{task}"]["value"] = int(hit.sum())
    if y.any():
        recovery, name = x.sum() / y.sum(), f"recovery/{task}"
        own = arithmetic_error(ours - recovery * theirs, y.sum())
        _add(b, name, b.resampled(name, x, y, clusters), own, note, blind)
    p = mcnemar(lost, won)
    if p is not None and error:
        p = max(p, paired_p(x - y, n * error))
    notes = note if lost + won else ("no item changed: there is nothing to test",)
    method = "McNemar, two-sided: exact, and no less than with the arithmetic's own error"
    b.bare(f"p_mcnemar/{task}", p, lost + won, method, *notes)
    if chosen := [p for p in pairs if p[0]["kind"] == "multiple_choice" and isinstance(p[0]["target"], int)]:
        # probability of the right choice, where one of the choices must be
        shares = (_twice(rows, lambda row: float(softmax(row["loglikelihoods"])[row["target"]])) for rows in zip(*chosen))
        change = np.subtract(*shares)
        name, families = f"score_delta/{task}", _families(chosen)
        estimate = b.resampled(name, change.mean(0), np.ones(len(chosen)), families)
        _add(b, name, estimate, arithmetic_error(change, len(chosen)), note, blind, 100.0)


def _families(pairs: list[tuple[Row, Row]]) -> list[str]:
    return [f"{ours['task']}/{ours['cluster']}" for ours, _ in pairs]


def _twice(rows: Iterable[Row], value: Callable[[Row], float]) -> NDArray[np.float64]:
    """[2, n]: each item's value by its answer, and by its answer in float32 where there is one (evaluate.py says why)."""
    return np.array([[value(row), value(row | row.get("again", {}))] for row in rows]).T


def _add(
    b: Builder, name: str, estimate: Estimate, error: float, note: tuple[str, ...], blind: str | None, scale: float = 1.0
) -> None:
    """Add a paired figure: its interval with the arithmetic's own error, or none if `blind`."""
    if blind:
        estimate = replace(estimate, low=None, high=None, warnings=(blind,))
    estimate = widened(estimate, error, confidence=b.confidence, bounds=bounds_of(name))
    b.add(name, replace(estimate, warnings=(*estimate.warnings, *note)), scale)


def _blind(right: Any, right_ref: Any, pairs: list[tuple[Row, Row]], confidence: float) -> str | None:
    """Why a difference means nothing: neither score's interval is above chance."""
    guessed = float(np.mean([1 / len(r["loglikelihoods"]) if r["kind"] == "multiple_choice" else 0.0 for _, r in pairs]))
    if any((wilson(int(k.sum()), len(pairs), confidence=confidence).low or 0.0) > guessed for k in (right, right_ref)):
        return None
    counts = f"{int(right_ref.sum())} of {len(pairs)} right; the variant: {int(right.sum())}; guessing: {len(pairs) * guessed:.3g}"
    return f"what the variant is held against is at chance ({counts}): a loss could not be seen"


def _rolling(b: Builder, task: str, pairs: list[tuple[Row, Row]]) -> None:
    ours = np.array([p[0]["loglikelihoods"][0] for p in pairs])
    theirs = np.array([p[1]["loglikelihoods"][0] for p in pairs])
    size, docs = [p[0]["bytes"] for p in pairs], [p[0]["cluster"] for p in pairs]
    b.mean(f"byte_ppl/{task}", -ours, size, docs, transform="exp")
    b.mean(f"byte_ppl_ratio/{task}", theirs - ours, size, docs, transform="exp")
