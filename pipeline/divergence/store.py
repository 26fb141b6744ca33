"""The reference store: what the reference said at every scored position, kept exactly and small.

Kept are each position's *final hidden state* and the output head once: about 85 times smaller than logits for the default model.
A state is replayed through the stored head in products of one shape, here and where the reference is measured itself, so that both
give the same logits bit for bit. States lie in shards of bounded size, of which one at a time is open."""

from __future__ import annotations

import shutil
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.core import artifacts, records
from pipeline.core.errors import ArtifactError
from pipeline.core.records import WindowRow
from pipeline.engines import ROWS

PARTIAL = artifacts.ARTIFACTS / "partial"
SHARD_BYTES = 16 << 20  # of states in one file: what a killed `reference` loses, and what a reader has open


@dataclass(frozen=True)
class Window:
    """Tokens of one document; positions first .. n - 1 are scored (position p is predicted from those before it).

    domain: what kind of text it is, where `set` does not say so (trajectories)."""

    set: str
    window: str
    document: str
    token_ids: tuple[int, ...]
    first: int
    domain: str = ""

    @classmethod
    def of(cls, row: WindowRow) -> Window:
        return cls(row["set"], row["window"], row["document"], tuple(row["token_ids"]), row["first"], row["domain"])

    @property
    def scored(self) -> int:
        return len(self.token_ids) - self.first


Batch = list[tuple[int, Window]]  # of equal length, each with its index in the store


def batches(windows: Sequence[Window], size: int, documents: Container[str] | None = None) -> Iterator[Batch]:
    """Windows (of some documents, or all) in batches of equal length: padding would cost time and, in 16 bits, change digits."""
    by_length: dict[int, Batch] = {}
    for i, w in enumerate(windows):
        if documents is not None and w.document not in documents:
            continue
        by_length.setdefault(len(w.token_ids), []).append((i, w))
    for _, same in sorted(by_length.items(), reverse=True):
        for at in range(0, len(same), size):
            yield same[at : at + size]


def shards(windows: Sequence[Window], batch_size: int, position_bytes: int) -> list[list[Batch]]:
    """Batches, in their order, in shards of at most SHARD_BYTES of states; a batch is never cut."""
    result: list[list[Batch]] = []
    size = SHARD_BYTES
    for batch in batches(windows, batch_size):
        more = sum(w.scored for _, w in batch) * position_bytes
        if size + more > SHARD_BYTES:
            result.append([])
            size = 0
        result[-1].append(batch)
        size += more
    return result


def key_of(model: str, seed: int, windows: Sequence[Window]) -> str:
    """What a store is a store of: sha256 of the model's digest, the seed and every token."""
    return artifacts.digest({"model": model, "seed": seed, "windows": [asdict(w) for w in windows]})


def refuse_if_too_large(needed: int, folder: Path) -> None:
    """Raise before writing what the disk cannot hold."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed > free * 0.9:
        room = f"the reference store needs {needed / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free"
        raise ArtifactError(f"{room}; score fewer documents (tiers.<tier>.documents) or free some space")


class Store:
    """Read side; `pipeline.reference` writes it. Raises `ArtifactError` for one that was damaged or put together otherwise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = records.read(folder / artifacts.MANIFEST, records.Store)
        artifacts.verify_files(folder, self.manifest)
        self.windows = [Window.of(row) for row in records.read_rows(folder / "windows.jsonl", WindowRow)]
        rebuild = f"delete {folder} and run `dvc repro reference`"
        if self.manifest["key"] != key_of(self.manifest["model"], self.manifest["seed"], self.windows):
            raise ArtifactError(f"{folder} holds other tokens, another model or another seed than its key says; {rebuild}")
        self._shard_of = {i: name for name, indices in self.manifest["shards"].items() for i in indices}
        if self._shard_of.keys() != set(range(len(self.windows))):
            raise ArtifactError(f"{folder} does not hold the states of all its windows; {rebuild}")
        self._open: tuple[str, Any] = ("", None)
        self._head: Any = None
        if self.manifest["kind"] == "hidden":
            from pipeline.engines._head import Head

            self._head = Head.load(folder / "head")

    def logit_blocks(self, index: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """(first position, float32 [at most ROWS, vocab]) over a window's scored positions, as the model gave them.

        Position numbers are those of the state that predicts: first - 1 .. n - 2."""
        window = self.windows[index]
        states = self._shard(self._shard_of[index]).get_tensor(str(index))
        for at in range(0, window.scored, ROWS):
            block = states[at : at + ROWS]
            yield window.first - 1 + at, self._head(block) if self._head else block.float().numpy()

    def _shard(self, name: str) -> Any:
        from safetensors import safe_open

        if self._open[0] != name:  # one is open: windows are asked for in the order they were written in
            self._open = ("", None)
            self._open = (name, safe_open(self.folder / name, framework="pt"))
        return self._open[1]


@dataclass(frozen=True)
class Checkpoints:
    """Finished pieces of a stage's work, each with a `.sha256` beside it: a killed run is taken up where it was.

    DVC removes a stage's outputs before it runs it again, so pieces lie in artifacts/partial/<stage>-<digest>/, by the digest of
    everything that defines the work. A piece that was cut off or damaged is made again."""

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
