"""Calibration rows: what a quantizer sees of the world before it rounds."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import DataError
from pipeline.evalset import load_texts, sets_digest

WORD = re.compile(r"[\u3400-\u9fff]|[^\W\u3400-\u9fff]+")
SHARED_WORDS = 12  # a run of this many words in both is a copy, not a coincidence


def overlap(calibration: list[dict[str, Any]], evaluation: list[dict[str, Any]]) -> list[str]:
    """Rows of a calibration set that share a run of SHARED_WORDS words with a row that is measured on.

    A Chinese character counts as a word. rows: anything with an id; all their text is compared. Calibrating on what is
    measured makes a quantizer look better than it is.
    """
    seen: dict[tuple[str, ...], str] = {}
    for row in evaluation:
        for run in _runs(row):
            seen.setdefault(run, str(row["id"]))
    found = []
    for row in calibration:
        other = next((seen[run] for run in _runs(row) if run in seen), None)
        if other is not None:
            found.append(f"calibration row {row['id']!r} shares {SHARED_WORDS} words in a row with {other!r}")
    return found


def _runs(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    text = " ".join(str(v) for k, v in row.items() if k not in ("id", "domain", "slice", "cluster"))
    words = WORD.findall(text.lower())
    return (tuple(words[i : i + SHARED_WORDS]) for i in range(len(words) - SHARED_WORDS + 1))


class Calibration:
    """Token rows of equal length, cut from a text set in seeded order; built only for quantizers that ask."""

    def __init__(self, path: Path, *, rows: int, tokens: int, seed: int, tokenizer_dir: Path) -> None:
        self.path, self.rows, self.tokens, self.seed, self.tokenizer_dir = path, rows, tokens, seed, tokenizer_dir
        self.facts: dict[str, Any] | None = None  # for the manifest; None if no quantizer asked for rows

    def token_rows(self) -> list[list[int]]:
        """`rows` rows of `tokens` tokens each; fewer (and recorded) where the text does not suffice.

        Raises `DataError` if not one row can be made.
        """
        from tokenizers import Tokenizer

        documents = load_texts(self.path)
        random.Random(self.seed).shuffle(documents)
        tokenizer = Tokenizer.from_file(str(self.tokenizer_dir / "tokenizer.json"))
        stream = [t for d in documents for t in tokenizer.encode(d["text"] + "\n\n", add_special_tokens=False).ids]
        cut = [stream[i : i + self.tokens] for i in range(0, len(stream) - self.tokens + 1, self.tokens)][: self.rows]
        if not cut:
            raise DataError(f"{self.path}: {len(stream)} tokens make no calibration row of {self.tokens}; give more text")
        self.facts = {
            "set": str(self.path), "files": sets_digest(self.path), "seed": self.seed,
            "rows_asked": self.rows, "rows_used": len(cut), "tokens_per_row": self.tokens,
        }  # fmt: skip
        return cut
