"""Finished pieces of a stage's work, kept outside its output: a killed run is taken up where it was.

DVC removes a stage's outputs before it runs it again, so pieces lie in artifacts/partial/<stage>-<digest>/. The digest is
of everything that defines the work; other inputs find no pieces. A piece counts only with the hash that was written
after it: one that was cut off or damaged is made again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.core import artifacts

PARTIAL = artifacts.ARTIFACTS / "partial"


class Partial:
    """A folder of pieces, each a file with a `.sha256` beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, stage: str, inputs: Any) -> Partial:
        """The pieces of a stage's work with these inputs."""
        return cls(PARTIAL / f"{stage}-{artifacts.digest(inputs)[:16]}")

    def has(self, name: str) -> bool:
        """Whether a piece is there and as it was written."""
        piece, seal = self.folder / name, self.folder / f"{name}.sha256"
        return piece.is_file() and seal.is_file() and seal.read_text(encoding="utf-8") == artifacts.sha256_file(piece)

    @contextmanager
    def write(self, name: str) -> Iterator[Path]:
        """Yield a temporary path; the piece is in place, and counts, once the block has ended without an error."""
        (self.folder / f"{name}.sha256").unlink(missing_ok=True)
        with artifacts.atomic_file(self.folder / name) as tmp:
            yield tmp
        artifacts.write_text(self.folder / f"{name}.sha256", artifacts.sha256_file(self.folder / name))

    def give(self, name: str, target: Path) -> None:
        """Put a piece at `target` too: a link, or a copy where the file system has none."""
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(self.folder / name, target)
        except OSError:
            shutil.copyfile(self.folder / name, target)

    def drop(self, pattern: str) -> None:
        """Remove pieces that nothing will ask for again."""
        for path in self.folder.glob(pattern):
            path.unlink()

    def clear(self) -> None:
        """The work is done: remove its pieces, and what runs of the stage with other inputs left."""
        shutil.rmtree(self.folder, ignore_errors=True)
        stage, dash, _ = self.folder.name.rpartition("-")
        if dash and self.folder.parent == PARTIAL:
            for other in PARTIAL.glob(f"{stage}-*"):
                shutil.rmtree(other, ignore_errors=True)
