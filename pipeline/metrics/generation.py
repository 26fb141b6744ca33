"""Free-running rows -> metrics: where a variant's own text leaves the reference's, and how often it is garbled.

All are paired by prompt with the reference's reply; degeneration.py defines what is garbled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from pipeline.core.errors import ArtifactError
from pipeline.core.records import Agreement, ReplyRow
from pipeline.metrics import degeneration
from pipeline.metrics.builder import Builder, short
from pipeline.stats.intervals import Estimate, paired_difference, wilson

Pair = tuple[ReplyRow, ReplyRow]  # the variant's reply, the reference's
POSITIONS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def pair(rows: list[ReplyRow], reference: list[ReplyRow]) -> list[Pair]:
    """Replies to the same prompts, in order; raises if they are not the same prompts."""
    if [r["id"] for r in rows] != [r["id"] for r in reference]:
        raise ArtifactError("replies cannot be paired with the reference's: not the same prompts; run `dvc repro`")
    return list(zip(rows, reference))


def faults(pairs: list[Pair]) -> list[tuple[dict[str, bool], dict[str, bool]]]:
    """What is wrong with each reply, and with the reference's to the same prompt by the same criteria. Scripts that the
    reference's reply uses are at home in both, so the reference itself never switches."""

    def of(row: ReplyRow, reference: ReplyRow) -> dict[str, bool]:
        return degeneration.faults(row["text"], row["token_ids"], row["cut"], row["prompt"], reference["text"])

    return [(of(row, other), of(other, other)) for row, other in pairs]


def _departures(pairs: list[Pair]) -> list[int | None]:
    return [degeneration.departure(row["token_ids"], other["token_ids"]) for row, other in pairs]


def free_metrics(b: Builder, pairs: list[Pair], most: int, is_reference: bool) -> str | None:
    """Metrics of replies of at most `most` tokens; returns why there are none, or None."""
    if not pairs:
        return "no trajectory prompt was answered"
    departures, n, flags = _departures(pairs), len(pairs), faults(pairs)
    same = wilson(departures.count(None), n, confidence=b.confidence)
    if all(reference["empty"] for _, reference in flags):
        same = replace(same, low=None, high=None, warnings=("no reply of the reference has any text: nothing could differ",))
    b.add("free_same", same)
    b.add("free_departure", median_position(departures, most, confidence=b.confidence))
    if is_reference and all("again" in r for r, _ in pairs):
        again = sum(r["again"] == r["token_ids"] for r, _ in pairs)
        b.add("free_same_floor", wilson(again, n, confidence=b.confidence))
    _repetition(b, pairs)
    for kind in degeneration.FAULTS:
        _rate(b, kind, [(variant[kind], reference[kind]) for variant, reference in flags])
    _rate(b, "garbled", [(any(variant.values()), any(reference.values())) for variant, reference in flags])
    return None


def _rate(b: Builder, kind: str, pairs: list[tuple[bool, bool]]) -> None:
    """The variant's rate, and its paired difference to the reference's in points."""
    n, both = len(pairs), pairs.count((True, True))
    more, fewer = pairs.count((True, False)), pairs.count((False, True))
    b.add(f"free_{kind}", wilson(both + more, n, confidence=b.confidence))
    delta = paired_difference(both, fewer, more, n - both - more - fewer, confidence=b.confidence)
    if both == n:  # nothing was left to become so
        why = f"every reply is {kind}, the reference's too: nothing could be lost"
        delta = replace(delta, low=None, high=None, warnings=(why,))
    b.add(f"free_{kind}_delta", delta, 100.0)


def _repetition(b: Builder, pairs: list[Pair]) -> None:
    shares = [tuple(degeneration.repetition(row["token_ids"]) for row in both) for both in pairs]
    known = np.array([both for both in shares if None not in both], float)
    if not len(known):
        b.bare("free_repetition", None, 0, "mean share", "no reply has four tokens")
        return
    prompts, ones = np.arange(len(known)), np.ones(len(known))
    b.mean("free_repetition", known[:, 0], ones, prompts)
    b.mean("free_repetition_delta", known[:, 0] - known[:, 1], ones, prompts, scale=100.0)


def median_position(departures: list[int | None], most: int, *, confidence: float) -> Estimate:
    """Median over prompts of the first token that differs, with the exact interval of order statistics. departures: None where a
    reply never differs within `most` tokens; that ranks behind every number. Source: the binomial interval of a quantile (David
    and Nagaraja, Order Statistics, 2003, 7.1)."""
    n = len(departures)
    x = sorted(most + 1 if d is None else d for d in departures)
    value = x[(n + 1) // 2 - 1]
    method = f"lower median, exact order-statistic interval, replies of up to {most} tokens"
    if value > most:
        return Estimate(None, None, None, n, method, (f"half of the replies or more never differ within {most} tokens",))
    rank = int(binom.ppf((1 - confidence) / 2, n, 0.5))  # x[rank - 1] .. x[n - rank] covers at least `confidence`
    if rank < 1:
        return Estimate(value, None, None, n, method, (f"{n} prompts are too few for an interval",))
    high = x[n - rank]
    beyond = (f"the upper bound lies beyond the {most} tokens that were asked for",) if high > most else ()
    return Estimate(value, x[rank - 1], min(high, most), n, method, beyond)


def by_position(b: Builder, pairs: list[Pair], columns: dict[str, list[Any]] | None, most: int) -> list[Agreement]:
    """How agreement decays: for positions t, the share of replies still equal to the reference's after t tokens (free), and the
    share of equal choices at positions after the last t up to this one when fed the reference's own words (forced).

    columns: of artifacts/tokens, or None. The forced words were drawn at a temperature, the free ones are greedy:
    the two need not meet even at t = 1.
    """
    departures = _departures(pairs)
    at, agree, windows = _forced(columns) if columns else (np.empty(0, int), np.empty(0), np.empty(0, str))
    rows: list[Agreement] = []
    before = 0
    for t in [*(p for p in POSITIONS if p < most), most]:
        here = (at > before) & (at <= t)
        free = wilson(sum(d is None or d > t for d in departures), len(departures), confidence=b.confidence)
        forced = b.resampled(f"forced/{t}", agree[here], np.ones(here.sum()), windows[here]) if here.any() else None
        rows.append({"position": t, "free": short(free), "forced": short(forced) if forced else None})
        before = t
    return rows


def _forced(columns: dict[str, list[Any]]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """(number of the token in its trajectory, whether both choose alike, trajectory) of every trajectory row."""
    is_trajectory = np.asarray(columns["set"]) == "trajectory"
    windows, positions, top1, top1_ref = (np.asarray(columns[k])[is_trajectory] for k in ("window", "position", "top1", "top1_ref"))
    names, index = np.unique(windows, return_inverse=True)
    first = np.array([positions[index == k].min() for k in range(len(names))], int)
    return positions - first[index] + 1, (top1 == top1_ref).astype(float), windows
