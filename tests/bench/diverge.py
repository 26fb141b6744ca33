"""What exact scoring costs: its speed against the same engine's prefill, and its memory against the number of tokens.

    python tests/bench/diverge.py speed VARIANT ... [--rounds N] [--windows N]
    python tests/bench/diverge.py speed --random [--rounds N] [--windows N]
    python tests/bench/diverge.py memory

speed: three things in turn, in every round, over the same windows: `prefill` (the model's body over all tokens, no output
head), `forward` (the model's own forward pass, with logits of every token) and `score` (all that `diverge` does, to the file).
Ratios are the time of one of the first two over the time of `score` in the same round; printed are their median and the interval
that order statistics give, by wall clock and by CPU time (which other work on the machine moves less).
Two heads (the reference's states and the variant's) bound it: the demo model's head is a fifth of its arithmetic, so that
nothing can pass 0.65 of the body alone there. --random: random weights in the shape of a 1.7-billion-parameter model.
memory: peak resident memory of fresh processes that score 10 000 and 100 000 tokens of a tiny random model.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import harness
import numpy as np
import typer

from pipeline import diverge, engines, reference
from pipeline.core import artifacts, cli, params, quiet
from pipeline.divergence.store import Checkpoints, Store, Window, batches

TOKENS = (10_000, 100_000)
LENGTH = 501  # a window's tokens; all but the first are scored
BATCH = 4


# --- speed -------------------------------------------------------------------------------------------------------


def chosen(windows: Sequence[Window], count: int) -> list[Window]:
    """So many windows, spread over all lengths."""
    order = sorted(windows, key=lambda w: -w.scored)
    return order[:: max(1, len(order) // count)][:count]


def random_windows(vocabulary: int, tokens: int) -> list[Window]:
    """What they say does not matter to memory or speed."""
    ids = np.random.default_rng(0).integers(0, vocabulary, (tokens // (LENGTH - 1), LENGTH)).tolist()
    return [Window("random", f"{k}#0", str(k), tuple(window), 1) for k, window in enumerate(ids)]


def random_engine(threads: int) -> Any:
    """Random weights in the shape of SmolLM2-1.7B, with the base's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from pipeline.engines.hf import HfEngine

    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.bfloat16)
    shape = LlamaConfig(
        vocab_size=49152, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=32,
        num_key_value_heads=32, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(shape).eval()
    torch.set_default_dtype(torch.float32)
    return HfEngine(model, AutoTokenizer.from_pretrained(artifacts.BASE), "cpu", set())


def write_store(engine: Any, windows: list[Window], folder: Path) -> Store:
    with artifacts.atomic_dir(folder) as out:
        facts = reference.write_store(engine, windows, out, BATCH, Checkpoints(folder.parent / "pieces"))
        rest = {"vocab": engine.vocab_size, "files": artifacts.files_of(out), "digest": "s"}
        artifacts.write_json(out / artifacts.MANIFEST, facts | rest)
    return Store(folder)


def time_scoring(name: str, engine: Any, store: Store, rounds: int, threads: int) -> None:
    """Print what scoring costs beside the engine's own passes."""
    tokens = sum(w.scored for w in store.windows)
    parts = [[w.token_ids for _, w in part] for part in batches(store.windows, BATCH)]

    def each(passes: Callable[[list[tuple[int, ...]]], object]) -> Callable[[int], harness.Seconds]:
        return lambda _: harness.seconds(lambda: [passes(ids) for ids in parts])

    def score(_: int) -> harness.Seconds:
        with tempfile.TemporaryDirectory() as out:
            rows = diverge.diverge(engine, store, batch_size=BATCH, threads=threads)
            return harness.seconds(lambda: diverge.write(rows, Path(out) / "rows.parquet"))

    times = harness.in_turns({"prefill": each(engine.hidden), "forward": each(engine.own_logits), "score": score}, rounds)
    report: dict[str, Any] = {"variant": name, "tokens": tokens, "rounds": rounds, "threads": threads}
    for clock in harness.Seconds._fields:
        by_name = {k: [getattr(t, clock) for t in spent] for k, spent in times.items()}
        report[f"{clock}_ms_per_token"] = {k: round(1000 * float(np.median(s)) / tokens, 3) for k, s in by_name.items()}
        for other in ("prefill", "forward"):
            report[f"{clock}_score_over_{other}"] = harness.median([a / b for a, b in zip(by_name[other], by_name["score"])])
    print(json.dumps(report, indent=1), flush=True)


def speed(variants: Sequence[str], windows: int, rounds: int) -> None:
    """Of variants against the reference, over some of its windows; without any, of random weights against themselves."""
    settings = params.load()
    with tempfile.TemporaryDirectory() as work:
        folder, threads = Path(work) / "reference", settings.thread_count
        if not variants:
            engine = random_engine(threads)
            store = write_store(engine, random_windows(engine.vocab_size, windows * (LENGTH - 1)), folder)
            time_scoring("random weights, 1.7 B", engine, store, rounds, threads)
            return
        engine = engines.load("hf", artifacts.model_dir(settings.reference), threads=threads)
        write_store(engine, chosen(Store(artifacts.REFERENCE).windows, windows), folder)
        engine.close()
        for name in variants:
            engine = engines.load("hf", artifacts.model_dir(name), threads=threads)
            time_scoring(name, engine, Store(folder), rounds, threads)
            engine.close()


# --- memory ------------------------------------------------------------------------------------------------------


def peak_memory(model: Path, folder: Path) -> int:
    """Of this process, in bytes, after it has scored a store."""
    store = Store(folder)
    rows = diverge.diverge(engines.load("hf", model, threads=1), store, batch_size=BATCH, threads=1)
    seen = diverge.write(rows, folder.parent / "rows.parquet")
    assert seen.tokens == sum(w.scored for w in store.windows) and seen.differing == 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def memory() -> None:
    from conftest import make_model  # type: ignore[import-not-found]  # late: it gives processes that import it one thread

    peaks = {}
    with tempfile.TemporaryDirectory() as work:
        model = make_model(Path(work) / "model", dtype="bfloat16")
        engine: Any = engines.load("hf", model, threads=1)
        for tokens in TOKENS:
            folder = Path(work) / str(tokens)
            write_store(engine, random_windows(engine.vocab_size, tokens), folder)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
                peaks[tokens] = fresh.submit(peak_memory, model, folder).result()
    few, many = peaks.values()
    per_token = round((many - few) / (TOKENS[1] - TOKENS[0]), 1)
    print(json.dumps({"peak_memory_bytes": peaks, "ratio": round(many / few, 4), "bytes_per_token": per_token}))


def main(
    what: Literal["speed", "memory"],
    variants: Annotated[list[str] | None, typer.Argument()] = None,
    random: Annotated[bool, typer.Option("--random", help="Random weights in place of variants.")] = False,
    rounds: int = 7,
    windows: int = 8,
) -> None:
    """Measure the speed or the memory of exact scoring."""
    quiet.before_sharing_cores()
    if what == "memory":
        memory()
    else:
        speed([] if random else variants or ["bf16"], windows, rounds)


if __name__ == "__main__":
    cli.run(main)
