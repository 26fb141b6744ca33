"""Free-running replies -> metrics: where a variant's text departs from the reference's, and how often it is garbled.

Replies are paired by prompt with the reference's. Garbled: broken characters, a loop, another script or no text. Faults are counted
in the reference's replies too, as a small model loops even at full precision.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from pipeline.core.errors import ArtifactError
from pipeline.core.records import Agreement, ReplyRow
from pipeline.metrics.builder import Builder, short
from pipeline.metrics.definitions import FLOOR_TIMES
from pipeline.stats.intervals import Estimate, paired_difference, wilson

Pair = tuple[ReplyRow, ReplyRow]  # the variant's reply, the reference's
POSITIONS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

FAULTS = ("empty", "invalid", "loop", "script")

# A loop: the reply ends in one block, repeated at least LOOP_TURNS times over at least LOOP_TOKENS tokens.
LOOP_TURNS = 3  # twice may be a refrain, or a row of a table after its head
LOOP_TOKENS = 12  # "ha ha ha" and "----" are shorter
NGRAM = 4  # repetition: share of 4-grams that stood in the reply before (seq-rep-4: Welleck et al. 2019)
CUT_CHARACTERS = 3  # a reply cut within a character has at most 3 of its 4 bytes
WHOLE_WORDS = {"CJK", "KANA", "HANGUL"}  # one letter is a word or a syllable, and counts alone
STRAY = 2  # letters in a row of any other script: a single Greek or Cyrillic letter may be a symbol
LATIN_SHARE = 0.5  # Latin counts only above this share: all languages write names, units and code in it


def repeated_tail(tokens: Sequence[Hashable]) -> int:
    """Number of tokens in a loop at the end of a reply, else 0. Greedy decoding never leaves a loop, but leaves a list."""
    n = len(tokens)
    for period in range(1, n // LOOP_TURNS + 1):
        run = period
        while run < n and tokens[n - 1 - run] == tokens[n - 1 - run + period]:
            run += 1
        if run >= max(LOOP_TURNS * period, LOOP_TOKENS):
            return run
    return 0


def repetition(tokens: Sequence[Hashable]) -> float | None:
    """Share of a reply's n-grams (NGRAM) that repeat an earlier one; None for a reply without any."""
    grams = [tuple(tokens[at : at + NGRAM]) for at in range(len(tokens) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else None


def broken_characters(text: str, prompt: str, cut: bool) -> int:
    """Number of U+FFFD in a reply: bytes that are not UTF-8; 0 if the prompt has some. cut: it stopped at the limit."""
    if "\ufffd" in prompt:
        return 0
    if cut:
        bare = text.rstrip("\ufffd")
        text = bare + text[len(bare) :][CUT_CHARACTERS:]
    return text.count("\ufffd")


def script_of(character: str) -> str | None:
    """Script of a letter by its Unicode name (hiragana and katakana: KANA); None for digits, emoji and marks."""
    if unicodedata.category(character) not in ("Lu", "Ll", "Lt", "Lo"):
        return None
    first = unicodedata.name(character, "?").split(" ")[0].split("-")[0]
    return {"HIRAGANA": "KANA", "KATAKANA": "KANA"}.get(first, first)


def scripts(text: str) -> list[str | None]:
    """Script of each character; fullwidth and mathematical letters count as plain ones (NFKC)."""
    return [script_of(c) for c in unicodedata.normalize("NFKC", text)]


def foreign_scripts(reply: str, prompt: str, reference: str) -> list[str]:
    """Scripts (by the constants above) that neither prompt nor reference uses; none if these two have no letters at all."""
    home = {*scripts(prompt), *scripts(reference)} - {None}
    if not home:
        return []
    home |= {"CJK"} if "KANA" in home else set()  # Japanese is written in both
    by_character = scripts(reply)
    longest: dict[str, int] = {}
    for script, run in groupby(by_character):
        if script and script not in home:
            longest[script] = max(longest.get(script, 0), len(list(run)))
    letters = sum(s is not None for s in by_character)
    mostly_latin = by_character.count("LATIN") > LATIN_SHARE * letters
    counts = {s for s, run in longest.items() if run >= (1 if s in WHOLE_WORDS else STRAY)}
    return sorted(s for s in counts if s != "LATIN" or mostly_latin)


def faults_of(row: ReplyRow, reference: str) -> dict[str, bool]:
    """Whether a reply has each of FAULTS. reference: the text of the reference's reply to the same prompt."""
    return {
        "empty": not row["text"].strip(),
        "invalid": broken_characters(row["text"], row["prompt"], row["cut"]) > 0,
        "loop": repeated_tail(row["token_ids"]) > 0,
        "script": bool(foreign_scripts(row["text"], row["prompt"], reference)),
    }


def departure(tokens: Sequence[Hashable], reference: Sequence[Hashable]) -> int | None:
    """Number (from 1) of the first token that is not the reference's; None if the replies are equal."""
    for k, (a, b) in enumerate(zip(tokens, reference), 1):
        if a != b:
            return k
    return None if len(tokens) == len(reference) else min(len(tokens), len(reference)) + 1


def pair(rows: list[ReplyRow], reference: list[ReplyRow]) -> list[Pair]:
    """Pairs of replies to the same prompts, in order. Raises `ArtifactError` for other prompts."""
    if [r["id"] for r in rows] != [r["id"] for r in reference]:
        raise ArtifactError("replies cannot be paired with the reference's: not the same prompts; run `dvc repro`")
    return list(zip(rows, reference))


def faults(pairs: list[Pair]) -> list[tuple[dict[str, bool], dict[str, bool]]]:
    """Faults of each reply and of the reference's. Both may use the reference's scripts, so that it never switches."""
    return [(faults_of(row, other["text"]), faults_of(other, other["text"])) for row, other in pairs]


def _departures(pairs: list[Pair]) -> list[int | None]:
    return [departure(row["token_ids"], other["token_ids"]) for row, other in pairs]


def free_metrics(b: Builder, pairs: list[Pair], most: int, is_reference: bool) -> str | None:
    """Metrics of replies of at most `most` tokens. Returns why there are none, or None."""
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
    for kind in FAULTS:
        _rate(b, kind, [(variant[kind], reference[kind]) for variant, reference in flags])
    _rate(b, "garbled", [(any(variant.values()), any(reference.values())) for variant, reference in flags])
    return _speculation(b, [row for row, _ in pairs]) if "undrafted" in pairs[0][0] else None


def _speculation(b: Builder, rows: list[ReplyRow]) -> str | None:
    """Compare replies with and without the draft. Only rounding may change a choice: returns a fault if it was not that close."""
    n, floor = len(rows), max(row["undrafted"]["moved"] for row in rows)
    at = [(row["undrafted"]["gaps"], departure(row["token_ids"], row["undrafted"]["token_ids"])) for row in rows]
    gaps = [gaps[d - 1] for gaps, d in at if d is not None]
    b.add("spec_same", wilson(n - len(gaps), n, confidence=b.confidence))
    b.exact("spec_gap", max(gaps, default=0.0), n, "largest of these replies; 0 where none departs")
    tokens = sum(len(gaps) for gaps, _ in at)
    b.bare("spec_gap_floor", floor, tokens, "largest change of the gap", "an interval of a maximum says nothing")
    if max(gaps, default=0.0) <= FLOOR_TIMES * floor:
        return None
    apart = f"where its two likeliest tokens are {max(gaps):.2g} nats apart, and rounding moves them by {floor:.2g} at most"
    return f"speculation changes replies: {len(gaps)} of {n} are not the model's own, one of them {apart}"


def _rate(b: Builder, kind: str, pairs: list[tuple[bool, bool]]) -> None:
    """The variant's rate, and its paired difference to the reference's in percentage points."""
    n, both = len(pairs), pairs.count((True, True))
    more, fewer = pairs.count((True, False)), pairs.count((False, True))
    b.add(f"free_{kind}", wilson(both + more, n, confidence=b.confidence))
    delta = paired_difference(both, fewer, more, n - both - more - fewer, confidence=b.confidence)
    if both == n:  # nothing was left to become so
        why = f"every reply is {kind}, the reference's too: nothing could be lost"
        delta = replace(delta, low=None, high=None, warnings=(why,))
    b.add(f"free_{kind}_delta", delta, 100.0)


def _repetition(b: Builder, pairs: list[Pair]) -> None:
    shares = [tuple(repetition(row["token_ids"]) for row in both) for both in pairs]
    known = np.array([both for both in shares if None not in both], float)
    if not len(known):
        b.bare("free_repetition", None, 0, "mean share", "no reply has four tokens")
        return
    prompts = np.arange(len(known))
    b.mean("free_repetition", known[:, 0], 1, prompts)
    b.mean("free_repetition_delta", known[:, 0] - known[:, 1], 1, prompts, scale=100.0)


def median_position(departures: list[int | None], most: int, *, confidence: float) -> Estimate:
    """Median over prompts of the first token that differs, with the exact interval of order statistics (David and Nagaraja, Order
    Statistics, 2003, 7.1). departures: None for a reply that never differs within `most` tokens; it ranks last."""
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
    share of equal choices after the previous t up to this one in the reference's trajectories (forced).

    columns: of artifacts/tokens, or None. Trajectories are drawn at a temperature, replies greedy: they can differ even at t = 1.
    """
    departures = _departures(pairs)
    at, agree, windows = _forced(columns) if columns else (np.empty(0, int), np.empty(0), np.empty(0, str))
    rows: list[Agreement] = []
    before = 0
    for t in [*(p for p in POSITIONS if p < most), most]:
        here = (at > before) & (at <= t)
        free = wilson(sum(d is None or d > t for d in departures), len(departures), confidence=b.confidence)
        forced = b.resampled(f"forced/{t}", agree[here], 1, windows[here]) if here.any() else None
        rows.append({"position": t, "free": short(free), "forced": short(forced) if forced else None})
        before = t
    return rows


def _forced(columns: dict[str, list[Any]]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """(number of the token in its trajectory, whether both choose the same, trajectory) of each trajectory row."""
    is_trajectory = np.asarray(columns["set"]) == "trajectory"
    windows, positions, top1, top1_ref = (np.asarray(columns[k])[is_trajectory] for k in ("window", "position", "top1", "top1_ref"))
    names, index = np.unique(windows, return_inverse=True)
    first = np.array([positions[index == k].min() for k in range(len(names))], int)
    return positions - first[index] + 1, (top1 == top1_ref).astype(float), windows
