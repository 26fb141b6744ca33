"""Engines run a model folder. One file per engine; the file's name is its name in params.yaml.

`load(model_dir, *, threads, <its own options by name>) -> Engine`. What an engine cannot do raises `Unsupported(reason)`; the
metric is then null with that reason. A quantizer's ENGINE names the one engine that reads its folders. Optional methods of an
engine: `sample(prompts, most, sampling)`, replies in a batch; `forest_logits(forest, wanted)` (_forest.py); `head`, `hidden`,
`own_logits`, `logits_stepwise`, `to_float32`, `use_threads`, `device`, which a reference needs (hf.py); `attention`; with an option
`kv`, `plain`: the same weights with keys and values of at least 16 bits, scored in the same passes; `speculate`, `rows_after` and
`forget` (_speculation.py); `compare_blocks`, a comparison with the reference where the logits are (vllm.py). A file may declare
`READS`, another engine whose folders it loads, and `check_here()`, which raises `Unsupported` if a package is missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from pipeline.core import artifacts
from pipeline.core.explain import backend, check_options
from pipeline.core.quiet import output_to
from pipeline.core.records import Guesses, Options
from pipeline.divergence.distributions import F32

State = TypeVar("State")
Blocks = Iterator[tuple[int, int, F32]]  # (index of a window, position that predicts the first row, logits [rows, vocab])
Timed = Iterator[tuple[int, float]]  # (token id, time.monotonic() when it was known)
ROWS = 128  # positions projected at a time: 25 MB of float32 logits at a vocabulary of 49 152


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token. Temperature 0 is greedy; `stop` ends a reply at the model's end token."""

    temperature: float = 0.0
    seed: int = 0
    stop: bool = True


def choose(logits: F32, sampling: Sampling, rng: np.random.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(float) / sampling.temperature
    p = np.exp(scaled - scaled.max())
    return int(rng.choice(len(p), p=p / p.sum()))


@dataclass
class Trace:
    """Times of one request inside an engine, complete when `stream` has ended: seconds by a monotonic clock, read when the device
    has finished. prefill: the pass over the prompt; decode: each later pass; sampling: each choice of a token. A phase that an
    engine cannot time is None, and `unknown` says why."""

    prefill: float | None = None
    decode: list[float] | None = field(default_factory=list)
    sampling: list[float] | None = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    cache_bytes: int | None = None  # of keys and values, at the end
    cache_tokens: int | None = None  # that they have room for
    element_bytes: float | None = None  # of one number in the cache, by its type
    guesses: Guesses = field(default_factory=Guesses)

    def add(self, computed: float, chosen: float) -> None:
        """Add the seconds of a forward pass and of the choice of a token; the first pass is the prefill."""
        if self.prefill is None:
            self.prefill = computed
        elif self.decode is not None:
            self.decode.append(computed)
        if self.sampling is not None:
            self.sampling.append(chosen)

    @property
    def bytes_per_token(self) -> float | None:
        return self.cache_bytes / self.cache_tokens if self.cache_bytes is not None and self.cache_tokens else None


def steps(
    engine: Engine, read: Callable[[], tuple[State, F32]], decode: Callable[[State, int], F32], most: int, sampling: Sampling
) -> Generator[tuple[int, float], None, State]:
    """`stream` of an engine that returns logits; fills its trace. read: reads the prompt, and returns a state and the logits
    [vocab] after it; decode: the logits after one more token. Returns the last state."""
    rng, trace, ends = np.random.default_rng(sampling.seed), engine.trace, engine.end_ids if sampling.stop else ()
    start = time.monotonic()
    state, row = read()
    for step in range(most):
        computed = time.monotonic()
        token = choose(row, sampling, rng)
        chosen = time.monotonic()
        trace.add(computed - start, chosen - computed)
        yield token, chosen
        if token in ends or step == most - 1:
            break
        start = time.monotonic()
        row = decode(state, token)
    return state


class Engine(Protocol):
    """A loaded model. Token ids in, logits or tokens out; no text passes through it."""

    name: str
    vocab_size: int
    max_length: int
    tokenizer: Any
    end_ids: Any  # set of tokens that end a reply
    trace: Trace  # of the last request; `stream` puts a new one here

    def logits(self, token_ids: Sequence[int]) -> F32:
        """Teacher-forced logits at all positions: float32 [n, vocab], raw, temperature 1."""
        ...

    def logit_blocks(self, batch: Sequence[Sequence[int]], starts: Sequence[int], rows: int, whole: bool = False) -> Blocks:
        """Yield (index in batch, first position, float32 [at most `rows`, vocab]) over the positions starts[i] .. n - 2 of windows
        of equal length (of any, if an engine has `any_lengths`): memory does not grow with the batch. whole: by one pass of the
        whole model nevertheless."""
        ...

    def stream(self, token_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Timed:
        """Yield tokens one at a time."""
        ...

    def stream_on(self, token_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Timed:
        """`stream` without reading again what the prompt shares with the one before; else `Unsupported`."""
        ...

    def stream_batch(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Iterator[tuple[list[int], float]]:
        """Yield greedy tokens of prompts of equal length, one of each, and when they were known; end tokens are ignored.
        Preparation takes place before this returns, so that it is not timed."""
        ...

    def kernels(self) -> dict[str, int]:
        """{kind of product: number of the loaded model's matrices}; unpacked kinds are those of PLAIN in model/attestation."""
        ...

    def close(self) -> None: ...


def load(name: str, model_dir: Path, *, threads: int, **options: Any) -> Engine:
    """Load a model folder with an engine and its options."""
    check(name, options)
    with output_to(artifacts.LOGS / f"load-{model_dir.name}.log"):  # some libraries print pages while they load
        engine: Engine = backend("engines", name).load(model_dir, threads=threads, **options)
    return engine


def packs_cache(options: Options) -> bool:
    """Whether an engine's options store keys and values in fewer than 16 bits."""
    return options.get("kv", "auto") not in ("auto", "f32", "f16", "bf16")


def check(name: str, options: Options) -> None:
    """Raise `ParamsError` for an unknown engine or option, without loading anything heavy."""
    check_options(f"engine {name!r}", backend("engines", name).load, options, given={"model_dir", "threads"})


def check_here(name: str) -> None:
    """Raise `Unsupported` if a package of an engine is missing, without loading anything heavy."""
    getattr(backend("engines", name), "check_here", lambda: None)()
