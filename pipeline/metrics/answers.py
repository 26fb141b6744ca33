"""Answers -> scores, differences paired by item with the reference's answers, and flips, by task."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax

from pipeline.core.errors import ArtifactError
from pipeline.core.records import AnswerAgain, AnswerRow
from pipeline.metrics.builder import Builder
from pipeline.metrics.definitions import bounds_of
from pipeline.stats.intervals import Estimate, arithmetic_error, mcnemar, outer, paired_difference, paired_p, widened, wilson

# Differences on the same items: to the reference here, to a baseline in gating.
PAIRED = ("acc_delta", "score_delta", "recovery", "byte_ppl_ratio")
METRICS = (
    *PAIRED, "acc", "acc_depth", "acc_depth_delta", "flips_to_wrong", "flips_to_right", "p_mcnemar", "byte_ppl", "truncated",
    "empty_outputs",
)  # fmt: skip
DEPTH = re.compile(r"-[01]\.\d+$")  # end of a slice's name: depth of the answer in its context
AnswerPair = tuple[AnswerRow, AnswerRow]  # the variant's answer, the reference's
Flags = NDArray[np.bool_]


def pair(rows: list[AnswerRow], reference: list[AnswerRow]) -> list[AnswerPair]:
    """Pairs of the same items, in order. Raises `ArtifactError` unless they are the same items, asked in the same way."""
    asked = [(r["task"], r["doc_id"], r["filter"]) for r in rows]
    if len(set(asked)) < len(asked):
        raise ArtifactError("an item was answered twice and would count as two")
    if len(rows) != len(reference):
        raise ArtifactError(f"{len(rows)} answers cannot be paired with the reference's {len(reference)}; `dvc repro` them")
    for row, other in zip(rows, reference):
        for key in ("task", "doc_id", "filter", "doc_hash", "prompt_hash", "target_hash", "first_token_ids"):
            if row[key] != other[key]:
                raise ArtifactError(
                    f"task {row['task']} item {row['doc_id']}: {key} is {row[key]!r}, the reference's {other[key]!r}; "
                    "they were not asked the same thing"
                )
    return list(zip(rows, reference))


def of_same_items(rows: list[AnswerRow], reference: list[AnswerRow]) -> list[AnswerRow]:
    """The reference's answers to the items of `rows`, which may have ended early."""
    asked = {(row["task"], row["doc_id"]) for row in rows}
    return [row for row in reference if (row["task"], row["doc_id"]) in asked]


def once_each(pairs: list[AnswerPair]) -> list[AnswerPair]:
    """Each item once: a task with several filters scores it several times, of which the first counts."""
    first = {row["task"]: row["filter"] for row, _ in reversed(pairs)}
    return [p for p in pairs if p[0]["filter"] == first[p[0]["task"]]]


def answer_metrics(b: Builder, pairs: list[AnswerPair], allow_truncated: bool, once: str | None = None) -> str | None:
    """Scores, paired differences and flips by task. Returns why the variant is invalid, or None. once: why the reference answered
    in one arithmetic only; if it answered in two, differences are to the mean of both."""
    note = (f"how far its arithmetic moves the reference's answers is not in it: {once}",) if once else ()
    tasks: dict[str, list[AnswerPair]] = {}
    for p in once_each(pairs):
        tasks.setdefault(p[0]["task"], []).append(p)
    pairs = [p for task_pairs in tasks.values() for p in task_pairs]
    truncated = sum(row["truncated"] for row, _ in pairs)
    b.exact("truncated", truncated, len(pairs), "count")
    for task, task_pairs in tasks.items():
        b.exact(f"truncated/{task}", sum(row["truncated"] for row, _ in task_pairs), len(task_pairs), "count")
    b.exact("empty_outputs", sum(row["empty"] for row, _ in pairs), len(pairs), "count")
    for task, task_pairs in tasks.items():
        if task_pairs[0][0]["kind"] == "loglikelihood_rolling":
            _rolling(b, task, task_pairs)
        elif task_pairs[0][0]["acc"] is not None:
            _accuracy(b, task, task_pairs, note)
            _by_depth(b, task, task_pairs, note)
    scored = [p for p in pairs if p[0]["acc"] is not None]
    if scored:
        _accuracy(b, "all", scored, note)
    if truncated and not allow_truncated:
        return f"{truncated} items are longer than the model's window (evaluate.allow_truncated is false)"
    return None


def right(answer: AnswerAgain) -> bool:
    return (answer["acc"] or 0.0) > 0.5


def _accuracy(b: Builder, task: str, pairs: list[AnswerPair], note: tuple[str, ...]) -> None:
    n, clusters = len(pairs), _families(pairs)
    variant, reference = (_twice(rows, right) for rows in zip(*pairs))
    is_right, was_right, x, y = variant[0] > 0, reference[0] > 0, variant.mean(0), reference.mean(0)
    lost, won = was_right & ~is_right, is_right & ~was_right
    blind = _at_chance(is_right, was_right, pairs, b.confidence)  # no loss means nothing if there was nothing to lose
    error = arithmetic_error(variant - reference, n)

    def add(name: str, estimate: Estimate, error: float, note: tuple[str, ...] = note, scale: float = 1.0) -> None:
        """Add a paired metric, its interval with the arithmetic's own error, or without one if `blind`."""
        if blind:
            estimate = replace(estimate, low=None, high=None, warnings=(blind,))
        estimate = widened(estimate, error, confidence=b.confidence, bounds=bounds_of(name))
        b.add(name, replace(estimate, warnings=(*estimate.warnings, *note)), scale)

    def of_families(estimate: Estimate, name: str, values: ArrayLike) -> Estimate:
        """With outer limits, as items of one family change together."""
        return outer(estimate, b.resampled(name, values, 1, clusters)) if len(set(clusters)) < n else estimate

    score = wilson(int(is_right.sum()), n, confidence=b.confidence)
    b.add(f"acc/{task}", of_families(score, f"acc/{task}", is_right))
    cells = (float(c.sum()) for c in (np.minimum(x, y), np.maximum(y - x, 0), np.maximum(x - y, 0), 1 - np.maximum(x, y)))
    delta = of_families(paired_difference(*cells, confidence=b.confidence), f"acc_delta/{task}", x - y)
    add(f"acc_delta/{task}", delta, error, scale=100.0)
    for name, flipped in (("flips_to_wrong", lost), ("flips_to_right", won)):
        share = wilson(int(flipped.sum()), n, confidence=b.confidence)
        add(f"{name}/{task}", of_families(share, f"acc/{name}/{task}", flipped), 0.0, (), n)  # resampled as a share, as accuracy is
        b.metrics[f"{name}/{task}"]["value"] = int(flipped.sum())
    if y.any():
        recovery, name = x.sum() / y.sum(), f"recovery/{task}"
        add(name, b.resampled(name, x, y, clusters), arithmetic_error(variant - recovery * reference, y.sum()))
    flips = int(lost.sum()), int(won.sum())
    p = mcnemar(*flips)
    if p is not None and error:
        p = max(p, paired_p(x - y, n * error))
    notes = note if sum(flips) else ("no item changed: there is nothing to test",)
    method = "McNemar, two-sided: exact, and no less than with the arithmetic's own error"
    b.bare(f"p_mcnemar/{task}", p, sum(flips), method, *notes)
    if choices := [p for p in pairs if p[0]["kind"] == "multiple_choice" and isinstance(p[0]["target"], int)]:
        # probability of the right choice among the choices
        shares = (_twice(rows, lambda r: float(softmax(r["loglikelihoods"] or [])[r["target"]])) for rows in zip(*choices))
        change, name = np.subtract(*shares), f"score_delta/{task}"
        estimate = b.resampled(name, change.mean(0), 1, _families(choices))
        add(name, estimate, arithmetic_error(change, len(choices)), scale=100.0)


def _by_depth(b: Builder, task: str, pairs: list[AnswerPair], note: tuple[str, ...]) -> None:
    """Accuracy on each slice that names a depth, such as `long-0.9`: it shows what a quantized cache forgets."""
    for name in sorted({str(row["slice"]) for row, _ in pairs if DEPTH.search(str(row["slice"]))}):
        part = copy(b)
        part.metrics = {}
        _accuracy(part, task, [p for p in pairs if p[0]["slice"] == name], note)
        for stem in ("acc", "acc_delta"):
            b.metrics[f"{stem.replace('acc', 'acc_depth')}/{task}:{name}"] = part.metrics[f"{stem}/{task}"]


def _families(pairs: list[AnswerPair]) -> list[str]:
    return [f"{row['task']}/{row['cluster']}" for row, _ in pairs]


def _twice(rows: Iterable[AnswerRow], value: Callable[[AnswerRow], float]) -> NDArray[np.float64]:
    """[2, n]: each item's value by its answer, and by its answer in float32 if there is one (why: evaluate.py)."""
    return np.array([[value(r), value({**r, **r["again"]}) if "again" in r else value(r)] for r in rows], float).T


def _at_chance(is_right: Flags, was_right: Flags, pairs: list[AnswerPair], confidence: float) -> str | None:
    """Why a difference means nothing: neither score's interval is above chance. Else None."""
    choices = [len(r["loglikelihoods"] or ()) if r["kind"] == "multiple_choice" else 0 for _, r in pairs]
    guessed = float(np.mean([1 / count if count else 0.0 for count in choices]))
    if any((wilson(int(k.sum()), len(pairs), confidence=confidence).low or 0.0) > guessed for k in (is_right, was_right)):
        return None
    variant, reference = int(is_right.sum()), int(was_right.sum())
    counts = f"{reference} of {len(pairs)} right; the variant: {variant}; guessing: {len(pairs) * guessed:.3g}"
    return f"what the variant is held against is at chance ({counts}): a loss could not be seen"


def _rolling(b: Builder, task: str, pairs: list[AnswerPair]) -> None:
    variant, reference = (np.array([(r["loglikelihoods"] or [])[0] for r in rows]) for rows in zip(*pairs))
    size, docs = [row["bytes"] for row, _ in pairs], [row["cluster"] for row, _ in pairs]
    b.mean(f"byte_ppl/{task}", -variant, size, docs, transform="exp")
    b.mean(f"byte_ppl_ratio/{task}", reference - variant, size, docs, transform="exp")
