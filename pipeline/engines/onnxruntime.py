"""ONNX Runtime GenAI, in process: one fused graph, no Python between the layers, packed int4 products on the CPU.

What bounds it: prefill is compute-bound in float32 (its CPU kernels have no bfloat16), decoding memory-bound."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core import artifacts
from pipeline.core.errors import Unsupported, needs
from pipeline.divergence.distributions import F32
from pipeline.engines import Blocks, Sampling, Timed, Trace, steps
from pipeline.engines._forest import common_prefix
from pipeline.model.config import end_ids

ROOM = 1024  # tokens: a generator's cache is made for a multiple of them
PIECE = 256  # tokens read at a time: the graph computes logits for all of them, wanted or not


def load(model_dir: Path, *, threads: int) -> OnnxRuntimeEngine:
    """Load a folder that the GenAI builder wrote."""
    with needs("engine 'onnxruntime'", "pip install onnxruntime-genai -c constraints.txt"):
        import onnxruntime_genai as og
        from transformers import AutoTokenizer
    if not (model_dir / "genai_config.json").exists():
        raise Unsupported(f"engine 'onnxruntime' reads a GenAI folder, which {model_dir} is not; use quantizer 'onnx'")
    config = og.Config(str(model_dir))
    config.overlay(f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {threads}}}}}}}}}')
    return OnnxRuntimeEngine(og, og.Model(config), AutoTokenizer.from_pretrained(model_dir), model_dir)


class OnnxRuntimeEngine:
    """See `pipeline.engines.Engine`. A request reuses the cache of the one before as far as they begin alike; `stream` does not."""

    name = "onnxruntime"

    def __init__(self, og: Any, model: Any, tokenizer: Any, folder: Path) -> None:
        self.og, self.model, self.tokenizer, self.folder = og, model, tokenizer, folder
        facts = artifacts.read_json(folder / "genai_config.json")["model"]
        self.vocab_size, self.max_length = int(facts["vocab_size"]), int(facts["context_length"])
        self.end_ids = end_ids(folder, tokenizer)
        self.trace = Trace()
        names, layers = facts["decoder"]["outputs"], range(int(facts["decoder"]["num_hidden_layers"]))
        kinds = [names[kind] for kind in ("present_key_names", "present_value_names") if kind in names]
        cache = [kind % layer for layer in layers for kind in kinds]
        made = {output.name for output in self._graph().output}  # a layer of convolutions has no keys
        self.cache_names = cache if made.issuperset(cache) else []
        self.reader: Any = None
        self.room, self.kept = 0, list[int]()

    def close(self) -> None:
        del self.reader, self.model

    def logits(self, token_ids: Sequence[int]) -> F32:
        return self._read(self._generator(len(token_ids) + 1), token_ids)

    def logit_blocks(self, batch: Sequence[Sequence[int]], starts: Sequence[int], rows: int, whole: bool = False) -> Blocks:
        for i, (ids, start) in enumerate(zip(batch, starts)):
            first, logits = self._read_on(list(ids[:-1]), start)
            for at in range(start, len(ids) - 1, rows):
                yield i, at, logits[at - first : at - first + rows]

    def stream(self, token_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Timed:
        def read() -> tuple[Any, F32]:
            generator = self._generator(len(token_ids) + max_new_tokens)
            return generator, self._read(generator, token_ids)[-1]

        return self._steps(read, max_new_tokens, sampling)

    def stream_on(self, token_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Timed:
        def read() -> tuple[Any, F32]:
            row = self._read_on(list(token_ids), len(token_ids) - 1, max_new_tokens)[1][-1]
            return self.reader, row

        return self._steps(read, max_new_tokens, sampling)

    def _steps(self, read: Callable[[], tuple[Any, F32]], most: int, sampling: Sampling) -> Timed:
        """read: as of `steps`; its state is the generator."""
        self.trace = trace = Trace()
        generator = yield from steps(self, read, lambda held, token: self._read(held, [token])[-1], most, sampling)
        # at the end, where it delays no token that is timed
        for name in self.cache_names:
            part = generator.get_output(name)  # [1, heads, room, width]
            trace.cache_bytes, trace.cache_tokens = (trace.cache_bytes or 0) + part.nbytes, part.shape[2]
            trace.element_bytes = part.itemsize

    def stream_batch(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Iterator[tuple[list[int], float]]:
        generator = self._generator(len(prompts[0]) + max_new_tokens, len(prompts))
        return self._batch_steps(generator, prompts, max_new_tokens)

    def _batch_steps(self, generator: Any, prompts: Sequence[Sequence[int]], steps: int) -> Iterator[tuple[list[int], float]]:
        """GenAI itself chooses the tokens, the likeliest except end tokens: it accepts tokens of several sequences only once."""
        generator.append_tokens(np.asarray([list(p) for p in prompts], np.int32))
        for _ in range(steps):
            generator.generate_next_token()
            tokens: list[int] = generator.get_next_tokens().tolist()
            yield tokens, time.monotonic()

    def kernels(self) -> dict[str, int]:
        """Number of products of each kind in the graph."""
        kinds = Counter(node.op_type for node in self._graph().node if "MatMul" in node.op_type or node.op_type == "Gemm")
        return {f"onnxruntime[{kind}]": n for kind, n in kinds.items()}

    def _graph(self) -> Any:
        import onnx

        return onnx.load(self.folder / "model.onnx", load_external_data=False).graph

    def _read_on(self, ids: list[int], start: int, more: int = 0) -> tuple[int, F32]:
        """(first, logits [n, vocab] from position `first` <= start on); the beginning that the last request had too is not read
        again. more: tokens that will be appended afterwards. At least two tokens are read at a time: one alone goes through the
        decoding kernels, which round differently."""
        at = max(0, min(common_prefix(self.kept, ids), start, len(ids) - 2))
        if not self.cache_names or len(ids) + more >= self.room:  # a state of convolutions cannot be rewound
            at, self.room = 0, min(self.max_length, ROOM * ((len(ids) + more) // ROOM + 1))
            self.reader = self._generator(self.room)
        else:
            self.reader.rewind_to(at)
        self.kept = []  # until it has been read
        first, blocks = at, []
        while at < len(ids):
            end = at + PIECE if len(ids) > at + PIECE + 1 else len(ids)
            if end <= start:
                self.reader.append_tokens(np.asarray([ids[at:end]], np.int32))
                first = end
            else:
                blocks.append(self._read(self.reader, ids[at:end]))
            at = end
        self.kept = ids
        return first, np.concatenate(blocks)

    def _generator(self, length: int, batch: int = 0) -> Any:
        """A generator of one sequence, whose tokens we choose, or of a batch that GenAI continues to its full length."""
        asked = self.og.GeneratorParams(self.model)
        most = min(length, self.max_length)
        asked.set_search_options(max_length=most, min_length=most if batch else 0, do_sample=False, batch_size=max(batch, 1))
        return self.og.Generator(self.model, asked)

    def _read(self, generator: Any, token_ids: Sequence[int]) -> F32:
        """Logits [n, vocab] of these tokens, after those that the generator has read."""
        generator.append_tokens(np.asarray([list(token_ids)], np.int32))
        logits: F32 = np.asarray(generator.get_output("logits"), np.float32)[0]
        return logits
