"""benchmark: speed and memory, one row per request, raw timestamps -> artifacts/timings/<variant>.jsonl

What bounds it: decoding one token reads every weight once, so its floor is weight bytes over memory bandwidth; prefill
is matrix products, so its floor is arithmetic; a small model on a fast machine is bound by neither but by the cost of
launching some thousand operations a token from Python.

Machines drift (heat, neighbours), so a ratio is only fair inside one run: variant and reference each live in a process
of their own and answer the same prompt in turn, A B B A A B ..., and each round gives one ratio.
"""

from __future__ import annotations

import multiprocessing as mp
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipeline import artifacts, cli, engines, hardware, params
from pipeline.engines import Sampling
from pipeline.errors import ArtifactError, DataError, QuantgateError, Unsupported
from pipeline.evalset import load_texts
from pipeline.params import Requests, Variant

Row = dict[str, Any]
STARTUP_S = 600  # a model that does not load within this time is not going to


# --- one model in its own process --------------------------------------------------------------------------------


def _serve(pipe: Connection, variant: Variant, folder: Path, threads: int) -> None:
    """Child process: load the model, then answer requests until told to stop."""
    cli._quiet()
    try:
        start = time.monotonic()
        engine = engines.load(variant.engine, folder, threads=threads, **variant.engine_options)
        pipe.send({"load_s": time.monotonic() - start, "load_memory_bytes": hardware.peak_memory(reset=True)})
    except Unsupported as e:
        pipe.send({"unsupported": str(e)})
        return
    except QuantgateError as e:
        pipe.send({"error": str(e)})
        return
    while (request := pipe.recv()) is not None:
        pipe.send(_answer(engine, *request))


def _answer(engine: Any, prompt: list[int], n: int) -> Row:
    """One greedy request of exactly `n` tokens; end tokens do not end it."""
    t_submit = time.monotonic()
    try:
        tokens = list(engine.stream(prompt, n, Sampling(stop=False)))
    except Exception as e:  # a failed request is a result: kept, counted, and out of the rates
        return {"ok": False, "error": f"{type(e).__name__}: {e}", "t_submit": t_submit, "t_tokens": []}
    return {
        "t_submit": t_submit,
        "t_first": tokens[0][1],
        "t_tokens": [t for _, t in tokens],
        "output_tokens": len(tokens),
        "kv_bytes_per_token": getattr(engine, "kv_bytes_per_token", None),
        "peak_memory_bytes": hardware.peak_memory(),
        "ok": len(tokens) == n,
        "error": None if len(tokens) == n else f"asked for {n} tokens, got {len(tokens)}",
    }


class Server:
    """A model in a process of its own, answering one request at a time."""

    def __init__(self, variant: Variant, folder: Path, threads: int) -> None:
        context = mp.get_context("spawn")
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=_serve, args=(far, variant, folder, threads), daemon=True)
        self.process.start()
        far.close()
        self.facts = self._receive(STARTUP_S)
        if "unsupported" in self.facts:
            self.close()
            raise Unsupported(self.facts["unsupported"])
        if "error" in self.facts:
            raise ArtifactError(f"{folder} could not be loaded: {self.facts['error']}")

    def ask(self, prompt: list[int], n: int) -> Row:
        self.pipe.send((prompt, n))
        return self._receive(STARTUP_S)

    def _receive(self, seconds: float) -> Row:
        if not self.pipe.poll(seconds):
            raise ArtifactError(f"the benchmark process gave no answer within {seconds:.0f} s")
        try:
            row: Row = self.pipe.recv()
        except EOFError:
            self.process.join(5)
            raise ArtifactError(f"the benchmark process died (exit code {self.process.exitcode}); out of memory?") from None
        return row

    def close(self) -> None:
        if self.process.is_alive():
            try:
                self.pipe.send(None)
                self.process.join(5)
            except OSError:
                pass
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextmanager
def serving(variant: Variant, folder: Path, threads: int) -> Iterator[Server]:
    server = Server(variant, folder, threads)
    try:
        yield server
    finally:
        server.close()


# --- the run -----------------------------------------------------------------------------------------------------


def prompts(documents: list[Row], tokenizer: Any, length: int, count: int, seed: int) -> list[list[int]]:
    """`count` prompts of exactly `length` tokens, each from another place of the text, so that none is a prefix of
    another and no cache can help."""
    ids = [t for d in documents for t in tokenizer.encode(d["text"] + "\n\n", add_special_tokens=False).ids]
    pieces = list(dict.fromkeys(tuple(ids[s : s + length]) for s in range(0, len(ids) - length + 1, length)))
    if len(pieces) < count:
        raise DataError(f"{len(ids)} tokens of text make {len(pieces)} different prompts of {length}; {count} are needed")
    random.Random(seed).shuffle(pieces)
    return [list(piece) for piece in pieces[:count]]


def measure(ours: Server, theirs: Server, setup: Requests, asked: list[list[int]]) -> Iterator[Row]:
    """Warm-ups, then rounds; both answer the same prompt, and who goes first changes from round to round."""
    order = [("variant", ours), ("reference", theirs)]
    with cli.progress(len(asked), "benchmark", "round") as bar:
        for k, prompt in enumerate(asked):
            warmup = k < setup.warmups
            for who, server in order if k % 2 else order[::-1]:
                row = server.ask(prompt, setup.output_tokens)
                yield {
                    "round": None if warmup else k - setup.warmups, "scenario": "single", "who": who, "warmup": warmup,
                    "prompt_tokens": len(prompt), **row,
                }  # fmt: skip
            bar.update()


def _write_nothing(path: Path, meta: Row) -> None:
    """No rows, and why."""
    artifacts.write_jsonl(path, [])
    artifacts.write_json(artifacts.meta_of(path), meta)
    cli.say("benchmark", f"{meta['variant']}: {meta['status']}: {meta['reason']}")


def main(variant: str) -> None:
    """Time VARIANT, in turns with the reference."""
    from tokenizers import Tokenizer

    watch = artifacts.Stopwatch("benchmark", variant)
    settings = params.load()
    chosen, reference = settings.variant(variant), settings.variant(settings.reference)
    folder, base = artifacts.model_dir(variant), artifacts.model_dir(settings.reference)
    path, setup = artifacts.timings(variant), settings.amount.benchmark
    manifest, theirs = artifacts.read_manifest(folder), artifacts.read_manifest(base)
    meta: dict[str, Any] = {"variant": variant, "model": manifest["digest"], "reference": theirs["digest"]}
    if manifest["status"] != "ok":
        _write_nothing(path, meta | {"status": manifest["status"], "reason": manifest["reason"]})
        return
    threads = settings.thread_count
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    asked = prompts(
        load_texts(Path(settings.benchmark.prompts)), tokenizer, setup.prompt_tokens, setup.warmups + setup.rounds, settings.seed
    )
    bandwidth = hardware.memory_bandwidth(threads)
    try:
        with serving(chosen, folder, threads) as a, serving(reference, base, threads) as b:
            rows = list(measure(a, b, setup, asked))
            loads = {"variant": a.facts, "reference": b.facts}
    except Unsupported as e:
        _write_nothing(path, meta | {"status": "unsupported", "reason": str(e)})
        return
    artifacts.write_jsonl(path, rows)
    artifacts.write_json(artifacts.meta_of(path), meta | {
        "status": "ok", "reason": None, "loads": loads, "memory_bandwidth": bandwidth,
        "machine": hardware.describe(threads), "versions": artifacts.versions(),
    })  # fmt: skip
    good = [r for r in rows if r["ok"] and not r["warmup"] and r["who"] == "variant"]
    spans = [(r["t_tokens"][-1] - r["t_first"]) / (len(r["t_tokens"]) - 1) for r in good]
    told = f"{len(spans) / sum(spans):.1f} tok/s decoding over {len(spans)} rounds" if spans else "every request failed"
    cli.say("benchmark", f"{variant}: {told}, {watch.done():.1f} s")


if __name__ == "__main__":
    cli.run(main)
    cli.leave()
