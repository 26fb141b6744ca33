"""A model in a process of its own, kept alive, answering one request at a time: each answer is the row of a request.

Nothing is queued, so no phase of waiting exists. A request that fails is a row too; a process that dies is an error in words.
"""

from __future__ import annotations

import multiprocessing as mp
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from pipeline import engines
from pipeline.core import cli, isolate, quiet, quota
from pipeline.core.errors import ArtifactError, Crashed, QuantgateError, Unsupported
from pipeline.core.params import Variant
from pipeline.engines import Sampling, Trace
from pipeline.speed import hardware

Row = dict[str, Any]
FORCED = Sampling(stop=False)  # greedy, and end tokens do not end it


# --- in the child ------------------------------------------------------------------------------------------------


def _serve(pipe: Connection, variant: Variant, folder: Path, threads: int, log: Path) -> None:
    """Child process: load the model, then answer requests until told to stop."""
    quiet.libraries()
    isolate.enter(log)
    try:
        start = time.monotonic()
        engine = engines.load(variant.engine, folder, threads=threads, **variant.engine_options)
        pipe.send(_facts(engine, time.monotonic() - start))
    except Unsupported as e:
        pipe.send({"unsupported": str(e)})
        return
    except QuantgateError as e:
        pipe.send({"error": str(e)})
        return
    except Exception as e:  # such as a card that ran out of memory
        traceback.print_exc()
        pipe.send({"crashed": isolate.brief(e)})
        return
    cold = True
    while (request := pipe.recv()) is not None:
        if "yardsticks" in request:
            pipe.send(hardware.rates(**request["yardsticks"]))
            continue
        pipe.send(_safely(engine, **request) | {"cold": cold})
        cold = False
    cli.leave()


def _facts(engine: Any, load_s: float) -> Row:
    """What loading took, and what the engine says of itself. What loading left in caches is not the requests'."""
    on_gpu = hardware.cuda_memory()
    hardware.release_cuda()
    return {
        "load_s": load_s, "load_memory_bytes": hardware.peak_memory(reset=True), "load_cuda_memory": on_gpu,
        "max_length": engine.max_length, "device": getattr(engine, "device", "cpu"),
    }  # fmt: skip


def _safely(engine: Any, prompts: list[list[int]], n: int, how: str, fresh: bool) -> Row:
    """One request's row. fresh: peak memory counts from here on, not from loading."""
    if fresh:
        hardware.peak_memory(reset=True)
        hardware.cuda_memory(reset=True)
    t_submit = time.monotonic()
    try:
        row = _batch(engine, prompts, n) if how == "stream_batch" else _single(engine, prompts[0], n, how)
    except Unsupported as e:
        return {"unsupported": str(e)}
    except Exception as e:  # a failed request is a result: kept, counted, and out of the rates
        row = {"ok": False, "error": f"{type(e).__name__}: {e}", "t_submit": t_submit, "t_tokens": []}
    return row | {"peak_memory_bytes": hardware.peak_memory(), "cuda_memory": hardware.cuda_memory()}


def _single(engine: Any, prompt: list[int], n: int, how: str = "stream") -> Row:
    """One greedy request of exactly `n` tokens, its phases apart."""
    tokenized, why = _tokenize(engine, prompt)
    t_submit = time.monotonic()
    tokens = list(getattr(engine, how)(prompt, n, FORCED))
    trace: Trace = getattr(engine, "trace", None) or Trace(None, None, None, {"prefill": "the engine keeps no trace"})
    detokenized = _timed(lambda: engine.tokenizer.decode([t for t, _ in tokens]), engine)
    phases = {
        "tokenize": tokenized, "prefill": trace.prefill, "decode": trace.decode, "sampling": trace.sampling,
        "detokenize": detokenized,
    }  # fmt: skip
    told = {"tokenize": why, "detokenize": why} | trace.unknown
    unknown = {k: told.get(k) or "the engine does not say" for k, v in phases.items() if v is None}
    return {
        "t_submit": t_submit, **_times([t for _, t in tokens], 1, n), "phases": phases, "phases_unknown": unknown,
        "kv_bytes_per_token": trace.bytes_per_token, "cache_bytes": trace.cache_bytes, "cache_tokens": trace.cache_tokens,
        "cache_element_bytes": trace.element_bytes,
    }  # fmt: skip


def _batch(engine: Any, prompts: list[list[int]], n: int) -> Row:
    """Greedy requests side by side, exactly `n` tokens of each."""
    steps = engine.stream_batch(prompts, n)
    t_submit = time.monotonic()
    found = list(steps)
    row = {"t_submit": t_submit, **_times([t for _, t in found], len(prompts), n)}
    if any(len(tokens) != len(prompts) for tokens, _ in found):
        row |= {"ok": False, "error": f"a step gave other than {len(prompts)} tokens"}
    return row


def _times(times: list[float], batch: int, n: int) -> Row:
    """When tokens came, and whether there were as many as were asked for."""
    return {
        "t_first": times[0] if times else None, "t_tokens": times, "output_tokens": batch * len(times), "batch": batch,
        "ok": len(times) == n, "error": None if len(times) == n else f"asked for {n} tokens, got {len(times)}",
    }  # fmt: skip


def _tokenize(engine: Any, prompt: list[int]) -> tuple[float | None, str | None]:
    """(seconds, why not): the prompt's text into tokens by the engine's tokenizer, before the request's clock starts."""
    tokenizer = getattr(engine, "tokenizer", None)
    if tokenizer is None:
        return None, "the engine has no tokenizer"
    text = tokenizer.decode(prompt)
    return _timed(lambda: tokenizer(text, add_special_tokens=False, verbose=False), engine), None


def _timed(work: Any, engine: Any) -> float | None:
    """Seconds of work that needs the engine's tokenizer; None without one."""
    if getattr(engine, "tokenizer", None) is None:
        return None
    start = time.monotonic()
    work()
    return time.monotonic() - start


# --- in the parent -----------------------------------------------------------------------------------------------


class Worker:
    """A model in a process of its own, answering one request at a time."""

    def __init__(self, variant: Variant, folder: Path, threads: int) -> None:
        context = mp.get_context("spawn")
        self.pipe, far = context.Pipe()
        self.what, self.oom_kills = f"benchmark {folder.name}", quota.oom_kills()
        self.log = isolate.log_of(self.what)
        self.process = context.Process(target=_serve, args=(far, variant, folder, threads, self.log), name=self.what, daemon=True)
        self.process.start()
        far.close()
        self.facts = self._receive()
        if "unsupported" in self.facts:
            self.close()
            raise Unsupported(self.facts["unsupported"])
        if "crashed" in self.facts:
            raise Crashed(f"{self.what}: {self.facts['crashed']}; see {self.log}")
        if "error" in self.facts:
            raise ArtifactError(f"{folder} could not be loaded: {self.facts['error']}")

    def ask(self, prompt: Sequence[int], n: int, *, how: str = "stream", fresh: bool = False) -> Row:
        """The row of one request. how: `stream`, or `stream_on` for an engine that keeps a prefix (else `Unsupported`)."""
        return self._answer({"prompts": [list(prompt)], "n": n, "how": how, "fresh": fresh})

    def ask_batch(self, prompts: Sequence[Sequence[int]], n: int) -> Row:
        """The row of requests side by side: prompts of equal length, `n` tokens each."""
        return self._answer({"prompts": [list(p) for p in prompts], "n": n, "how": "stream_batch", "fresh": True})

    def cpu_rates(self, threads: int, dtypes: list[str]) -> Row:
        """`hardware.rates` of the processor, measured in this process: where a model runs in torch, torch is loaded already."""
        return self._answer({"yardsticks": {"threads": threads, "device": "cpu", "dtypes": dtypes}})

    def _answer(self, request: Row) -> Row:
        try:
            self.pipe.send(request)
        except OSError:
            self._died()
        row = self._receive()
        if "unsupported" in row:
            raise Unsupported(row["unsupported"])
        return row

    def _receive(self) -> Row:
        """The next answer, however long a large model takes for it: a process that hangs is a person's to stop."""
        try:
            row: Row = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._died()
        return row

    def _died(self) -> NoReturn:
        self.process.join(5)
        raise isolate.how_it_ended(self.what, self.process.exitcode or 0, self.log, self.oom_kills) from None

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
def working(variant: Variant, folder: Path, threads: int) -> Iterator[Worker]:
    worker = Worker(variant, folder, threads)
    try:
        yield worker
    finally:
        worker.close()
