"""llama.cpp, in process: its own kernels on packed GGUF blocks, its own key-value cache.

What bounds it: as everywhere, prefill is arithmetic and decoding is memory; there is no Python between the layers, so a small
model comes close to both. Token ids are the base's: GGUF keeps their order.
"""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.engines import Sampling, choose
from pipeline.engines._forest import common_prefix
from pipeline.errors import ArtifactError, Unsupported

CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2}  # ggml.h: enum ggml_type
BATCH = 512  # tokens in one pass
LONGEST = 4096  # a longer window would only cost memory here: no text that is scored comes near


def load(
    model_dir: Path,
    *,
    threads: int,
    kv_type: Literal["f32", "f16", "bf16", "q8_0", "q4_0"] = "f16",
    gpu_layers: int = 0,
) -> LlamaCppEngine:
    """Load model.gguf. kv_type: how keys and values are kept; gpu_layers: layers on a GPU (a build with one is needed)."""
    try:
        import llama_cpp
        from transformers import AutoTokenizer
    except ImportError as e:
        raise Unsupported(f"engine 'llamacpp' needs {e.name}; pip install llama-cpp-python -c constraints.txt") from None
    file = model_dir / "model.gguf"
    if not file.exists():
        raise Unsupported(f"engine 'llamacpp' reads GGUF, and {model_dir} holds none; use quantizer 'gguf'")
    llama_cpp.llama_backend_init()
    asked = llama_cpp.llama_model_default_params()
    asked.n_gpu_layers = gpu_layers
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), asked)
    if not model:
        raise ArtifactError(f"llama.cpp cannot load {file}; delete {model_dir} and `dvc repro`")
    return LlamaCppEngine(llama_cpp, model, AutoTokenizer.from_pretrained(model_dir), file, threads, kv_type)


class LlamaCppEngine:
    """See `pipeline.engines.Engine`. Requests that begin alike reuse the cache of the one before."""

    name = "llamacpp"

    def __init__(self, api: Any, model: Any, tokenizer: Any, file: Path, threads: int, kv_type: str) -> None:
        self.api, self.model, self.tokenizer, self.file, self.folder = api, model, tokenizer, file, file.parent
        self.vocab = api.llama_model_get_vocab(model)
        self.vocab_size = int(api.llama_vocab_n_tokens(self.vocab))
        self.row_type: Any = ctypes.c_float * self.vocab_size
        self.max_length = min(int(api.llama_model_n_ctx_train(model)), LONGEST)
        asked = api.llama_context_default_params()
        asked.n_ctx, asked.n_batch, asked.n_ubatch = self.max_length, BATCH, BATCH
        asked.n_threads = asked.n_threads_batch = threads
        asked.type_k = asked.type_v = CACHE_TYPES[kv_type]
        asked.no_perf = True
        self.context = api.llama_init_from_model(model, asked)
        if not self.context:
            raise Unsupported(f"llama.cpp cannot keep keys and values as {kv_type} for this model")
        self.memory = api.llama_get_memory(self.context)
        self.batch = api.llama_batch_init(BATCH, 0, 1)
        self.kept: list[int] = []
        self.kv_bytes_per_token: float | None = None
        self.ends = {int(t) for t in range(self.vocab_size) if api.llama_vocab_is_eog(self.vocab, t)}

    def close(self) -> None:
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        return np.concatenate([block for _, block in self._rows(list(token_ids), 0)])

    def logit_blocks(
        self, batch: Sequence[Sequence[int]], starts: Sequence[int], rows: int, whole: bool = False
    ) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
        for i, (ids, start) in enumerate(zip(batch, starts)):
            yield from ((i, at, block) for at, block in self._blocks(list(ids[:-1]), start, rows))

    def _blocks(self, ids: list[int], start: int, rows: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Rows from `start` on, cut at start + k * rows as the reference's are."""
        held: NDArray[np.float32] = np.empty((0, self.vocab_size), np.float32)
        at = start
        for _, block in self._rows(ids, start):
            held = np.concatenate([held, block]) if len(held) else block
            while len(held) >= rows:
                yield at, held[:rows]
                held, at = held[rows:], at + rows
        if len(held):
            yield at, held

    def _rows(self, ids: list[int], start: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """(first position, logits [n, vocab]) of the positions from `start` on, pass by pass."""
        begin = min(common_prefix(self.kept, ids), start)
        self._forget_from(begin)
        for at in range(begin, len(ids), BATCH):
            part = ids[at : at + BATCH]
            wanted = [p >= start for p in range(at, at + len(part))]
            self._decode(part, at, wanted)
            if any(wanted):
                first = at + wanted.index(True)
                count = at + len(part) - first
                pointer = self.api.llama_get_logits(self.context)
                yield first, np.ctypeslib.as_array(pointer, shape=(count, self.vocab_size)).copy()

    def stream(self, token_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Iterator[tuple[int, float]]:
        rng = np.random.default_rng(sampling.seed)
        ids = list(token_ids)
        self._forget_from(0)  # a prompt that was seen before must cost what a new one costs
        row = list(self._rows(ids, len(ids) - 1))[-1][1][-1]
        for step in range(max_new_tokens):
            token = choose(row, sampling, rng)
            yield token, time.monotonic()
            if (sampling.stop and token in self.ends) or step == max_new_tokens - 1:
                break
            self._decode([token], len(ids), [True])
            ids.append(token)
            row = self._row()
        # last, so that the call stands between no two tokens that somebody times
        self.kv_bytes_per_token = self.api.llama_state_seq_get_size(self.context, 0) / len(ids)

    def _row(self) -> NDArray[np.float32]:
        """Logits [vocab] of a pass that asked for one row: llama.cpp's own memory, until the next pass.

        Built from the address, since NumPy's as_array takes 60 us in a cold cache, 1 % of a small model's token.
        """
        address = ctypes.addressof(self.api.llama_get_logits(self.context).contents)
        return np.frombuffer(self.row_type.from_address(address), np.float32)

    def tokenize(self, text: str) -> list[int]:
        """Token ids by the model file's own tokenizer: it begins a text as it likes, and reads no special tokens out of it."""
        data = text.encode()
        room = (self.api.llama_token * (len(data) + 8))()  # a token is a byte at least; a few are put around
        n = self.api.llama_tokenize(self.vocab, data, len(data), room, len(room), True, False)
        if n < 0:
            raise ArtifactError(f"llama.cpp could not tokenize {len(data)} bytes (code {n})")
        return list(room[:n])

    def leading_token(self) -> int | None:
        """What the model file's tokenizer puts in front of every text, or None."""
        return int(self.api.llama_vocab_bos(self.vocab)) if self.api.llama_vocab_get_add_bos(self.vocab) else None

    def kernels(self) -> dict[str, int]:
        """How many matrices of each GGUF type llama.cpp multiplies."""
        from gguf import GGUFReader

        types = (t.tensor_type.name for t in GGUFReader(self.file).tensors if len(t.shape) == 2)
        return {f"ggml[{name}]": n for name, n in Counter(types).items()}

    # --- the cache -----------------------------------------------------------------------------------------------

    def _forget_from(self, position: int) -> None:
        self.api.llama_memory_seq_rm(self.memory, 0, position, -1)
        self.kept = self.kept[:position]

    def _decode(self, ids: list[int], at: int, wanted: list[bool]) -> None:
        """One pass over at most BATCH tokens at positions from `at` on."""
        self.batch.n_tokens = len(ids)
        for k, token in enumerate(ids):
            self.batch.token[k], self.batch.pos[k], self.batch.logits[k] = token, at + k, wanted[k]
            self.batch.n_seq_id[k], self.batch.seq_id[k][0] = 1, 0
        code = self.api.llama_decode(self.context, self.batch)
        if code:
            raise ArtifactError(f"llama.cpp could not compute {len(ids)} tokens at position {at} (code {code})")
        self.kept += ids
