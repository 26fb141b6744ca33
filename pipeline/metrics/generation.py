"""Free-running rows -> metrics: where a variant's own text leaves the reference's, and how often it is garbled.

All are paired by prompt with the reference's reply; degeneration.py defines what is garbled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.stats import binom

from pipeline.core.errors import ArtifactError
from pipeline.metrics import degeneration
from pipeline.metrics.builder import Builder
from pipeline.stats.intervals import Estimate, paired_difference, short, wilson

Row = dict[str, Any]
POSITIONS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def pair(rows: list[Row], reference: list[Row]) -> list[tuple[Row, Row]]:
    """Replies to the same prompts, in order; raises if they are not the same prompts."""
    if [r["id"] for r in rows] != [r["id"] for r in reference]:
        raise ArtifactError("replies cannot be paired with the reference's: not the same prompts; run `dvc repro`")
    return list(zip(rows, reference))


def checked(pairs: list[tuple[Row, Row]]) -> list[tuple[dict[str, bool], dict[str, bool]]]:
    """What is wrong with each reply, and with the reference's to the same prompt by the same criteria. Scripts that the
    reference's reply uses are at home in both, so the reference itself never switches."""

    def of(row: Row, reference: Row) -> dict[str, bool]:
        return degeneration.faults(row["text"], row["token_ids"], row["cut"], row["prompt"], reference["text"])

    return [(of(ours, theirs), of(theirs, theirs)) for ours, theirs in pairs]


def free_metrics(b: Builder, pairs: list[tuple[Row, Row]], most: int, is_reference: bool) -> str | None:
    """Metrics of replies of at most `most` tokens; returns why there are none, or None."""
    if not pairs:
        return "no trajectory prompt was answered"
    gone = [degeneration.departure(ours["token_ids"], theirs["token_ids"]) for ours, theirs in pairs]
    n, faults = len(pairs), checked(pairs)
    same = wilson(sum(g is None for g in gone), n, confidence=b.confidence)
    if all(theirs["empty"] for _, theirs in faults):
        same = replace(same, low=None, high=None, warnings=("no reply of the reference has any text: nothing could differ",))
    b.add("free_same", same)
    b.add("free_departure", median_position(gone, most, confidence=b.confidence))
    if is_reference and all("again" in r for r, _ in pairs):
        again = sum(degeneration.departure(r["again"], r["token_ids"]) is None for r, _ in pairs)
        b.add("free_same_floor", wilson(again, n, confidence=b.confidence))
    _repetition(b, pairs)
    for kind in degeneration.FAULTS:
        _rate(b, kind, [(ours[kind], theirs[kind]) for ours, theirs in faults])
    _rate(b, "garbled", [(any(ours.values()), any(theirs.values())) for ours, theirs in faults])
    return None


def _rate(b: Builder, kind: str, pairs: list[tuple[bool, bool]]) -> None:
    """The variant's rate, and its paired difference to the reference's in points."""
    both = sum(x and y for x, y in pairs)
    more, fewer = sum(x and not y for x, y in pairs), sum(y and not x for x, y in pairs)
    n = len(pairs)
    b.add(f"free_{kind}", wilson(both + more, n, confidence=b.confidence))
    delta = paired_difference(both, fewer, more, n - both - more - fewer, confidence=b.confidence)
    if both == n:  # nothing was left to become so
        why = f"every reply is {kind}, the reference's too: nothing could be lost"
        delta = replace(delta, low=None, high=None, warnings=(why,))
    b.add(f"free_{kind}_delta", delta, 100.0)


def _repetition(b: Builder, pairs: list[tuple[Row, Row]]) -> None:
    shares = [(degeneration.repetition(ours["token_ids"]), degeneration.repetition(theirs["token_ids"])) for ours, theirs in pairs]
    known = [(x, y) for x, y in shares if x is not None and y is not None]
    if not known:
        b.bare("free_repetition", None, 0, "mean share", "no reply has four tokens")
        return
    prompts, ones = list(range(len(known))), np.ones(len(known))
    b.mean("free_repetition", [x for x, _ in known], ones, prompts)
    b.mean("free_repetition_delta", [x - y for x, y in known], ones, prompts, scale=100.0)


def median_position(gone: list[int | None], most: int, *, confidence: float) -> Estimate:
    """Median over prompts of the first token that differs, with the exact interval of order statistics. gone: None where a reply
    never differs within `most` tokens; that ranks behind every number. Source: the binomial interval of a quantile (David and
    Nagaraja, Order Statistics, 2003, 7.1)."""
    n = len(gone)
    x = sorted(most + 1 if g is None else g for g in gone)
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


def by_position(b: Builder, pairs: list[tuple[Row, Row]], tokens: dict[str, Any] | None, most: int) -> list[Row]:
    """How agreement decays: for positions t, the share of replies still equal to the reference's after t tokens (free), and the
    share of equal choices at positions after the last t up to this one when fed the reference's own words (forced).

    tokens: columns of artifacts/tokens, or None. The forced words were drawn at a temperature, the free ones are greedy:
    the two need not meet even at t = 1.
    """
    gone = [degeneration.departure(ours["token_ids"], theirs["token_ids"]) for ours, theirs in pairs]
    at, agree, windows = _forced(tokens)
    rows: list[Row] = []
    before = 0
    for t in [*(p for p in POSITIONS if p < most), most]:
        own = (at > before) & (at <= t)
        free = wilson(sum(g is None or g > t for g in gone), len(gone), confidence=b.confidence)
        forced = b.resampled(f"forced/{t}", agree[own], np.ones(own.sum()), windows[own]) if own.any() else None
        rows.append({"position": t, "free": short(free), "forced": short(forced) if forced else None})
        before = t
    return rows


def _forced(tokens: dict[str, Any] | None) -> tuple[Any, Any, Any]:
    """(number of the token in its trajectory, whether both choose alike, trajectory) of every trajectory row."""
    if not tokens:
        return np.empty(0, int), np.empty(0), np.empty(0, str)
    own = np.asarray(tokens["set"]) == "trajectory"
    windows, position = np.asarray(tokens["window"])[own], np.asarray(tokens["position"])[own]
    first: dict[str, int] = {}
    for window, p in zip(windows.tolist(), position.tolist()):
        first[window] = min(p, first.get(window, p))
    at = np.array([p - first[w] + 1 for w, p in zip(windows.tolist(), position.tolist())], int)
    return at, (np.asarray(tokens["top1"]) == np.asarray(tokens["top1_ref"]))[own].astype(float), windows
