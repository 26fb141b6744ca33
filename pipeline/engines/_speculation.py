"""Speculative decoding at temperature 0: a draft guesses tokens, and one pass of the model over all of them shows which are right.

Each decoding pass reads all weights, so a pass over several tokens costs little more than one over a single token. The reply is the
model's own up to rounding, as such a pass sums in another order. Source: Leviathan, Kalman and Matias 2023, "Fast inference from
transformers via speculative decoding"; without a second model: Saxena 2023, "Prompt lookup decoding"."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from pipeline.core import artifacts, records
from pipeline.core.errors import Unsupported
from pipeline.core.records import ModelManifest, Options, TimingsMeta, Undrafted
from pipeline.divergence.distributions import F32
from pipeline.engines import Sampling, Timed, Trace
from pipeline.engines._forest import common_prefix

NGRAM = "ngram"
ALONE = "a draft guesses for one request at a time here"
GRAMS = (3, 2)  # lengths of the token runs that are looked up, the longest first

Propose = Callable[[list[int], int], list[int]]  # (all tokens so far, how many at most): the tokens that may follow


@with_config(ConfigDict(extra="forbid"))
class Speculate(TypedDict):
    """draft: a variant of the same engine, or `ngram`: whatever followed the last tokens earlier in the text."""

    draft: str
    tokens: Annotated[int, Field(ge=1, le=16)]  # guessed for each pass


class Reader(Protocol):
    """An engine that can remove tokens from its cache."""

    end_ids: Any
    trace: Trace

    def rows_after(self, ids: list[int], tokens: list[int]) -> F32:
        """Logits [len(tokens), vocab] after each of `tokens`, which follow `ids`. The part of `ids` in the cache is not read again;
        the rest of the cache is removed."""
        ...

    def forget(self) -> None:
        """Empty the cache."""
        ...


def drafting_variant(engine_options: Options) -> str | None:
    """The variant that drafts, or None."""
    draft = (engine_options.get("speculate") or {}).get("draft")
    return None if draft == NGRAM else draft


def other_draft(timed: TimingsMeta, draft: str) -> bool:
    """Whether timings were taken with another build of the drafting variant than the present one."""
    built = records.read(artifacts.model_dir(draft) / artifacts.MANIFEST, ModelManifest)["digest"]
    return timed.get("draft") not in (None, built)


def give_draft(engine: Any, speculate: Speculate, model_dir: Path, load: Callable[[Path], Any]) -> None:
    """Let an engine speculate. load: loads the drafting variant from its folder, which lies beside `model_dir`."""
    engine.speculate = speculate
    if name := drafting_variant({"speculate": speculate}):
        folder = model_dir.parent / name
        artifacts.check_model(folder, records.read(folder / artifacts.MANIFEST, ModelManifest))
        engine.draft = load(folder)
        if engine.draft.vocab_size != engine.vocab_size:
            sizes = f"{engine.draft.vocab_size} and {engine.vocab_size} entries"
            raise Unsupported(f"draft {name!r} has another vocabulary ({sizes}); name a variant of the same base")


def drafted(engine: Any, prompt: Sequence[int], most: int, sampling: Sampling) -> Timed | None:
    """`speculated` by the engine's option; None where it does not apply."""
    if not engine.speculate or sampling.temperature > 0:
        return None
    begin = partial(by_model, engine.draft) if engine.draft else lookup
    return speculated(engine, prompt, begin, engine.speculate["tokens"], most, sampling)


def lookup(prompt: list[int]) -> Propose:
    """Guess what followed the last three, or two, tokens at their last place in the prompt or the reply."""
    follows: dict[tuple[int, ...], int] = {}
    seen = 0

    def propose(ids: list[int], most: int) -> list[int]:
        nonlocal seen
        for at in range(seen, len(ids)):
            follows.update((tuple(ids[at - n : at]), at) for n in GRAMS if n <= at)
        seen = len(ids)
        at = next((follows[gram] for n in GRAMS if (gram := tuple(ids[-n:])) in follows), seen)
        return ids[at : at + most]

    propose(prompt, 0)
    return propose


def by_model(draft: Reader, prompt: list[int]) -> Propose:
    """Let another model of the same vocabulary read the prompt and guess."""
    draft.forget()
    draft.rows_after(prompt[:-1], prompt[-1:])

    def propose(ids: list[int], most: int) -> list[int]:
        text = list(ids)
        for _ in range(most):
            text.append(_likeliest(draft, text))
        return text[len(ids) :]

    return propose


def _likeliest(engine: Reader, text: list[int]) -> int:
    return int(engine.rows_after(text[:-1], text[-1:])[-1].argmax())


def speculated(
    engine: Reader, prompt: Sequence[int], begin: Callable[[list[int]], Propose], tokens: int, most: int, sampling: Sampling
) -> Timed:
    """`stream` of an engine with `rows_after`, at temperature 0; fills its trace. begin: reads the prompt for the draft, as part of
    the prefill; tokens: guessed for each pass."""
    trace, ends, text, given = engine.trace, engine.end_ids if sampling.stop else (), list(prompt), 0
    proposed, accepted = trace.guesses["proposed"], trace.guesses["accepted"] = [], []
    trace.decode = trace.sampling = None
    trace.unknown = dict.fromkeys(("decode", "sampling"), "a pass gives several tokens: see accepted")
    start = time.monotonic()
    chosen, propose = [_likeliest(engine, text)], begin(text)
    now = time.monotonic()
    trace.prefill = now - start
    while True:
        for token in chosen:
            yield token, now
            given += 1
            if token in ends or given == most:
                return
        text += chosen  # the last of them is not in the cache
        guessed = propose(text, min(tokens, most - given - 1))
        chosen = engine.rows_after(text[:-1], [text[-1], *guessed]).argmax(1).tolist()
        right = common_prefix(guessed, chosen)
        chosen = chosen[: right + 1]
        proposed.append(len(guessed))
        accepted.append(right)
        now = time.monotonic()


def without_draft(engine: Reader, prompt: Sequence[int], tokens: int, most: int) -> Undrafted:
    """The greedy reply token by token, and the effect of rounding where `tokens` guesses and one more token share a pass."""
    text, rows = list(prompt), list[F32]()
    engine.forget()
    while len(rows) < most and (not rows or text[-1] not in engine.end_ids):
        rows.append(engine.rows_after(text[:-1], text[-1:])[-1])
        text.append(int(rows[-1].argmax()))
    single, n = np.stack(rows), len(prompt)
    engine.forget()
    passes = [engine.rows_after(text[: n - 1], text[n - 1 : n])]
    passes += [
        engine.rows_after(text[:at], text[at : min(at + tokens + 1, len(text) - 1)]) for at in range(n, len(text) - 1, tokens + 1)
    ]
    top = np.argpartition(single, -2, axis=1)[:, -2:]
    alone, together = (np.diff(np.take_along_axis(x, top, 1), axis=1)[:, 0] for x in (single, np.concatenate(passes)))
    return {"token_ids": text[n:], "gaps": np.abs(alone).tolist(), "moved": float(np.abs(alone - together).max())}
