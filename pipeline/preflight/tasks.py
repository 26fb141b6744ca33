"""What of our tasks a model cannot answer, by its files alone: chats without a template, items longer than its window,
targets longer than a reply may get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.core.params import HowMany
from pipeline.evalset import Row
from pipeline.evalset.chats import why_not
from pipeline.evalset.tasks import TASKS, is_chat, load_task, local_tasks, subset
from pipeline.model.config import text_config, window

ASKED = [{"role": "user", "content": "hello"}]


def unfit(tasks: dict[str, HowMany], model_dir: Path, allow_truncated: bool, seed: int) -> list[str]:
    """What of our tasks a model cannot answer, in words: chats without a template, items longer than its window, targets longer
    than a reply may get."""
    window, found = longest(model_dir), []
    for name in tasks.keys() & local_tasks().keys():
        config, rows = load_task(name)
        if is_chat(config) and (why := why_not(ASKED, model_dir)):
            found.append(f"task {name!r} {why}; take it out of the tier")
        if (model_dir / "tokenizer.json").exists():
            count = tasks[name]
            chosen = [rows[i] for i in subset(len(rows), None if isinstance(count, str) else count, seed)]
            found += _out_of_reach(name, config, chosen, model_dir)
            found += _too_long(name, config, chosen, model_dir, window) if window and not allow_truncated else []
    return sorted(found)


def longest(model_dir: Path) -> int | None:
    """The most tokens that a model reads, or None where its config does not say."""
    return window(text_config(model_dir)) if (model_dir / "config.json").exists() else None


def _too_long(name: str, config: dict[str, Any], rows: list[Row], model_dir: Path, window: int) -> list[str]:
    """The longest item past the window, in words. A template can only add to what is counted here: the columns named outright."""
    reply = _reply(config) or 0
    texts = {row["id"]: _asked(row, config) for row in rows}
    # a token has a byte at least
    counted = lengths({item: text for item, text in texts.items() if len(text.encode()) + reply > window}, model_dir)
    long = {item: n + reply for item, n in counted.items() if n + reply > window}
    if not long:
        return []
    item = max(long, key=long.__getitem__)
    of_reply = f", the {reply} of its reply among them," if reply else ""
    more = f" ({len(long) - 1} more are too long)" if len(long) > 1 else ""
    told = f"task {name!r} item {item!r} has {long[item]} tokens{of_reply} and the model's window is {window}{more}"
    return [f"{told}; shorten it, take the task out of the tier, or say evaluate.allow_truncated: true"]


def _reply(config: dict[str, Any]) -> int | None:
    """The most tokens of a reply, or None where nothing is replied or the task does not say."""
    most = (config.get("generation_kwargs") or {}).get("max_gen_toks") if config.get("output_type") == "generate_until" else None
    return most if isinstance(most, int) else None


def _out_of_reach(name: str, config: dict[str, Any], rows: list[Row], model_dir: Path) -> list[str]:
    """The item whose target is furthest past the tokens of a reply, in words: it could never be answered rightly. Of several
    targets of an item the shortest counts, since any of them may match."""
    most = _reply(config)
    if most is None:
        return []
    asked = {row["id"]: _targets(row, config) for row in rows}
    # a token has a byte at least; after a space, as a reply begins, there may be fewer
    doubtful = {item: own for item, own in asked.items() if own and min(len(text.encode()) for text in own) > most}
    counted = lengths({text: text for own in doubtful.values() for one in own for text in (one, f" {one}")}, model_dir)
    fewest = {item: min(counted[text] for one in own for text in (one, f" {one}")) for item, own in doubtful.items()}
    long = {item: n for item, n in fewest.items() if n > most}
    if not long:
        return []
    item = max(long, key=long.__getitem__)
    more = f" ({len(long) - 1} more are too long)" if len(long) > 1 else ""
    way = f"shorten it, or raise generation_kwargs.max_gen_toks in {(TASKS / name).with_suffix('.yaml')}"
    return [f"task {name!r} item {item!r}: its target has {long[item]} tokens and a reply at most {most}{more}; {way}"]


def _targets(row: Row, config: dict[str, Any]) -> list[str]:
    """What an item's reply is compared with, as far as a plain column says it."""
    value = row.get(str(config.get("doc_to_target")), [])
    return [text.strip() for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def lengths(texts: dict[str, str], model_dir: Path) -> dict[str, int]:
    """{item: tokens of its text}, without special ones."""
    if not texts or not (model_dir / "tokenizer.json").exists():
        return {}
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return {item: len(tokenizer.encode(text, add_special_tokens=False).ids) for item, text in texts.items()}


def _asked(row: Row, config: dict[str, Any]) -> str:
    """What the model is to read of an item in one piece, as far as plain columns say it; a text that is rolled through is none."""
    if config.get("output_type") == "loglikelihood_rolling":
        return ""
    context = row.get(str(config.get("doc_to_text")), "")
    choices = row.get(str(config.get("doc_to_choice")), [])
    longest = max((c for c in choices if isinstance(c, str)), key=len, default="") if isinstance(choices, list) else ""
    return (context if isinstance(context, str) else "") + str(config.get("target_delimiter", " ")) * bool(longest) + longest
