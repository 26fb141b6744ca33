"""Cut texts into windows of tokens, turn prompts into tokens, and say whether a model takes chats, by its files alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.core.artifacts import read_json
from pipeline.core.droppings import data_files
from pipeline.core.errors import DataError
from pipeline.core.records import PromptRow, TextRow
from pipeline.divergence.store import Window
from pipeline.model.config import leading

MIN_TOKENS = 8
NAMED = "additional_chat_templates"


def corpus_windows(documents: Iterable[TextRow], tokenizer: Any, length: int, skipped: Counter[str] | None = None) -> list[Window]:
    """Cut each document into windows of at most `length` tokens. A rest of fewer than 8 tokens, or of padding only, is counted in
    `skipped` and not scored. If the tokenizer puts a BOS before a text, every window gets it, unscored."""
    lead = tuple(leading(tokenizer))
    pad = getattr(tokenizer, "pad_token_id", None)
    step = length - len(lead)
    skipped = Counter() if skipped is None else skipped
    windows = []
    for document in documents:
        ids = tokenizer(document["text"], add_special_tokens=False).input_ids
        for k, at in enumerate(range(0, len(ids), step)):
            piece, name = tuple(ids[at : at + step]), f"{document['id']}#{k}"
            if set(piece) == {pad}:
                skipped["padding"] += 1
            elif len(piece) < MIN_TOKENS:
                skipped["short"] += 1
            else:
                windows.append(Window(document["domain"], name, document["id"], lead + piece, 1, document["domain"]))
    return windows


def prompt_ids(row: PromptRow, tokenizer: Any) -> list[int]:
    """A prompt's tokens: plain text without an appended end token, or a chat in the model's template."""
    if "messages" not in row:
        return leading(tokenizer) + list(tokenizer(row["prompt"], add_special_tokens=False).input_ids)
    if not tokenizer.chat_template:
        raise DataError(f"prompt {row['id']} is a chat and the model has no chat template; choose plain prompts")
    text = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def chat_template(folder: Path) -> str | None:
    """A model's chat template, from any file that may hold one, or None. Raises `DataError` if none is the default."""
    single = folder / "chat_template.jinja"
    if single.exists():
        return single.read_text(encoding="utf-8")
    named: dict[str, str] = {file.stem: file.read_text(encoding="utf-8") for file in data_files(folder / NAMED, "*.jinja")}
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(folder / name).get("chat_template") if (folder / name).exists() else None
        if isinstance(template, str):
            return template
        named |= {t["name"]: t["template"] for t in template} if isinstance(template, list) else template or {}
    if named and "default" not in named:
        names = ", ".join(sorted(named))
        raise DataError(f"the model's chat templates are named ({names}) and none is the default; write one as chat_template.jinja")
    return named.get("default")


def why_not(messages: list[dict[str, str]], folder: Path) -> str | None:
    """Why a model does not take a chat, or None, also for a tokenizer with its own code."""
    from transformers.utils.chat_template_utils import render_jinja_template

    file = folder / "tokenizer_config.json"
    config = read_json(file) if file.exists() else {}
    try:
        template = chat_template(folder)
    except DataError as e:
        return f"is a chat, and {e}"
    if template is None:
        return None if config.get("auto_map") else "is a chat and the model has no chat template"
    tokens = {k: v["content"] if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token") and v}
    try:
        render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **tokens)
    except Exception as e:  # a template may raise anything
        return f"is a chat that the model's template refuses ({' '.join(str(e).split())[:200]})"
    return None


def refuse_chats(prompts: Iterable[PromptRow], folder: Path) -> None:
    """Raise `DataError` if a prompt is a chat that the model does not take."""
    for row in prompts:
        if "messages" in row and (why := why_not(row["messages"], folder)):
            raise DataError(f"prompt {row['id']!r} {why}; choose plain prompts")
