"""Refuse calibration text that is measured on: it would make a quantizer look better than it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.core.errors import DataError
from pipeline.core.explain import some
from pipeline.evalset import load_prompts, load_texts
from pipeline.evalset.tasks import load_task, local_tasks

WORD = re.compile(r"[\u3400-\u9fff]|[^\W\u3400-\u9fff]+")
SHARED_WORDS = 12  # a run of this many words in both is a copy, not a coincidence


def measured_rows(corpus: Path, prompts: Path) -> list[dict[str, Any]]:
    """Everything that is measured on: corpus, trajectory prompts, and every task of evalsets/tasks."""
    return load_texts(corpus) + load_prompts(prompts) + [row for name in local_tasks() for row in load_task(name)[1]]


def refuse_overlap(calibration: list[dict[str, Any]], measured: list[dict[str, Any]], source: str) -> None:
    """Raise `DataError` that names the calibration rows of `source` which are also measured on."""
    if shared := overlap(calibration, measured):
        raise DataError(f"{source} overlaps what is measured: {some(shared, 3, '; ')}")


def overlap(calibration: list[dict[str, Any]], evaluation: list[dict[str, Any]]) -> list[str]:
    """Rows of a calibration set that share a run of SHARED_WORDS words with a row that is measured on.
    A Chinese character counts as a word. All text of a row is compared."""
    seen: dict[tuple[str, ...], str] = {}
    for row in evaluation:
        for run in _runs(row):
            seen.setdefault(run, str(row["id"]))
    messages = []
    for row in calibration:
        other = next((seen[run] for run in _runs(row) if run in seen), None)
        if other is not None:
            messages.append(f"calibration row {row['id']!r} shares {SHARED_WORDS} words in a row with {other!r}")
    return messages


def _runs(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    text = " ".join(_strings({k: v for k, v in row.items() if k not in ("id", "domain", "slice", "cluster")}))
    words = WORD.findall(text.lower())
    return (tuple(words[i : i + SHARED_WORDS]) for i in range(len(words) - SHARED_WORDS + 1))


def _strings(value: Any) -> Iterator[str]:
    """Every text in a row, however deep."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _strings(part)
    else:
        yield str(value)
