"""Whether a model takes chats, by its files alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pipeline.core.artifacts import read_json
from pipeline.core.droppings import data_files
from pipeline.core.errors import DataError
from pipeline.core.records import PromptRow

NAMED = "additional_chat_templates"


def chat_template(folder: Path) -> str | None:
    """A model's chat template, from any of the files that may hold one, or None. Raises `DataError` if none is the default."""
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
        raise DataError(
            f"the model's chat templates are named ({', '.join(sorted(named))}) and none is the default; "
            "write the one to use as chat_template.jinja"
        )
    return named.get("default")


def why_not(messages: list[dict[str, str]], folder: Path) -> str | None:
    """Why a model does not take a chat, or None; a tokenizer with code of its own is trusted to take it."""
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
    except Exception as e:  # a template raises what it likes
        return f"is a chat that the model's template refuses ({' '.join(str(e).split())[:200]})"
    return None


def refuse_chats(prompts: Iterable[PromptRow], folder: Path) -> None:
    """Raise `DataError` if one of the prompts is a chat that the model does not take."""
    for row in prompts:
        if "messages" in row and (why := why_not(row["messages"], folder)):
            raise DataError(f"prompt {row['id']!r} {why}; choose plain prompts")
