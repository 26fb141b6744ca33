"""The worst tokens, items and replies of a variant, with their texts, as capped lists with their totals."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from pipeline.core.errors import ArtifactError
from pipeline.evalset.tasks import load_task, local_tasks
from pipeline.metrics import degeneration, generation

Row = dict[str, Any]
SHOWN = 20
CONTEXT = 32  # tokens of context before a worst token
HEAD, TAIL = 200, 400  # characters kept of a longer prompt


class Words:
    """Token ids to text, by the base's tokenizer.json; without one, ids stand for words and `missing` says so."""

    def __init__(self, folder: Path) -> None:
        self.missing: str | None = None
        file = folder / "tokenizer.json"
        if not file.exists():
            self._tokenizer: Any = None
            self.missing = f"{folder} has no tokenizer.json: tokens are shown as ids"
            return
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(file))
        self._anchor = self._tokenizer.encode(".", add_special_tokens=False).ids[-1:]
        self._start = self._tokenizer.decode(self._anchor, skip_special_tokens=False)

    def text(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            return "".join(f"<{i}>" for i in ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def piece(self, token: int) -> str:
        """A token as it stands within a text: some decoders drop the space in front of a first word."""
        if self._tokenizer is None:
            return f"<{token}>"
        whole = self.text([*self._anchor, token])
        return whole[len(self._start) :] if whole.startswith(self._start) else self.text([token])


def _capped(rows: list[Row], total: int, **more: Any) -> Row:
    return {"shown": len(rows), "total": total, **more, "rows": rows}


def worst_tokens(columns: dict[str, list[Any]], windows: list[Row], words: Words) -> Row:
    """The tokens with the largest divergence (what is not finite first), with context and what both would have said."""
    ids = {w["window"]: w["token_ids"] for w in windows}
    klds = [kld if math.isfinite(kld) else math.inf for kld in columns["kld"]]
    ranked = sorted(range(len(klds)), key=klds.__getitem__, reverse=True)[:SHOWN]
    return _capped([_token(columns, k, ids, words) for k in ranked], len(klds))


def _token(columns: dict[str, list[Any]], k: int, ids: dict[str, list[int]], words: Words) -> Row:
    window, position = columns["window"][k], columns["position"][k]
    token = columns["token_id"][k]
    known = ids.get(window, [])
    if known[position : position + 1] != [token]:
        raise ArtifactError(f"token {position} of window {window} is not the reference's; run `dvc repro`")
    before = words.text(known[max(0, position - CONTEXT) : position]).lstrip("\ufffd")
    kld = columns["kld"][k]
    return {
        "set": columns["set"][k], "document": columns["document"][k], "window": window, "position": position,
        "kld": kld if math.isfinite(kld) else None, "not_finite": not math.isfinite(kld),
        "context": ("…" if position > CONTEXT else "") + before,
        "token": words.piece(token), "token_id": token,
        "reference_says": words.piece(columns["top1_ref"][k]), "reference_says_id": columns["top1_ref"][k],
        "variant_says": words.piece(columns["top1"][k]), "variant_says_id": columns["top1"][k],
        "p_reference": math.exp(columns["logp_ref"][k]), "p_variant": math.exp(columns["logp"][k]),
    }  # fmt: skip


class Questions:
    """What was asked, by task and doc_id: rows of the local tasks; lm-eval's own are not kept here."""

    def __init__(self) -> None:
        self._local = local_tasks()
        self._tasks: dict[str, tuple[dict[str, Any], list[Row]]] = {}

    def of(self, answer: Row) -> Row:
        """{prompt, choices}; either is null where it is not known, and `unknown` says why."""
        task = answer["task"]
        if task not in self._local:
            return {"prompt": None, "choices": None, "unknown": "a task of lm-eval's own, whose prompts are not kept"}
        if task not in self._tasks:
            self._tasks[task] = load_task(task)
        config, items = self._tasks[task]
        item = items[answer["doc_id"]] if answer["doc_id"] < len(items) else {}
        if (now := item.get("id")) != answer["item"]:
            raise ArtifactError(f"task {task} item {answer['doc_id']} is {now!r} now, was {answer['item']!r}; `dvc repro`")
        asked, column = config.get("doc_to_text"), config.get("doc_to_choice")
        choices = item.get(column) if isinstance(column, str) else column
        if asked == "":
            prompt = ""
        elif isinstance(asked, str) and asked in item:
            prompt = str(item[asked])
        else:  # made by a template: the row it was made from
            prompt = json.dumps(item, ensure_ascii=False)
        return {"prompt": shortened(prompt), "choices": choices if isinstance(choices, list) else None, "unknown": None}


def shortened(text: str) -> str:
    """A long prompt's head and tail, with how much is left out between."""
    left = len(text) - HEAD - TAIL
    return text if left <= 0 else f"{text[:HEAD]} […{left} characters…] {text[-TAIL:]}"


def scored_pairs(pairs: list[tuple[Row, Row]]) -> list[tuple[Row, Row]]:
    """Pairs that have a right and wrong; of a task with several filters the first, as the metrics take it."""
    first = {ours["task"]: ours["filter"] for ours, _ in reversed(pairs)}
    return [(o, t) for o, t in pairs if o["filter"] == first[o["task"]] and o["acc"] is not None and t["acc"] is not None]


def margin(answer: Row) -> float | None:
    """Log-likelihood of the right choice over the best wrong one, nats; None where there are no choices."""
    values, target = answer["loglikelihoods"], answer["target"]
    if not values or len(values) < 2 or not isinstance(target, int) or not 0 <= target < len(values):
        return None
    return float(values[target] - max(v for k, v in enumerate(values) if k != target))


def worst_items(pairs: list[tuple[Row, Row]], questions: Questions) -> Row:
    """The items whose right choice lost most of its log-likelihood margin, whether or not the answer changed."""
    margins = [(margin(ours), margin(theirs), ours, theirs) for ours, theirs in pairs]
    falls = [(y - x, ours, theirs) for x, y, ours, theirs in margins if x is not None and y is not None]
    falls.sort(key=lambda f: -f[0])
    rows = [{**_item(ours, theirs, questions), "fall": fall} for fall, ours, theirs in falls[:SHOWN] if fall > 0]
    return _capped(rows, len(falls))


def flips(pairs: list[tuple[Row, Row]], questions: Questions, to_right: bool) -> Row:
    """Items that changed between right and wrong, spread over the tasks where not all are shown; by task the totals."""
    changed = [(o, t) for o, t in pairs if (o["acc"] > 0.5) is to_right and (t["acc"] > 0.5) is not to_right]
    turn: Counter[str] = Counter()
    ranked = []
    for k, (ours, _) in enumerate(changed):
        ranked.append((turn[ours["task"]], k))
        turn[ours["task"]] += 1
    chosen = sorted(k for _, k in sorted(ranked)[:SHOWN])
    return _capped([_item(*changed[k], questions) for k in chosen], len(changed), of=len(pairs), by_task=dict(turn))


def _item(ours: Row, theirs: Row, questions: Questions) -> Row:
    asked = questions.of(ours)
    choices = asked.pop("choices")
    return {
        "task": ours["task"], "item": ours["item"], **asked, "right": _answer(ours["target"], choices),
        "reference_answers": _answer(theirs["prediction"], choices), "variant_answers": _answer(ours["prediction"], choices),
        "margin_reference": margin(theirs), "margin_variant": margin(ours),
    }  # fmt: skip


def _answer(value: Any, choices: list[str] | None) -> str:
    """An answer in words: a choice by its text, the first of several accepted ones."""
    if isinstance(value, int):
        return choices[value] if choices and 0 <= value < len(choices) else f"choice {value + 1}"
    return str(value[0]) if isinstance(value, list) and value else str(value)


def worst_replies(pairs: list[tuple[Row, Row]]) -> Row:
    """Replies beside the reference's: those with a fault that the reference's has not first, then the earliest to differ."""
    rows = []
    for (ours, theirs), (own, other) in zip(pairs, generation.checked(pairs)):
        rows.append({
            "prompt_id": ours["id"], "prompt": shortened(ours["prompt"]), "reference_reply": theirs["text"],
            "variant_reply": ours["text"], "departs_at": degeneration.departure(ours["token_ids"], theirs["token_ids"]),
            "faults": [k for k, bad in own.items() if bad], "reference_faults": [k for k, bad in other.items() if bad],
        })  # fmt: skip
    differing = [r for r in rows if r["departs_at"] is not None]
    differing.sort(key=lambda r: (not set(r["faults"]) - set(r["reference_faults"]), r["departs_at"]))
    return _capped(differing[:SHOWN], len(differing), of=len(rows))
