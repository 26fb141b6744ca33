"""The reference store: the reference's logits at every scored position, exact and small.

It holds each position's *final hidden state*, and the output head once: for the default model 85 times smaller than logits. States
are replayed through the stored head in products of one shape, also where the reference itself is measured, so that both give the
same logits bit for bit. States lie in shards of bounded size; one shard is open at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.core import artifacts, records
from pipeline.core.errors import ArtifactError
from pipeline.core.records import WindowRow
from pipeline.divergence.distributions import F32
from pipeline.engines import ROWS

PARTIAL = artifacts.ARTIFACTS / "partial"
SHARD_BYTES = 16 << 20  # of states in one file: what a killed `reference` loses, and what a reader has open


@dataclass(frozen=True)
class Window:
    """Tokens of one document; positions first .. n - 1 are scored (position p is predicted from those before it). domain: what kind
    of text it is, where `set` does not say so (trajectories)."""

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
    """Windows (of some documents, or all) in batches of equal length; padding would cost time and, in 16 bits, change digits."""
    by_length: dict[int, Batch] = {}
    for i, w in enumerate(windows):
        if documents is None or w.document in documents:
            by_length.setdefault(len(w.token_ids), []).append((i, w))
    for _, same in sorted(by_length.items(), reverse=True):
        for at in range(0, len(same), size):
            yield same[at : at + size]


def shards(windows: Sequence[Window], batch_size: int, position_bytes: int) -> list[list[Batch]]:
    """Batches, in order, in shards of at most SHARD_BYTES of states; a batch is never split."""
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
    """A store's identity: sha256 of the model's digest, the seed and every token."""
    return artifacts.digest({"model": model, "seed": seed, "windows": [asdict(w) for w in windows]})


def refuse_if_too_large(needed: int, folder: Path) -> None:
    """Raise before writing more than the disk can hold."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed > free * 0.9:
        room = f"the reference store needs {needed / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free"
        raise ArtifactError(f"{room}; score fewer documents (tiers.<tier>.documents) or free some space")


class Store:
    """Read a store that `pipeline.reference` wrote. Raises `ArtifactError` if it is damaged or inconsistent."""

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

    def logit_blocks(self, index: int) -> Iterator[tuple[int, F32]]:
        """(first position, float32 [at most ROWS, vocab]) over a window's scored positions. A position is that of the predicting
        state: first - 1 .. n - 2."""
        window = self.windows[index]
        states = self._shard(self._shard_of[index]).get_tensor(str(index))
        for at in range(0, window.scored, ROWS):
            block = states[at : at + ROWS]
            yield window.first - 1 + at, self._head(block) if self._head else block.float().numpy()

    def _shard(self, name: str) -> Any:
        from safetensors import safe_open

        if self._open[0] != name:  # windows are read in the order they were written in
            self._open = ("", None)
            self._open = (name, safe_open(self.folder / name, framework="pt"))
        return self._open[1]


@dataclass(frozen=True)
class Checkpoints:
    """Finished pieces of a stage's work, each with a `.sha256` beside it, so that a killed run can continue. DVC removes a stage's
    outputs before it reruns it, so pieces lie in artifacts/partial/<stage>-<digest>/, by the digest of everything that defines the
    work. A truncated or damaged piece is made again."""

    folder: Path

    @classmethod
    def of(cls, stage: str, inputs: object) -> Checkpoints:
        return cls(PARTIAL / f"{stage}-{artifacts.digest(inputs)[:16]}")

    def has(self, name: str) -> bool:
        """Whether a piece is there and unchanged."""
        piece, seal = self.folder / name, self.folder / f"{name}.sha256"
        return piece.is_file() and seal.is_file() and seal.read_text(encoding="utf-8") == artifacts.sha256_file(piece)

    @contextmanager
    def write(self, name: str) -> Iterator[Path]:
        """Yield a temporary path; the piece counts once the block has ended without an error."""
        (self.folder / f"{name}.sha256").unlink(missing_ok=True)
        with artifacts.atomic_file(self.folder / name) as tmp:
            yield tmp
        artifacts.write_text(self.folder / f"{name}.sha256", artifacts.sha256_file(self.folder / name))

    def json(self, name: str, make: Callable[[], object]) -> Any:
        """A piece that holds a JSON value, which `make` gives if it is not there."""
        if not self.has(name):
            with self.write(name) as tmp:
                tmp.write_text(json.dumps(make()), encoding="utf-8")
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    def drop(self, pattern: str) -> None:
        """Remove pieces that are no longer needed."""
        for path in self.folder.glob(pattern):
            path.unlink()

    def clear(self) -> None:
        """Remove the pieces of finished work, and those that runs of the stage with other inputs left."""
        stage, _, _ = self.folder.name.rpartition("-")
        for folder in self.folder.parent.glob(f"{stage}-*"):
            shutil.rmtree(folder, ignore_errors=True)
