"""Answers -> scores, paired differences and flips, a task at a time.

Every difference is paired, item by item, with the reference's answer to the same item.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.core.errors import ArtifactError
from pipeline.figures.builder import Builder
from pipeline.numbers.stats import mcnemar, outer, paired_difference, wilson

Row = dict[str, Any]


def pair(rows: list[Row], reference: list[Row]) -> list[tuple[Row, Row]]:
    """The same items in both, in order; raises if they are not the same items asked in the same way."""
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


def answer_metrics(b: Builder, pairs: list[tuple[Row, Row]], allow_truncated: bool) -> str | None:
    """Scores, paired differences and flips per task; returns why the variant is invalid, or None."""
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
            _accuracy(b, task, own)
    scored = [p for p in pairs if p[0]["acc"] is not None]
    if scored:
        _accuracy(b, "all", scored)
    if cut and not allow_truncated:
        return f"{cut} items are longer than the model's window (evaluate.allow_truncated is false)"
    return None


def _accuracy(b: Builder, task: str, pairs: list[tuple[Row, Row]]) -> None:
    ours, theirs = np.array([p[0]["acc"] for p in pairs]), np.array([p[1]["acc"] for p in pairs])
    right, right_ref = ours > 0.5, theirs > 0.5
    n, lost, won = len(pairs), int((right_ref & ~right).sum()), int((right & ~right_ref).sum())
    both = int((right & right_ref).sum())
    score = wilson(int(right.sum()), n, confidence=b.confidence)
    delta = paired_difference(both, lost, won, n - both - lost - won, confidence=b.confidence)
    clusters = [f"{p[0]['task']}/{p[0]['cluster']}" for p in pairs]
    if len(set(clusters)) < n:  # items of one family rise and fall together: take the outer limits
        change = right.astype(float) - right_ref
        delta = outer(delta, b.resampled(f"acc_delta/{task}", change, np.ones(n), clusters))
        score = outer(score, b.resampled(f"acc/{task}", right, np.ones(n), clusters))
    b.add(f"acc/{task}", score)
    if blind := _blind(right, right_ref, pairs, b.confidence):  # that nothing was lost of nothing is no finding
        for name, value in (("acc_delta", 100.0 * (won - lost) / n), ("flips_to_wrong", lost), ("flips_to_right", won)):
            b.bare(f"{name}/{task}", value, n, "count", blind)
        if right_ref.any():
            b.bare(f"recovery/{task}", float(right.sum() / right_ref.sum()), n, "ratio", blind)
    else:
        b.add(f"acc_delta/{task}", delta, 100.0)
        b.exact(f"flips_to_wrong/{task}", lost, n, "count")
        b.exact(f"flips_to_right/{task}", won, n, "count")
        if right_ref.any():
            b.mean(f"recovery/{task}", right, right_ref, clusters)
    note = () if lost + won else ("no item changed: there is nothing to test",)
    b.bare(f"p_mcnemar/{task}", mcnemar(lost, won), lost + won, "exact McNemar, two-sided", *note)


def _blind(right: Any, right_ref: Any, pairs: list[tuple[Row, Row]], confidence: float) -> str | None:
    """Why no difference says anything, in words, where guessing would do as well as both: neither interval is above chance."""
    guessed = float(np.mean([1 / len(r["loglikelihoods"]) if r["kind"] == "multiple_choice" else 0.0 for _, r in pairs]))
    if any((wilson(int(k.sum()), len(pairs), confidence=confidence).low or 0.0) > guessed for k in (right, right_ref)):
        return None
    told = f"{int(right_ref.sum())} of {len(pairs)} right; the variant: {int(right.sum())}; guessing: {len(pairs) * guessed:.3g}"
    return f"what the variant is held against is at chance ({told}): a loss could not be seen"


def _rolling(b: Builder, task: str, pairs: list[tuple[Row, Row]]) -> None:
    ours = np.array([p[0]["loglikelihoods"][0] for p in pairs])
    theirs = np.array([p[1]["loglikelihoods"][0] for p in pairs])
    size, docs = [p[0]["bytes"] for p in pairs], [p[0]["cluster"] for p in pairs]
    b.mean(f"byte_ppl/{task}", -ours, size, docs, transform="exp")
    b.mean(f"byte_ppl_ratio/{task}", theirs - ours, size, docs, transform="exp")
