"""A small reference store, as `reference` writes one."""

from collections import Counter
from pathlib import Path
from typing import Any

from pipeline import diverge, reference
from pipeline.core import artifacts
from pipeline.core.params import Trajectories
from pipeline.divergence.store import Checkpoints, Store, Window
from pipeline.evalset.windows import corpus_windows

DOCUMENTS: Any = [
    {"id": f"doc{i}", "domain": "ab"[i % 2], "text": f"The council of {i} met and spoke of rain. " * (5 + i)} for i in range(5)
]
PROMPTS: Any = [
    {"id": "p1", "domain": "d", "prompt": "The council met on"},
    {"id": "p2", "domain": "d", "messages": [{"role": "user", "content": "Say something."}]},
    {"id": "p3", "domain": "d", "prompt": "Rain"},
]


def trajectories(engine: Any, prompts: Any = PROMPTS, skipped: Counter[str] | None = None) -> list[Window]:
    """Ten sampled tokens behind each prompt."""
    counted = Counter[str]() if skipped is None else skipped
    return reference.trajectories(engine, prompts, Trajectories(prompts="", tokens=10), 1, counted)


def windows_of(engine: Any) -> list[Window]:
    """Windows of all documents and prompts."""
    return corpus_windows(DOCUMENTS, engine.tokenizer, 48) + trajectories(engine)


def stored(engine: Any, windows: list[Window], folder: Path, pieces: Checkpoints | None = None) -> Store:
    """Write a store and open it."""
    with artifacts.atomic_dir(folder) as out:
        pieces = pieces or Checkpoints(folder.parent / f"{folder.name}-pieces")
        states = reference.write_store(engine, windows, out, 2, pieces, model="m", seed=1)
        rest = {"vocab": engine.vocab_size, "files": artifacts.files_of(out), "digest": "s"}
        artifacts.write_json(out / artifacts.MANIFEST, states | rest)
    return Store(folder)


def columns(engine: Any, where: Store, batch_size: int = 2) -> dict[str, list[Any]]:
    """A variant's token rows, as columns."""
    blocks = list(diverge.diverge(engine, where, batch_size=batch_size, threads=1))
    return {name: [value for block in blocks for value in block[name]] for name in blocks[0]}
