"""Remove passwords and keys from text that leaves this machine (bundles, MLflow)."""

from __future__ import annotations

import os
import re
from typing import Any

NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
SHAPES = (
    re.compile(r"(?<=://)[^\s/@:\"']*:[^\s/@\"']+(?=@)"),  # user:password in an address
    re.compile(r"(?i)(?<=bearer )[\w.~+/-]{8,}=*"),
    re.compile(r"\b(?:hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|AKIA[A-Z0-9]{16})"),  # makers' keys
)
HIDDEN = "(hidden)"
TEXT = {".json", ".jsonl", ".yaml", ".lock", ".txt", ".md", ".html", ".csv", ".svg", ".log", ".py"}


def hide(text: str) -> str:
    """A text without anything like a password or key, and without the values of secret environment variables."""
    for name, value in os.environ.items():
        if NAMES.search(name) and len(value) >= 8:
            text = text.replace(value, HIDDEN)
    for pattern in SHAPES:
        text = pattern.sub(HIDDEN, text)
    return text


def hide_in(value: Any) -> Any:
    """`hide` applied to all texts in nested lists and dicts, except keys."""
    if isinstance(value, dict):
        return {k: hide_in(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [hide_in(v) for v in value]
    return hide(value) if isinstance(value, str) else value


def hide_bytes(data: bytes, suffix: str) -> bytes:
    """A file's bytes without secrets; the same object if nothing was hidden. Text is known by its suffix or as valid UTF-8."""
    try:
        text = data.decode("utf-8", errors="replace" if suffix in TEXT else "strict")
    except UnicodeDecodeError:
        return data
    return data if (clean := hide(text)) == text else clean.encode()
