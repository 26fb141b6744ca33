"""Finished pieces of a stage's work, kept outside its output: a killed run is taken up where it was.

DVC removes a stage's outputs before it runs it again, so pieces lie in artifacts/partial/<stage>-<digest>/. The digest is
of everything that defines the work; other inputs find no pieces. A piece counts only with the hash that was written
after it: one that was cut off or damaged is made again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.core import artifacts

PARTIAL = artifacts.ARTIFACTS / "partial"


@dataclass(frozen=True)
class Checkpoints:
    """A folder of pieces, each a file with a `.sha256` beside it."""

    folder: Path

    @classmethod
    def of(cls, stage: str, inputs: object) -> Checkpoints:
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

    def drop(self, pattern: str) -> None:
        """Remove pieces that nothing will ask for again."""
        for path in self.folder.glob(pattern):
            path.unlink()

    def clear(self) -> None:
        """The work is done: remove its pieces, and what runs of the stage with other inputs left."""
        stage, _, _ = self.folder.name.rpartition("-")
        for folder in self.folder.parent.glob(f"{stage}-*"):
            shutil.rmtree(folder, ignore_errors=True)
