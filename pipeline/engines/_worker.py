"""A model in its own process, which answers one request at a time with the request's row, also of a failed one. A process that dies
is an error with its reason."""

from __future__ import annotations

import multiprocessing as mp
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import engines
from pipeline.core import cli, isolate, quiet, quota
from pipeline.core.errors import Crashed, QuantgateError, Unsupported
from pipeline.core.params import Variant
from pipeline.core.records import LoadFacts, Rates, TimedAnswer
from pipeline.engines import Sampling
from pipeline.speed import hardware

FORCED = Sampling(stop=False)  # greedy, and end tokens do not end it


class Request(NamedTuple):
    """Prompts of equal length, and `n` tokens for each. how: the engine's method; fresh: count peak memory from here, not from
    loading."""

    prompts: list[list[int]]
    n: int
    how: str = "stream"
    fresh: bool = False


class Yardsticks(NamedTuple):
    """A request for the processor's rates, see `hardware.rates`."""

    threads: int
    dtypes: list[str]


def _serve(pipe: Connection, variant: Variant, folder: Path, threads: int, log: Path) -> None:
    """Load the model, then answer requests until None comes; an error is sent in place of an answer."""
    quiet.libraries()
    isolate.enter(log)
    try:
        start = time.monotonic()
        engine = engines.load(variant.engine, folder, threads=threads, **variant.engine_options)
        pipe.send(load_facts(engine, time.monotonic() - start))
    except QuantgateError as e:
        pipe.send(e)
        return
    except Exception as e:  # such as a card that ran out of memory
        traceback.print_exc()
        pipe.send(Crashed(f"{mp.current_process().name}: {isolate.brief(e)}; see {log}"))
        return
    cold = True
    while (request := pipe.recv()) is not None:
        if isinstance(request, Yardsticks):
            pipe.send(hardware.rates(request.threads, "cpu", request.dtypes))
            continue
        try:
            pipe.send(answer(engine, request, cold))
        except Unsupported as e:
            pipe.send(e)
        cold = False
    cli.leave()


def load_facts(engine: Any, load_s: float) -> LoadFacts:
    """Time and memory of loading, and the engine's facts. Empties the GPU's cache, so that it does not count for requests."""
    on_gpu = hardware.cuda_memory()
    hardware.release_cuda()
    return {
        "load_s": load_s, "load_memory_bytes": hardware.peak_memory(reset=True), "load_cuda_memory": on_gpu,
        "max_length": engine.max_length, "device": getattr(engine, "device", "cpu"),
    }  # fmt: skip


def answer(engine: Any, request: Request, cold: bool) -> TimedAnswer:
    """One request's row. cold: whether it is the process's first. Raises `Unsupported` if the engine lacks the method."""
    if request.fresh:
        hardware.peak_memory(reset=True)
        hardware.cuda_memory(reset=True)
    t_submit = time.monotonic()
    row: TimedAnswer
    try:
        row = _batch(engine, request) if request.how == "stream_batch" else _single(engine, request)
    except Unsupported:
        raise
    except Exception as e:  # a failed request is a result: kept and counted, but not in the rates
        row = {"ok": False, "error": f"{type(e).__name__}: {e}", "t_submit": t_submit, "t_tokens": []}
    return {**row, "peak_memory_bytes": hardware.peak_memory(), "cuda_memory": hardware.cuda_memory(), "cold": cold}


def _single(engine: Any, request: Request) -> TimedAnswer:
    """One greedy request of exactly `n` tokens, with its phases. Tokenizing takes place before its clock starts."""
    prompt, text = request.prompts[0], engine.tokenizer.decode(request.prompts[0])
    tokenize_s = _seconds(lambda: engine.tokenizer(text, add_special_tokens=False, verbose=False))
    t_submit = time.monotonic()
    tokens = list(getattr(engine, request.how)(prompt, request.n, FORCED))
    trace: engines.Trace = engine.trace
    detokenize_s = _seconds(lambda: engine.tokenizer.decode([t for t, _ in tokens]))
    phases = {
        "tokenize": tokenize_s, "prefill": trace.prefill, "decode": trace.decode, "sampling": trace.sampling,
        "detokenize": detokenize_s,
    }  # fmt: skip
    unknown = {name: trace.unknown.get(name, "the engine does not say") for name, value in phases.items() if value is None}
    return {
        **_times(t_submit, [t for _, t in tokens], 1, request.n), "phases": phases, "phases_unknown": unknown,
        "kv_bytes_per_token": trace.bytes_per_token, "cache_bytes": trace.cache_bytes, "cache_tokens": trace.cache_tokens,
        "cache_element_bytes": trace.element_bytes, **trace.guesses,
    }  # fmt: skip


def _batch(engine: Any, request: Request) -> TimedAnswer:
    batch, steps = len(request.prompts), engine.stream_batch(request.prompts, request.n)
    t_submit = time.monotonic()
    done = list(steps)
    row = _times(t_submit, [t for _, t in done], batch, request.n)
    if any(len(tokens) != batch for tokens, _ in done):
        row["ok"], row["error"] = False, f"a step gave other than {batch} tokens"
    return row


def _times(t_submit: float, times: list[float], batch: int, n: int) -> TimedAnswer:
    return {
        "t_submit": t_submit, "t_first": times[0] if times else None, "t_tokens": times, "output_tokens": batch * len(times),
        "batch": batch, "ok": len(times) == n, "error": None if len(times) == n else f"asked for {n} tokens, got {len(times)}",
    }  # fmt: skip


def _seconds(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start


class Worker:
    """A model in its own process, answering one request at a time."""

    def __init__(self, variant: Variant, folder: Path, threads: int) -> None:
        context = mp.get_context("spawn")
        self.pipe, far = context.Pipe()
        self.what, self.oom_kills = f"benchmark {folder.name}", quota.oom_kills()
        self.log = isolate.log_of(self.what)
        self.process = context.Process(target=_serve, args=(far, variant, folder, threads, self.log), name=self.what, daemon=True)
        self.process.start()
        far.close()
        self.facts: LoadFacts = self._answer(None)

    def ask(self, prompt: Sequence[int], n: int, *, how: str = "stream", fresh: bool = False) -> TimedAnswer:
        """The row of one request. how: `stream`; `stream_on` if the engine keeps prefixes (else `Unsupported`); `stream_undrafted`
        if it speculates."""
        return self._answer(Request([list(prompt)], n, how, fresh))  # type: ignore[no-any-return]

    def ask_batch(self, prompts: Sequence[Sequence[int]], n: int) -> TimedAnswer:
        """The row of a batch of prompts of equal length, `n` tokens each."""
        return self._answer(Request([list(p) for p in prompts], n, "stream_batch", fresh=True))  # type: ignore[no-any-return]

    def cpu_rates(self, threads: int, dtypes: list[str]) -> Rates:
        """The processor's rates, measured in the model's process, where torch may be loaded already."""
        return self._answer(Yardsticks(threads, dtypes))  # type: ignore[no-any-return]

    def _answer(self, request: Request | Yardsticks | None) -> Any:
        """The answer to a request, or to loading, without a timeout: a large model may take long."""
        try:
            if request is not None:
                self.pipe.send(request)
            reply = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(5)
            raise isolate.how_it_ended(self.what, self.process.exitcode or 0, self.log, self.oom_kills) from None
        if isinstance(reply, QuantgateError):
            raise reply
        return reply

    def close(self) -> None:
        with suppress(OSError):
            self.pipe.send(None)
            self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
