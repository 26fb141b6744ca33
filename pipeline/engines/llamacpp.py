"""llama.cpp, in process: its own kernels on packed GGUF blocks, its own key-value cache.

What bounds it: prefill is compute-bound, decoding memory-bound; without Python between the layers a small model comes close to both
limits. Token ids are the base's: GGUF keeps their order."""

from __future__ import annotations

import ctypes
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.core.errors import ArtifactError, Unsupported, needs
from pipeline.divergence.distributions import F32
from pipeline.engines import Blocks, Sampling, Timed, Trace, steps
from pipeline.engines._forest import Forest, common_prefix
from pipeline.engines._speculation import ALONE, Speculate, drafted, give_draft
from pipeline.model.config import end_ids

CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2}  # ggml.h: enum ggml_type
CACHE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}  # of one number; blocks carry a scale
CELLS = 256  # tokens: llama.cpp gives a sequence a multiple of them
BATCH = 512  # tokens in one pass
LANES = 2  # windows that are scored in parallel
SEQUENCES = 256  # llama.cpp's most in one context (LLAMA_MAX_SEQ)
LONGEST = 4096  # tokens: a longer window would only cost memory, as all scored texts are far shorter
Block = tuple[int, F32]  # first position, logits [n, vocab]


def load(
    model_dir: Path,
    *,
    threads: int,
    kv: Literal["f32", "f16", "bf16", "q8_0", "q4_0"] = "f16",
    gpu_layers: int = 0,
    speculate: Speculate | None = None,
) -> LlamaCppEngine:
    """Load model.gguf. kv: type of keys and values; gpu_layers: layers on a GPU (needs a build for one); speculate: what guesses
    replies ahead, a variant whose folder lies beside this one, or the text itself."""
    with needs("engine 'llamacpp'", "python -m pipeline.core.install"):
        import llama_cpp
        from transformers import AutoTokenizer
    file = model_dir / "model.gguf"
    if not file.exists():
        raise Unsupported(f"engine 'llamacpp' reads GGUF, and {model_dir} holds none; use quantizer 'gguf'")
    llama_cpp.llama_backend_init()
    asked = llama_cpp.llama_model_default_params()
    asked.n_gpu_layers = gpu_layers
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), asked)
    if not model:
        raise Unsupported(f"llama.cpp cannot load {file.name}; its log says why")
    engine = LlamaCppEngine(llama_cpp, model, AutoTokenizer.from_pretrained(model_dir), file, threads, kv)
    engine.device = "mixed" if gpu_layers else "cpu"
    if speculate:
        if engine._has_state():
            raise Unsupported("a recurrent model cannot take tokens back: no speculation")
        give_draft(engine, speculate, model_dir, partial(load, threads=threads, kv=kv, gpu_layers=gpu_layers))
    return engine


class LlamaCppEngine:
    """See `pipeline.engines.Engine`. A request reuses the cache of the one before as far as they begin alike."""

    name = "llamacpp"
    device = "cpu"
    any_lengths = True  # in one batch of `logit_blocks`
    speculate: Speculate | None = None
    draft: LlamaCppEngine | None = None

    def __init__(self, api: Any, model: Any, tokenizer: Any, file: Path, threads: int, kv: str) -> None:
        self.api, self.model, self.tokenizer, self.file, self.folder = api, model, tokenizer, file, file.parent
        self.vocab = api.llama_model_get_vocab(model)
        self.vocab_size = int(api.llama_vocab_n_tokens(self.vocab))
        self.row_type: Any = ctypes.c_float * self.vocab_size
        self.max_length = min(int(api.llama_model_n_ctx_train(model)), LONGEST)
        self.threads, self.kv = threads, kv
        self.context = self._context(sequences=1)
        self.memory = api.llama_get_memory(self.context)
        self.batch = api.llama_batch_init(BATCH, 0, 1)
        self.kept: list[int] = []
        self.forests: tuple[Any, Any] | None = None  # a context and a batch for them
        self.trace = Trace()
        self.end_ids = end_ids(self.folder, tokenizer)

    def close(self) -> None:
        for context, batch in [(self.context, self.batch), *([self.forests] if self.forests else [])]:
            self.api.llama_batch_free(batch)
            self.api.llama_free(context)
        self.api.llama_model_free(self.model)
        if self.draft:
            self.draft.close()

    def logits(self, token_ids: Sequence[int]) -> F32:
        return np.concatenate([block for _, block in self._rows(list(token_ids), 0)])

    def logit_blocks(self, batch: Sequence[Sequence[int]], starts: Sequence[int], rows: int, whole: bool = False) -> Blocks:
        windows = [(list(ids[:-1]), start) for ids, start in zip(batch, starts)]
        longest = max((len(ids) for ids, _ in windows), default=0)
        found: Iterable[Iterable[Block]] = (self._blocks(ids, start, rows) for ids, start in windows)
        if (
            self.device == "cpu" and self.threads >= LANES and len(windows) > 1 and longest <= BATCH
        ):  # a lane holds one pass's logits
            found = self._in_lanes(windows, rows, longest)
        for i, blocks in enumerate(found):
            yield from ((i, at, block) for at, block in blocks)

    def _in_lanes(self, windows: Sequence[tuple[list[int], int]], rows: int, longest: int) -> Iterator[list[Block]]:
        """`_blocks` of each window in turn, computed ahead by LANES, each with its own context and part of the threads. Threads of
        one pass wait for each other after every product; parallel passes wait neither for each other nor for the comparison."""
        lanes = [self._lane(longest) for _ in range(LANES)]

        def read(lane: LlamaCppEngine, ids: list[int], start: int) -> list[Block]:
            lane._forget_from(0)  # a window's digits may not depend on earlier windows
            return list(lane._blocks(ids, start, rows))

        try:
            with ThreadPoolExecutor(LANES) as pool:
                ahead = deque(pool.submit(read, lane, *window) for lane, window in zip(lanes, windows))
                for i in range(len(windows)):
                    blocks = ahead.popleft().result()
                    ahead.extend(pool.submit(read, lanes[i % LANES], *window) for window in windows[i + LANES :][:1])
                    yield blocks
        finally:
            for lane in lanes:
                self.api.llama_batch_free(lane.batch)
                self.api.llama_free(lane.context)

    def _lane(self, length: int) -> LlamaCppEngine:
        """The same model with its own context, for windows of `length` tokens."""
        lane = copy(self)
        lane.threads, lane.kept = self.threads // LANES, []
        lane.context = lane._context(1, length)
        lane.memory, lane.batch = self.api.llama_get_memory(lane.context), self.api.llama_batch_init(BATCH, 0, 1)
        return lane

    def _blocks(self, ids: list[int], start: int, rows: int) -> Iterator[Block]:
        """Rows from `start` on, in blocks that begin at start + k * rows, as the reference's do."""
        held: F32 = np.empty((0, self.vocab_size), np.float32)
        at = start
        for _, block in self._rows(ids, start):
            held = np.concatenate([held, block]) if len(held) else block
            while len(held) >= rows:
                yield at, held[:rows]
                held, at = held[rows:], at + rows
        if len(held):
            yield at, held

    def _rows(self, ids: list[int], start: int) -> Iterator[Block]:
        """(first position, logits [n, vocab]) of the positions from `start` on, pass by pass."""
        self._forget_from(min(common_prefix(self.kept, ids), start))
        for at in range(len(self.kept), len(ids), BATCH):
            part = ids[at : at + BATCH]
            wanted = [p >= start for p in range(at, at + len(part))]
            self._decode(part, at, wanted)
            if any(wanted):
                first = at + wanted.index(True)
                yield first, self._logits(self.context, at + len(part) - first)

    def forest_logits(self, forest: Forest, wanted: Sequence[int]) -> Iterator[tuple[list[int], F32]] | None:
        """(nodes, logits [n, vocab]) of the wanted nodes, pass by pass; None for a forest that does not fit. Each leaf's path is a
        sequence; a token that several share is computed once, as a token of them all."""
        leaves = forest.leaves()
        if self._has_state() or len(leaves) > SEQUENCES or len(forest.tokens) > self.max_length:  # a state follows one sequence
            return None
        sequences: list[list[int]] = [[] for _ in forest.tokens]
        for k, path in enumerate(leaves):
            for node in path:
                sequences[node].append(k)
        return self._forest_passes(forest, sequences, set(wanted))

    def _forest_passes(self, forest: Forest, sequences: list[list[int]], wanted: set[int]) -> Iterator[tuple[list[int], F32]]:
        if self.forests is None:
            self.forests = self._context(SEQUENCES), self.api.llama_batch_init(BATCH, 0, SEQUENCES)
        context, batch = self.forests
        self.api.llama_memory_clear(self.api.llama_get_memory(context), False)
        for at in range(0, len(forest.tokens), BATCH):
            nodes = range(at, min(at + BATCH, len(forest.tokens)))
            self._fill(batch, [(forest.tokens[n], forest.depths[n], sequences[n], n in wanted) for n in nodes])
            self._run(context, batch)
            found = [n for n in nodes if n in wanted]
            if found:
                yield found, self._logits(context, len(found))

    def _has_state(self) -> bool:
        return bool(self.api.llama_model_is_recurrent(self.model) or self.api.llama_model_is_hybrid(self.model))

    def stream(self, token_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Timed:
        self.forget()  # a repeated prompt must cost as much as a new one
        yield from self.stream_on(token_ids, max_new_tokens, sampling)

    def stream_on(self, token_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Timed:
        trace = self.trace = Trace(element_bytes=CACHE_BYTES[self.kv])
        yield from drafted(self, token_ids, max_new_tokens, sampling) or self._steps(token_ids, max_new_tokens, sampling)
        # at the end, where it delays no token that is timed
        trace.cache_bytes, trace.cache_tokens = int(self.api.llama_state_seq_get_size(self.context, 0)), len(self.kept)

    def stream_undrafted(self, token_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Timed:
        """`stream` without speculation, for comparison."""
        self.forget()
        self.trace = Trace(element_bytes=CACHE_BYTES[self.kv])
        return self._steps(token_ids, max_new_tokens, sampling)

    def _steps(self, token_ids: Sequence[int], most: int, sampling: Sampling) -> Timed:
        ids = list(token_ids)
        return steps(self, lambda: (ids, list(self._rows(ids, len(ids) - 1))[-1][1][-1]), self._step, most, sampling)

    def rows_after(self, ids: list[int], tokens: list[int]) -> F32:
        return np.concatenate([block for _, block in self._rows([*ids, *tokens], len(ids))])

    def forget(self) -> None:
        self._forget_from(0)

    def _step(self, ids: list[int], token: int) -> F32:
        """Logits [vocab] after one more token, which joins `ids`."""
        self._decode([token], len(ids), [True])
        ids.append(token)
        return self._row()

    def stream_batch(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Iterator[tuple[list[int], float]]:
        if self.speculate:
            raise Unsupported(ALONE)
        context = self._context(len(prompts), len(prompts[0]) + max_new_tokens)
        return self._batch_steps(context, self.api.llama_batch_init(BATCH, 0, 1), prompts, max_new_tokens)

    def _batch_steps(
        self, context: Any, batch: Any, prompts: Sequence[Sequence[int]], steps: int
    ) -> Iterator[tuple[list[int], float]]:
        """Each prompt is a sequence with its own part of the cache; a step is one pass over one token of each."""
        last = len(prompts[0]) - 1
        todo = [(token, at, [s], at == last) for s, prompt in enumerate(prompts) for at, token in enumerate(prompt)]
        try:
            for step in range(steps):
                tokens: list[int] = []
                for at in range(0, len(todo), BATCH):
                    part = todo[at : at + BATCH]
                    self._fill(batch, part)
                    self._run(context, batch)
                    wanted = sum(t[3] for t in part)
                    tokens += self._logits(context, wanted).argmax(1).tolist() if wanted else []
                yield tokens, time.monotonic()
                todo = [(token, last + 1 + step, [s], True) for s, token in enumerate(tokens)]
        finally:
            self.api.llama_batch_free(batch)
            self.api.llama_free(context)

    def _row(self) -> F32:
        """Logits [vocab] of a pass that asked for one row, in llama.cpp's own memory, until the next pass. Built from the address:
        NumPy's as_array takes 60 us in a cold cache, 1 % of a small model's token."""
        address = ctypes.addressof(self.api.llama_get_logits(self.context).contents)
        return np.frombuffer(self.row_type.from_address(address), np.float32)

    def tokenize(self, text: str) -> list[int]:
        """Token ids by the model file's own tokenizer, with its leading token; no text counts as a special token."""
        data = text.encode()
        room = (self.api.llama_token * (len(data) + 8))()  # a token has at least a byte; a few are added around
        n = self.api.llama_tokenize(self.vocab, data, len(data), room, len(room), True, False)
        if n < 0:
            raise ArtifactError(f"llama.cpp could not tokenize {len(data)} bytes (code {n})")
        return list(room[:n])

    def leading_token(self) -> int | None:
        """The token that the model file's tokenizer puts before every text, or None."""
        return int(self.api.llama_vocab_bos(self.vocab)) if self.api.llama_vocab_get_add_bos(self.vocab) else None

    def kernels(self) -> dict[str, int]:
        """Number of matrices of each GGUF type."""
        from gguf import GGUFReader

        types = (t.tensor_type.name for t in GGUFReader(self.file).tensors if len(t.shape) == 2)
        return {f"ggml[{name}]": n for name, n in Counter(types).items()}

    # --- the cache -----------------------------------------------------------------------------------------------

    def plain(self) -> LlamaCppEngine:
        """The same weights with keys and values of 16 bits. Close only one of the two."""
        return LlamaCppEngine(self.api, self.model, self.tokenizer, self.file, self.threads, "f16")

    def _forget_from(self, position: int) -> None:
        """Keep only the cached tokens before a position; none where that is refused, as for a recurrent state."""
        if not self.api.llama_memory_seq_rm(self.memory, 0, position, -1):
            self.api.llama_memory_clear(self.memory, True)
            position = 0
        self.kept = self.kept[:position]

    def _decode(self, ids: list[int], at: int, wanted: list[bool]) -> None:
        """One pass over at most BATCH tokens at positions from `at` on."""
        self._fill(self.batch, [(token, at + k, [0], wanted[k]) for k, token in enumerate(ids)])
        self._run(self.context, self.batch)
        self.kept += ids

    def _fill(self, batch: Any, tokens: list[tuple[int, int, list[int], bool]]) -> None:
        """tokens: (id, position, its sequences, whether its logits are wanted)."""
        batch.n_tokens = len(tokens)
        for k, (token, position, sequences, wanted) in enumerate(tokens):
            batch.token[k], batch.pos[k], batch.logits[k], batch.n_seq_id[k] = token, position, wanted, len(sequences)
            for j, sequence in enumerate(sequences):
                batch.seq_id[k][j] = sequence

    def _run(self, context: Any, batch: Any) -> None:
        code = self.api.llama_decode(context, batch)
        if code:
            raise Unsupported(f"llama.cpp could not compute {batch.n_tokens} tokens from position {batch.pos[0]} on (code {code})")

    def _logits(self, context: Any, rows: int) -> F32:
        """A copy of the last pass's wanted logits, in order: float32 [rows, vocab]."""
        return np.ctypeslib.as_array(self.api.llama_get_logits(context), shape=(rows, self.vocab_size)).copy()

    def _context(self, sequences: int, length: int | None = None) -> Any:
        """A llama.cpp context for a number of sequences that share one cache, or, with a length, have so many tokens each."""
        asked = self.api.llama_context_default_params()
        asked.n_ctx, asked.n_batch, asked.n_ubatch = self.max_length, BATCH, BATCH
        asked.n_threads = asked.n_threads_batch = self.threads
        asked.type_k = asked.type_v = CACHE_TYPES[self.kv]
        asked.no_perf = True
        if length is not None:
            room = -(-length // CELLS) * CELLS
            asked.n_ctx, asked.n_seq_max, asked.kv_unified = sequences * room, sequences, False
        elif sequences > 1:
            asked.n_seq_max, asked.kv_unified = sequences, True
        context = self.api.llama_init_from_model(self.model, asked)
        if not context:
            raise Unsupported(f"llama.cpp cannot keep keys and values as {self.kv} for this model")
        return context
