"""Cut texts into windows of tokens, and turn prompts into tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from pipeline.core.errors import DataError
from pipeline.core.records import PromptRow, TextRow
from pipeline.divergence.store import Window
from pipeline.model.config import leading

MIN_TOKENS = 8


def corpus_windows(documents: Iterable[TextRow], tokenizer: Any, length: int, skipped: Counter[str] | None = None) -> list[Window]:
    """Cut each document into windows of at most `length` tokens.
    A rest of fewer than 8 tokens, or of padding only, is counted in `skipped`: it has no score, not 0. If the tokenizer puts a BOS
    before a text, every window gets it, unscored: the model expects it."""
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
    """A prompt's tokens: plain text without the end that a tokenizer appends, or a chat in the model's template."""
    if "messages" not in row:
        return leading(tokenizer) + list(tokenizer(row["prompt"], add_special_tokens=False).input_ids)
    if not tokenizer.chat_template:
        raise DataError(f"prompt {row['id']} is a chat and the model has no chat template; choose plain prompts")
    text = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False).input_ids)
