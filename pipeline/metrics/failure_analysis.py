"""A variant's failures: how its divergence is spread, and the worst tokens, items and replies with their texts.

Divergence has two extremes with different causes. Too few levels move nearly all tokens a little: *uniform shift*. Clipped extremes
ruin some tokens and leave the rest alone: *isolated tokens*. `neither` is possible too. Lists are capped and state their totals.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeline.core.errors import ArtifactError
from pipeline.core.records import AnswerRow, Cases, FailureLists, Group, ItemPair, Json, ReplyPair, Spread, WindowRow, WorstToken
from pipeline.metrics import answers, generation
from pipeline.metrics.builder import Builder, whole
from pipeline.metrics.definitions import position_parts
from pipeline.stats.intervals import Estimate, cluster_bootstrap

Columns = dict[str, list[Any]]
Tasks = dict[str, tuple[Json, list[Json]]]  # {local task: its config and its items}
SHOWN = 20
CONTEXT = 32  # tokens of context before a worst token
HEAD, TAIL = 200, 400  # characters kept of a longer prompt

WORST = 0.01  # the tail examined
FEW_TOKENS = 1000  # with fewer, the worst 1 % are under ten tokens, and chance decides what they carry
ISOLATED = 0.5  # without tokens that carry over half of all divergence the variant would be twice as close
# A lognormal spread, the usual shape, meets both up to sigma 1.48. The first nine variants measured here, of 8 to 4 bits
# by seven methods, had 7 to 13 % on their worst 1 % and a median of 0.59 to 0.77 of the mean.
UNIFORM_SHARE = 0.2
UNIFORM_MEDIAN = 1 / 3
TWICE = 2.0  # a group stands out if its mean is over twice the rest's, and ...
FEW_IN_GROUP = 50  # ... it has so many tokens, and the two intervals do not touch

KINDS = {
    "uniform": "uniform shift (a matter of bits, range or method, not of a few outliers)",
    "isolated": "isolated tokens (as clipped extremes do: keep the layers they pass through, or widen the range)",
    "neither": "neither uniform nor isolated (between a uniform shift and isolated tokens)",
}


def lists(
    b: Builder, columns: Columns | None, windows: list[WindowRow], answered: list[answers.AnswerPair] | None,
    replied: list[generation.Pair] | None, words: Words, tasks: Tasks,
) -> FailureLists:  # fmt: skip
    """All that report and MLflow show of failures, null without rows. columns: artifacts/tokens; windows: the reference's."""
    found: FailureLists = dict.fromkeys(FailureLists.__annotations__)  # type: ignore[assignment]
    if columns is not None:
        by: dict[str, ArrayLike] = {"domain": columns["set"], "token class": columns["token_class"]}
        by["position"] = position_parts(columns["position"])
        found["spread"] = spread_of(b, columns["kld"], columns["document"], by)
        found["worst_tokens"] = worst_tokens(columns, windows, words)
    if answered is not None:
        scored = [p for p in answers.once_each(answered) if p[0]["acc"] is not None]
        found["worst_items"] = worst_items(scored, tasks)
        found["flips_to_wrong"], found["flips_to_right"] = (flips(scored, tasks, to_right) for to_right in (False, True))
    found["replies"] = None if replied is None else worst_replies(replied)
    return found


class Words:
    """Token ids to text by the base's tokenizer; without one (None), ids stand for words."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        if tokenizer is not None:
            self._anchor: list[int] = tokenizer.encode(".", add_special_tokens=False).ids[-1:]
            self._start = self.text(self._anchor)

    def text(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            return "".join(f"<{i}>" for i in ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def piece(self, token: int) -> str:
        """A token as within a text: some decoders drop the space before a first word."""
        if self._tokenizer is None:
            return self.text([token])
        text = self.text([*self._anchor, token])
        return text[len(self._start) :] if text.startswith(self._start) else self.text([token])


def worst_tokens(columns: Columns, windows: list[WindowRow], words: Words) -> Cases[WorstToken]:
    """The tokens with the largest divergence, non-finite first, with their context and both predictions."""
    ids = {w["window"]: w["token_ids"] for w in windows}
    klds = [kld if math.isfinite(kld) else math.inf for kld in columns["kld"]]
    ranked = sorted(range(len(klds)), key=klds.__getitem__, reverse=True)[:SHOWN]
    rows = [_token({name: values[k] for name, values in columns.items()}, ids, words) for k in ranked]
    return {"shown": len(rows), "total": len(klds), "rows": rows}


def _token(row: Json, ids: dict[str, list[int]], words: Words) -> WorstToken:
    window, position, kld = row["window"], row["position"], row["kld"]
    before = ids.get(window, [])[: position + 1]
    if before[position:] != [row["token_id"]]:
        raise ArtifactError(f"token {position} of window {window} is not the reference's; run `dvc repro`")
    context = words.text(before[max(0, position - CONTEXT) : position]).lstrip("\ufffd")
    return {
        "set": row["set"], "document": row["document"], "window": window, "position": position,
        "kld": kld if math.isfinite(kld) else None, "not_finite": not math.isfinite(kld),
        "context": ("…" if position > CONTEXT else "") + context,
        "token": words.piece(row["token_id"]), "token_id": row["token_id"],
        "reference_says": words.piece(row["top1_ref"]), "reference_says_id": row["top1_ref"],
        "variant_says": words.piece(row["top1"]), "variant_says_id": row["top1"],
        "p_reference": math.exp(row["logp_ref"]), "p_variant": math.exp(row["logp"]),
    }  # fmt: skip


def margin(answer: AnswerRow) -> float | None:
    """Log-likelihood of the right choice over the best wrong one, nats; None without choices."""
    values, target = answer["loglikelihoods"], answer["target"]
    if not values or len(values) < 2 or not isinstance(target, int) or not 0 <= target < len(values):
        return None
    return float(values[target] - max(v for k, v in enumerate(values) if k != target))


def worst_items(pairs: list[answers.AnswerPair], tasks: Tasks) -> Cases[ItemPair]:
    """The items whose right choice lost most of its margin, whether or not the answer changed."""
    margins = [(margin(row), margin(other), row, other) for row, other in pairs]
    falls = [(y - x, row, other) for x, y, row, other in margins if x is not None and y is not None]
    falls.sort(key=lambda f: -f[0])
    rows: list[ItemPair] = [{**_item(row, other, tasks), "fall": fall} for fall, row, other in falls[:SHOWN] if fall > 0]
    return {"shown": len(rows), "total": len(falls), "rows": rows}


def flips(pairs: list[answers.AnswerPair], tasks: Tasks, to_right: bool) -> Cases[ItemPair]:
    """Items that changed between right and wrong, taken evenly from all tasks if not all are shown; totals by task."""
    changed = [(row, other) for row, other in pairs if answers.right(row) is to_right and answers.right(other) is not to_right]
    totals: Counter[str] = Counter()
    ranked = []
    for k, (row, _) in enumerate(changed):
        ranked.append((totals[row["task"]], k))
        totals[row["task"]] += 1
    chosen = sorted(k for _, k in sorted(ranked)[:SHOWN])
    rows = [_item(*changed[k], tasks) for k in chosen]
    return {"shown": len(rows), "total": len(changed), "of": len(pairs), "by_task": dict(totals), "rows": rows}


def _item(row: AnswerRow, other: AnswerRow, tasks: Tasks) -> ItemPair:
    known = row["task"] in tasks
    prompt, choices = _question(row, *tasks[row["task"]]) if known else (None, None)
    return {
        "task": row["task"], "item": row["item"], "prompt": prompt,
        "unknown": None if known else "a task of lm-eval's own, whose prompts are not kept",
        "right": _answer(row["target"], choices), "reference_answers": _answer(other["prediction"], choices),
        "variant_answers": _answer(row["prediction"], choices),
        "margin_reference": margin(other), "margin_variant": margin(row),
    }  # fmt: skip


def _question(answer: AnswerRow, config: Json, items: list[Json]) -> tuple[str, list[str] | None]:
    """(prompt, choices) of an item of a local task; if a template makes the prompt, its row instead."""
    item = items[answer["doc_id"]] if answer["doc_id"] < len(items) else {}
    if (now := item.get("id")) != answer["item"]:
        raise ArtifactError(f"task {answer['task']} item {answer['doc_id']} is {now!r} now, was {answer['item']!r}; `dvc repro`")
    asked, column = config.get("doc_to_text"), config.get("doc_to_choice")
    choices = item.get(column) if isinstance(column, str) else column
    prompt = "" if asked == "" else str(item[asked]) if asked in item else json.dumps(item, ensure_ascii=False)
    return shortened(prompt), choices if isinstance(choices, list) else None


def shortened(text: str) -> str:
    """Head and tail of a long prompt, with the number of characters left out."""
    left = len(text) - HEAD - TAIL
    return text if left <= 0 else f"{text[:HEAD]} […{left} characters…] {text[-TAIL:]}"


def _answer(value: Any, choices: list[str] | None) -> str:
    """An answer in words: the text of a choice, or the first of several accepted answers."""
    if isinstance(value, int):
        return choices[value] if choices and 0 <= value < len(choices) else f"choice {value + 1}"
    return str(value[0]) if isinstance(value, list) and value else str(value)


def worst_replies(pairs: list[generation.Pair]) -> Cases[ReplyPair]:
    """Replies beside the reference's: first those with a fault that the reference's lacks, then by where they differ."""
    differing: list[tuple[bool, int, ReplyPair]] = []
    for (row, other), (faults, reference_faults) in zip(pairs, generation.faults(pairs)):
        departs_at = generation.departure(row["token_ids"], other["token_ids"])
        if departs_at is None:
            continue
        names, reference_names = ([k for k, bad in flags.items() if bad] for flags in (faults, reference_faults))
        differing.append((not set(names) - set(reference_names), departs_at, {
            "prompt_id": row["id"], "prompt": shortened(row["prompt"]), "reference_reply": other["text"],
            "variant_reply": row["text"], "departs_at": departs_at, "faults": names, "reference_faults": reference_names,
        }))  # fmt: skip
    differing.sort(key=lambda d: d[:2])
    return {
        "shown": len(differing[:SHOWN]), "total": len(differing), "of": len(pairs), "rows": [row for *_, row in differing[:SHOWN]],
    }  # fmt: skip


def spread_of(b: Builder, kld: ArrayLike, documents: ArrayLike, groups: dict[str, ArrayLike]) -> Spread:
    """How divergence is spread, with the numbers behind it. kld: [n], nats; documents: [n], resampled as wholes; groups: {grouped
    by: [n] labels}. kind: uniform, isolated, neither, none (no divergence), too few, or not finite. settled: the interval of the
    worst tokens' share lies on one side of the bound that decided."""
    x, docs = np.asarray(kld, float), np.asarray(documents)
    n = len(x)
    shape: Spread = {
        "kind": "too few", "settled": False, "n": n, "worst_share": None, "median_over_mean": None, "groups": [],
        "words": f"{n} tokens are too few to say how divergence is spread ({FEW_TOKENS} are needed)",
    }  # fmt: skip
    infinite = int((~np.isfinite(x)).sum())
    if infinite:
        return {**shape, "kind": "not finite", "words": f"{infinite} of {n} tokens have no finite divergence: see those first"}
    if n and not x.any():
        return {**shape, "kind": "none", "settled": True, "words": f"no divergence in any of {n} tokens"}
    if n < FEW_TOKENS:
        return shape
    ratio = partial(cluster_bootstrap, confidence=b.confidence, resamples=b.resamples, rng=b.rng("spread"))
    worst = np.zeros(n)  # resampling does not change which tokens are the worst
    worst[np.argsort(-x, kind="stable")[: int(np.ceil(WORST * n))]] = 1
    share = ratio(x * worst, x, docs, bounds=(0, 1))
    median = float(np.median(x) / x.mean())
    kind, settled = _kind(share, median)

    def mean(chosen: NDArray[np.bool_]) -> Estimate:
        return ratio(x[chosen], 1, docs[chosen], bounds=(0, np.inf))

    rows = []
    for by, values in groups.items():
        labels = np.asarray(values)
        for name in sorted(set(labels.tolist())):
            chosen = labels == name
            if min(chosen.sum(), (~chosen).sum()) >= FEW_IN_GROUP:
                rows.append(_group(by, str(name), mean(chosen), mean(~chosen)))
    return {
        "kind": kind, "settled": settled, "n": n, "worst_share": whole(share), "median_over_mean": median,
        "groups": rows, "words": f"{_share_words(kind, settled, share, median)}. {_group_words(rows)}",
    }  # fmt: skip


def _kind(share: Estimate, median: float) -> tuple[str, bool]:
    value = share.value or 0.0
    kind = "isolated" if value > ISOLATED else "uniform" if value < UNIFORM_SHARE and median >= UNIFORM_MEDIAN else "neither"
    if share.low is None or share.high is None:
        return kind, False
    low, high = {"isolated": (ISOLATED, 1.0), "uniform": (0.0, UNIFORM_SHARE), "neither": (0.0, ISOLATED)}[kind]
    if kind == "neither" and median >= UNIFORM_MEDIAN:  # the share alone kept it from being uniform
        low = UNIFORM_SHARE
    return kind, low <= share.low and share.high <= high


def _group(by: str, name: str, mean: Estimate, rest: Estimate) -> Group:
    ratio = mean.value / rest.value if mean.value is not None and rest.value else None
    apart = mean.low is not None and rest.high is not None and mean.low > rest.high
    return {
        "by": by, "group": name, "mean": whole(mean), "rest": whole(rest), "ratio": ratio,
        "stands_out": apart and (mean.value or 0.0) > TWICE * (rest.value or 0.0),
    }  # fmt: skip


def _share_words(kind: str, settled: bool, share: Estimate, median: float) -> str:
    limits = "" if share.low is None or share.high is None else f" [{100 * share.low:.0f}, {100 * share.high:.0f}]"
    text = (
        f"{KINDS[kind]}: the worst 1 % of {share.n} tokens carry {100 * (share.value or 0):.0f} %{limits} of all "
        f"divergence, and the median token has {median:.2f} of the mean"
    )
    if settled:
        return text
    return f"{text}; {'the interval reaches past the bound, so this is not settled' if limits else 'no interval: not settled'}"


def _group_words(rows: list[Group]) -> str:
    alone = sum(r["mean"]["low"] is None for r in rows)
    groups = "1 group" if alone == 1 else f"{alone} groups"
    note = f" (nothing is claimed of {groups} without an interval: too few documents)" if alone else ""
    outstanding = sorted((r for r in rows if r["stands_out"]), key=lambda r: -(r["ratio"] or 0.0))
    if not outstanding:
        return f"No {' or '.join(dict.fromkeys(r['by'] for r in rows)) or 'group'} stands out{note}"
    named = (
        f"{r['by']} {r['group']} ({r['mean']['value']:.3g} nats, {r['ratio']:.1f} times the rest, n = {r['mean']['n']})"
        for r in outstanding
    )
    return f"It concentrates on {'; '.join(named)}{note}"
