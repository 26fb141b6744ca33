"""The reference store: what the reference said at every scored position, kept exactly and small.

Kept are each position's *final hidden state* (2·d bytes a token for a 16-bit model) and the output head once, not
logits (2·vocab): about 85 times smaller for the default model. Replaying a state through the stored head gives the
model's own logits bit for bit, which `reference` verifies for every window before it writes anything.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import artifacts
from pipeline.errors import ArtifactError

ROWS = 128  # positions projected at a time: 25 MB of float32 logits at a vocabulary of 49 152


@dataclass(frozen=True)
class Window:
    """Tokens of one document; positions first .. n - 1 are scored (position p is predicted from those before it)."""

    set: str
    window: str
    document: str
    token_ids: tuple[int, ...]
    first: int

    @property
    def scored(self) -> int:
        return len(self.token_ids) - self.first


def batches(windows: Sequence[Window], size: int) -> Iterator[list[tuple[int, Window]]]:
    """(index, window) in batches of equal length: padding would cost time and, in 16 bits, change digits."""
    by_length: dict[int, list[tuple[int, Window]]] = {}
    for i, w in enumerate(windows):
        by_length.setdefault(len(w.token_ids), []).append((i, w))
    for _, same in sorted(by_length.items(), reverse=True):
        for at in range(0, len(same), size):
            yield same[at : at + size]


def estimate_bytes(windows: Sequence[Window], width: int, item_bytes: int) -> int:
    """Size of a store before it is written: `width` values a position (d for states, vocab for logits)."""
    return sum(w.scored for w in windows) * width * item_bytes


def refuse_if_too_large(needed: int, folder: Path) -> None:
    """Raise before writing what the disk cannot hold."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed > free * 0.9:
        raise ArtifactError(
            f"the reference store needs {needed / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free; "
            "score fewer documents (tiers.<tier>.documents) or free some space"
        )


class Store:
    """Read side; `pipeline.reference` writes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = artifacts.read_manifest(folder)
        artifacts.verify_files(folder, self.manifest)
        rows = artifacts.read_jsonl(folder / "windows.jsonl")
        self.windows = [Window(**{**row, "token_ids": tuple(row["token_ids"])}) for row in rows]
        self._states = _open(folder / "states.safetensors")
        self._head: Any = None
        if self.manifest["kind"] == "hidden":
            from pipeline.engines._head import Head

            self._head = Head.load(folder / "head")

    def logit_blocks(self, index: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """(first position, float32 [at most ROWS, vocab]) over a window's scored positions, as the model gave them.

        Position numbers are those of the state that predicts: first - 1 .. n - 2.
        """
        window = self.windows[index]
        states = self._states.get_tensor(str(index))
        for at in range(0, window.scored, ROWS):
            block = states[at : at + ROWS]
            yield window.first - 1 + at, self._head(block) if self._head else block.float().numpy()


def _open(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")
