"""Calibration rows: what a quantizer sees of the world before it rounds."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from pipeline.core import artifacts


def cut(documents: list[list[int]], *, rows: int, tokens: int, seed: int) -> list[list[int]]:
    """At most `rows` rows of `tokens` token ids: documents in seeded order, joined and cut at equal lengths."""
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    stream = [t for i in order for t in documents[i]]
    return [stream[at : at + tokens] for at in range(0, len(stream) - tokens + 1, tokens)][:rows]


class Calibration:
    """The token rows that `calibrate` wrote, read only for quantizers that ask."""

    def __init__(self, folder: Path = artifacts.CALIBRATION) -> None:
        self.folder = folder
        self.facts: dict[str, Any] | None = None  # for a variant's manifest; None if no quantizer asked for rows

    def token_rows(self) -> list[list[int]]:
        """Rows of equal length, in the order in which they were drawn."""
        manifest = artifacts.read_manifest(self.folder)
        artifacts.verify_files(self.folder, manifest)
        self.facts = {k: v for k, v in manifest.items() if k not in ("status", "versions", "files")}
        return [row["token_ids"] for row in artifacts.read_jsonl(self.folder / "rows.jsonl")]
