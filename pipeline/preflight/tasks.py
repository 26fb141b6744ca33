"""Find what a model cannot answer of our tasks, by its files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.core.params import HowMany
from pipeline.core.records import Json as Row
from pipeline.evalset.chats import why_not
from pipeline.evalset.tasks import TASKS, is_chat, load_task, local_tasks, subset
from pipeline.model.config import text_config, window

ASKED = [{"role": "user", "content": "hello"}]


def unanswerable(tasks: dict[str, HowMany], model_dir: Path, allow_truncated: bool, seed: int) -> list[str]:
    """Tasks that a model cannot answer: chats without a template, items longer than its window, targets longer than a reply."""
    window, messages = longest(model_dir), []
    for name in tasks.keys() & local_tasks().keys():
        config, rows = load_task(name)
        if is_chat(config) and (why := why_not(ASKED, model_dir)):
            messages.append(f"task {name!r} {why}; take it out of the tier")
        if (model_dir / "tokenizer.json").exists():
            chosen = [rows[i] for i in subset(len(rows), tasks[name], seed)]
            messages += _target_too_long(name, config, chosen, model_dir)
            messages += _item_too_long(name, config, chosen, model_dir, window) if window and not allow_truncated else []
    return sorted(messages)


def longest(model_dir: Path) -> int | None:
    """The most tokens that a model reads, or None where its config does not say."""
    return window(text_config(model_dir)) if (model_dir / "config.json").exists() else None


def _item_too_long(name: str, config: dict[str, Any], rows: list[Row], model_dir: Path, window: int) -> list[str]:
    """The longest item past the window. Only plain columns are counted; a template can only add to them."""
    reply = _reply(config) or 0
    texts = {row["id"]: _asked(row, config) for row in rows}
    # a token has a byte at least
    counted = lengths({item: text for item, text in texts.items() if len(text.encode()) + reply > window}, model_dir)
    long = {item: n + reply for item, n in counted.items() if n + reply > window}
    of_reply = f", the {reply} of its reply among them," if reply else ""
    way = "shorten it, take the task out of the tier, or say evaluate.allow_truncated: true"
    return _longest(name, long, f" has {{}} tokens{of_reply} and the model's window is {window}", way)


def _longest(name: str, long: dict[str, int], fault: str, way: str) -> list[str]:
    """A message about the longest of a task's items that are too long, if there are any."""
    if not long:
        return []
    item = max(long, key=long.__getitem__)
    more = f" ({len(long) - 1} more are too long)" if len(long) > 1 else ""
    return [f"task {name!r} item {item!r}{fault.format(long[item])}{more}; {way}"]


def _reply(config: dict[str, Any]) -> int | None:
    """The most tokens of a reply, or None where nothing is replied or the task does not say."""
    most = (config.get("generation_kwargs") or {}).get("max_gen_toks") if config.get("output_type") == "generate_until" else None
    return most if isinstance(most, int) else None


def _target_too_long(name: str, config: dict[str, Any], rows: list[Row], model_dir: Path) -> list[str]:
    """The item whose target is furthest past the tokens of a reply: it could never be answered rightly. The shortest of an item's
    targets counts, since any of them may match."""
    most = _reply(config)
    if most is None:
        return []
    asked = {row["id"]: _targets(row, config) for row in rows}
    # a token has a byte at least; after a space, as a reply begins, there may be fewer
    doubtful = {item: texts for item, texts in asked.items() if texts and min(len(text.encode()) for text in texts) > most}
    counted = lengths({t: t for texts in doubtful.values() for text in texts for t in (text, f" {text}")}, model_dir)
    fewest = {item: min(counted[t] for text in texts for t in (text, f" {text}")) for item, texts in doubtful.items()}
    long = {item: n for item, n in fewest.items() if n > most}
    way = f"shorten it, or raise generation_kwargs.max_gen_toks in {(TASKS / name).with_suffix('.yaml')}"
    return _longest(name, long, f": its target has {{}} tokens and a reply at most {most}", way)


def _targets(row: Row, config: dict[str, Any]) -> list[str]:
    """What an item's reply is compared with, where a plain column holds it."""
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
    """What the model reads of an item in one piece, as far as plain columns say it; nothing where a text is rolled through."""
    if config.get("output_type") == "loglikelihood_rolling":
        return ""
    context = row.get(str(config.get("doc_to_text")), "")
    choices = row.get(str(config.get("doc_to_choice")), [])
    longest = max((c for c in choices if isinstance(c, str)), key=len, default="") if isinstance(choices, list) else ""
    return (context if isinstance(context, str) else "") + str(config.get("target_delimiter", " ")) * bool(longest) + longest
