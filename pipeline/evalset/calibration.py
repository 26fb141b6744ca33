"""Calibration text: cut into rows for quantizers, and refused if it is measured on, which would favour a quantizer."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.core import artifacts
from pipeline.core.errors import DataError
from pipeline.core.explain import some
from pipeline.core.records import CalibrationFacts
from pipeline.evalset import load_prompts, load_texts
from pipeline.evalset.tasks import load_task, local_tasks

WORD = re.compile(r"[\u3400-\u9fff]|[^\W\u3400-\u9fff]+")
SHARED_WORDS = 12  # a run of this many words in both is a copy, not a coincidence
AnyRow = Mapping[str, Any]  # a text's, a prompt's or a task's


def cut(documents: list[list[int]], *, rows: int, tokens: int, seed: int) -> list[list[int]]:
    """At most `rows` rows of `tokens` token ids: documents in seeded order, joined and cut into equal lengths."""
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    stream = [t for i in order for t in documents[i]]
    return [stream[at : at + tokens] for at in range(0, len(stream) - tokens + 1, tokens)][:rows]


class Calibration:
    """The token rows that `calibrate` wrote, read only if a quantizer asks."""

    def __init__(self, folder: Path = artifacts.CALIBRATION) -> None:
        self.folder = folder
        self.facts: CalibrationFacts | None = None  # for a variant's manifest; None if no quantizer asked for rows

    def token_rows(self) -> list[list[int]]:
        """Rows of equal length, in the order of drawing."""
        manifest = artifacts.read_manifest(self.folder)
        artifacts.verify_files(self.folder, manifest)
        facts: Any = {k: v for k, v in manifest.items() if k not in ("status", "versions", "files")}
        self.facts = facts
        return [row["token_ids"] for row in artifacts.read_jsonl(self.folder / "rows.jsonl")]


def measured_rows(corpus: Path, prompts: Path) -> list[AnyRow]:
    """All measured text: corpus, trajectory prompts, and every task of evalsets/tasks."""
    return [*load_texts(corpus), *load_prompts(prompts), *(row for name in local_tasks() for row in load_task(name)[1])]


def refuse_overlap(rows: Iterable[AnyRow], measured: Iterable[AnyRow], source: str) -> None:
    """Raise `DataError` with the rows of `source` that are also measured on."""
    if shared := overlap(rows, measured):
        raise DataError(f"{source} overlaps what is measured: {some(shared, 3, '; ')}")


def overlap(rows: Iterable[AnyRow], measured: Iterable[AnyRow]) -> list[str]:
    """A sentence for each row that shares a run of SHARED_WORDS words with a measured row. A Chinese character counts as a word.
    All text of a row is compared."""
    first_row: dict[tuple[str, ...], str] = {}
    for row in measured:
        for run in _runs(row):
            first_row.setdefault(run, str(row["id"]))
    messages = []
    for row in rows:
        other = next((first_row[run] for run in _runs(row) if run in first_row), None)
        if other is not None:
            messages.append(f"row {row['id']!r} shares {SHARED_WORDS} words in a row with {other!r}")
    return messages


def _runs(row: AnyRow) -> Iterator[tuple[str, ...]]:
    words = WORD.findall(_text([v for k, v in row.items() if k not in ("id", "domain", "slice", "cluster")]).lower())
    return (tuple(words[i : i + SHARED_WORDS]) for i in range(len(words) - SHARED_WORDS + 1))


def _text(value: Any) -> str:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return str(value) if parts is None else " ".join(map(_text, parts))
