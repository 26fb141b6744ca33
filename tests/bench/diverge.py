"""What exact scoring costs: its speed against the same engine's prefill, and its memory against the number of tokens.

    python tests/bench/diverge.py speed [--artifacts FOLDER] [--rounds N] [--windows N] VARIANT ...
    python tests/bench/diverge.py speed --random [--rounds N] [--windows N]
    python tests/bench/diverge.py memory

speed: three things in turn, in every round, over the same windows of the reference store: `prefill` (the model's body over
all tokens, no output head), `forward` (the model's own forward pass, with logits of every token) and `score` (all that
`diverge` does, to the file). Ratios are rates over the rate of `score`'s rivals in the same round; printed are their
median and the interval that order statistics give, by wall clock and by CPU time (which other work on the machine moves less).
Two heads (the reference's states and the variant's) bound it: the demo model's head is a fifth of its arithmetic, so that
nothing can pass 0.65 of the body alone there. --random: random weights in the shape of a 1.7-billion-parameter model.
memory: peak resident memory of fresh processes that score 10 000 and 100 000 tokens of a tiny random model.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from pipeline import diverge, engines, reference  # noqa: E402
from pipeline.core import artifacts, quiet  # noqa: E402
from pipeline.divergence.checkpoints import Checkpoints  # noqa: E402
from pipeline.divergence.store import Store, Window, batches  # noqa: E402

TOKENS = (10_000, 100_000)
LENGTH = 501  # a window's tokens; all but the first are scored


def spread(store: Store, count: int) -> None:
    """Leave only so many windows in a store, the longest and the shortest among them."""
    order = sorted(range(len(store.windows)), key=lambda i: -store.windows[i].scored)
    keep = set(order[:: max(1, len(order) // count)][:count])
    kept = [(i, w) for i, w in enumerate(store.windows) if i in keep]
    store._shard_of = {new: store._shard_of[old] for new, (old, _) in enumerate(kept)}
    names = {new: old for new, (old, _) in enumerate(kept)}
    store.windows = [w for _, w in kept]
    plain = store._shard

    class Renamed:
        def __init__(self, shard: Any) -> None:
            self.shard = shard

        def get_tensor(self, name: str) -> Any:
            return self.shard.get_tensor(str(names[int(name)]))

    store._shard = lambda name: Renamed(plain(name))  # type: ignore[method-assign]


def speed(folder: Path, variants: list[str], rounds: int, windows: int, threads: int) -> None:
    for variant in variants:
        engine: Any = engines.load("hf", folder / "models" / variant, threads=threads)
        store = Store(folder / "reference")
        spread(store, windows)
        time_store(variant, engine, store, rounds, threads)


def speed_of_random(folder: Path, rounds: int, windows: int, threads: int) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from pipeline.engines.hf import HfEngine

    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.bfloat16)
    shape = LlamaConfig(
        vocab_size=49152, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=32,
        num_key_value_heads=32, tie_word_embeddings=True,
    )  # fmt: skip
    engine: Any = HfEngine(LlamaForCausalLM(shape).eval(), AutoTokenizer.from_pretrained(folder / "base"), "cpu", set())
    torch.set_default_dtype(torch.float32)
    with tempfile.TemporaryDirectory() as work:
        write_random(engine, Path(work) / "reference", windows * (LENGTH - 1))
        time_store("random weights, 1.7 B", engine, Store(Path(work) / "reference"), rounds, threads)


def time_store(name: str, engine: Any, store: Store, rounds: int, threads: int, batch_size: int = 4) -> None:
    """Print what scoring costs against the rivals; closes the engine."""
    shared = store.share_head(engine)
    tokens = sum(w.scored for w in store.windows)
    parts = [[w.token_ids for _, w in part] for part in batches(store.windows, batch_size)]

    def prefill() -> None:
        for ids in parts:
            engine.hidden(ids)

    def forward() -> None:
        for ids in parts:
            engine.own_logits(ids)

    def score() -> None:
        with tempfile.TemporaryDirectory() as out:
            diverge.write(diverge.diverge(engine, store, batch_size=batch_size, threads=threads), Path(out) / "rows.parquet")

    found = interleaved({"prefill": prefill, "forward": forward, "score": score}, rounds)
    shown: dict[str, Any] = {"variant": name, "tokens": tokens, "rounds": rounds, "threads": threads, "head_shared": shared}
    shown["wall_s"] = {k: [round(x, 2) for x in t["wall"]] for k, t in found.items()}
    for clock in ("wall", "cpu"):
        shown[f"{clock}_ms_per_token"] = {k: round(1000 * float(np.median(t[clock])) / tokens, 3) for k, t in found.items()}
        for rival in ("prefill", "forward"):
            ratios = np.asarray(found[rival][clock]) / np.asarray(found["score"][clock])
            shown[f"{clock}_score_over_{rival}"] = [round(x, 3) for x in median(ratios)]
    print(json.dumps(shown, indent=1), flush=True)
    engine.close()


def median(ratios: Any) -> tuple[float, float, float]:
    """(median, low, high) over rounds; one round that a neighbour spoilt moves it little. Fewer than six give no interval."""
    test: Any = scipy.stats.quantile_test(ratios, q=1.0, p=0.5)
    low, high = test.confidence_interval(0.95)
    return float(np.median(ratios)), float(low), float(high)


def interleaved(work: dict[str, Callable[[], None]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """{name: {wall, cpu: seconds of each round}}; one round of each goes before and is not counted."""
    found: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in work}
    for k in range(rounds + 1):
        for name, do in work.items():
            wall, cpu = time.perf_counter(), time.process_time()
            do()
            if k:
                found[name]["wall"].append(time.perf_counter() - wall)
                found[name]["cpu"].append(time.process_time() - cpu)
    return found


def memory() -> None:
    from conftest import make_model  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as work:
        model = make_model(Path(work) / "model", dtype="bfloat16")
        peaks = {}
        for tokens in TOKENS:
            folder = Path(work) / str(tokens)
            write_reference(model, folder, tokens)
            command = [sys.executable, __file__, "score", str(model), str(folder)]
            peaks[tokens] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
        few, many = (peaks[t] for t in TOKENS)
        print(json.dumps({
            "peak_memory_bytes": peaks, "ratio": round(many / few, 4),
            "bytes_per_token": round((many - few) / (TOKENS[1] - TOKENS[0]), 1),
        }))  # fmt: skip


def write_reference(model: Path, folder: Path, tokens: int) -> None:
    write_random(engines.load("hf", model, threads=1), folder, tokens)


def write_random(engine: Any, folder: Path, tokens: int) -> None:
    """A store of random windows; what they say does not matter to memory or speed."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, engine.vocab_size, (tokens // (LENGTH - 1), LENGTH)).tolist()
    windows = [Window("random", f"{k}#0", str(k), tuple(row), 1) for k, row in enumerate(rows)]
    with artifacts.atomic_dir(folder) as out:
        facts = reference.write_store(engine, windows, out, 4, Checkpoints(folder.parent / "pieces"))
        rest = {"vocab": engine.vocab_size, "files": artifacts.files_of(out), "digest": "s"}
        artifacts.write_json(out / artifacts.MANIFEST, facts | rest)


def score_once(model: Path, folder: Path) -> None:
    engine: Any = engines.load("hf", model, threads=1)
    store = Store(folder)
    seen = diverge.write(diverge.diverge(engine, store, batch_size=4, threads=1), folder.parent / "rows.parquet")
    assert seen.tokens == sum(w.scored for w in store.windows) and seen.differing == 0
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="what", required=True)
    fast = kinds.add_parser("speed")
    fast.add_argument("variants", nargs="*")
    fast.add_argument("--random", action="store_true")
    fast.add_argument("--artifacts", type=Path, default=artifacts.ARTIFACTS)
    fast.add_argument("--rounds", type=int, default=7)
    fast.add_argument("--windows", type=int, default=8)
    fast.add_argument("--threads", type=int, default=2)
    kinds.add_parser("memory")
    once = kinds.add_parser("score")
    once.add_argument("model", type=Path)
    once.add_argument("folder", type=Path)
    asked = parser.parse_args()
    quiet.before_sharing_cores()
    if asked.what == "speed":
        if asked.random:
            speed_of_random(asked.artifacts, asked.rounds, asked.windows, asked.threads)
        speed(asked.artifacts, asked.variants, asked.rounds, asked.windows, asked.threads)
    elif asked.what == "memory":
        memory()
    else:
        score_once(asked.model, asked.folder)


if __name__ == "__main__":
    main()
