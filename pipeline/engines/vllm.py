"""vLLM, in its own environment and process (_vllm_driver.py): its kernels, packed formats and paged cache.

What bounds it: prefill is compute-bound, decoding memory-bound; its scheduler is Python between the passes. Its logits are compared
with the reference's in its process (divergence/in_vllm.py), and always checked against its own log-probabilities."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from pipeline.core import artifacts, install, isolate, quota, venvs
from pipeline.core.errors import InvalidVariant, NoResult, Unsupported, needs
from pipeline.divergence.distributions import F32, TokenRows
from pipeline.engines import Blocks, Sampling, Timed, Trace
from pipeline.engines._vllm_driver import Answer, Question
from pipeline.model.config import end_ids, window

READS = "hf"  # the engine whose folders it loads
DRIVER = Path(__file__).with_name("_vllm_driver.py")
CACHE_GIB = "2"  # for keys and values on a CPU; by default it takes 92 % of all memory
ALONE = "vLLM chooses tokens within its step: the other phases hold it"
NOT_KEPT = "engine 'vllm' runs without its prefix cache, since a prompt whose beginning is cached gives no logits there"


def load(
    model_dir: Path,
    *,
    threads: int,
    kv: Literal["auto", "fp8"] = "auto",
    max_length: Annotated[int, Field(gt=1)] = 4096,
    graphs: bool = True,
    gpu_memory: Annotated[float, Field(gt=0, le=1)] = 0.9,
    tensor_parallel: Annotated[int, Field(ge=1)] = 1,
) -> VllmEngine:
    """Load a Hugging Face folder. kv: type of keys and values; max_length: of prompt and reply, in tokens; graphs: record CUDA
    graphs (a CPU has none); gpu_memory: share of each card that it takes; tensor_parallel: cards that share the model."""
    if artifacts.trusts_code(model_dir):
        raise Unsupported("engine 'vllm' runs no code of a model's own")
    with needs("engine 'vllm'", "pip install transformers -c constraints.txt"):
        from transformers import AutoConfig, AutoTokenizer
    config = AutoConfig.from_pretrained(model_dir).get_text_config()
    length = min(window(config.to_dict()) or max_length, max_length)
    arguments = {
        "model": str(model_dir.absolute()), "skip_tokenizer_init": True, "trust_remote_code": False, "load_format": "safetensors",
        "kv_cache_dtype": kv, "gpu_memory_utilization": gpu_memory, "tensor_parallel_size": tensor_parallel,
        "enable_prefix_caching": False, "max_model_len": length + 2, "max_num_batched_tokens": max(length + 2, 2048),
        "eager": not graphs, "disable_log_stats": True, "worker_extension_cls": "pipeline.divergence.in_vllm.LogitsReader",
    }  # fmt: skip
    driver = Driver([venvs.vllm(), str(DRIVER)], arguments, isolate.log_of(f"vllm {model_dir.name}"), threads)
    return VllmEngine(driver, AutoTokenizer.from_pretrained(model_dir), model_dir, int(config.vocab_size), length, threads, kv)


check_here = venvs.vllm


class Driver:
    """The process that runs vLLM; questions and answers are lines of JSON. facts: its first answer, once it has loaded."""

    def __init__(self, command: list[str], arguments: dict[str, object], log: Path, threads: int) -> None:
        self.log, self.oom_kills = log, quota.oom_kills()
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = {
            "PYTHONPATH": str(DRIVER.parents[2]), "OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
            "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "GOMP_SPINCOUNT": "10000",  # as quiet.before_sharing_cores
        }  # fmt: skip
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True,
                env={"VLLM_CPU_KVCACHE_SPACE": CACHE_GIB} | install.clean() | variables,
            )  # fmt: skip
        try:
            self.facts = self.ask(arguments)["facts"]
        except NoResult:
            self.close()
            raise

    def ask(self, question: Mapping[str, object]) -> Answer:
        self.send(question)
        return self.answer()

    def send(self, question: Mapping[str, object]) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has died: the answer says how
            print(json.dumps(question), file=self.process.stdin, flush=True)

    def answer(self) -> Answer:
        """The next answer; raises what vLLM cannot do (`Unsupported`) or its self-check rejects (`InvalidVariant`)."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise isolate.how_it_ended("vllm", self.process.wait(), self.log, self.oom_kills)
        answer: Answer = json.loads(line)
        if why := answer.get("unsupported"):
            raise Unsupported(f"vLLM cannot load this model here: {why} (see {self.log})")
        if why := answer.get("fault"):
            raise InvalidVariant(why)
        return answer

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self.process.communicate()  # closes its input, and it ends


class VllmEngine:
    """See `pipeline.engines.Engine`; besides, `compare_blocks`."""

    name = "vllm"

    def __init__(
        self, driver: Driver, tokenizer: Any, folder: Path, vocab_size: int, max_length: int, threads: int, kv: str = "auto"
    ) -> None:
        self.driver, self.tokenizer, self.folder = driver, tokenizer, folder
        self.vocab_size, self.max_length, self.threads = vocab_size, max_length, threads
        self.end_ids, self.trace, self.asked = end_ids(folder, tokenizer), Trace(), 0
        self.device = str(driver.facts["device"])
        self.attention = f"{driver.facts['attention']} of vLLM {driver.facts['version']}"
        scratch = Path(tempfile.mkdtemp(prefix="quantgate-vllm-"))
        weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
        self.file = scratch / "logits"
        if kv != "auto" and driver.facts["element_bytes"] != 1:
            raise InvalidVariant(f"kv: {kv} was requested, but vLLM stores keys and values as {driver.facts['cache_type']}")

    def close(self) -> None:
        self.driver.close()

    # --- teacher-forced ------------------------------------------------------------------------------------------

    def logits(self, token_ids: Sequence[int]) -> F32:
        return self._logits([*token_ids, 0], 0)

    def logit_blocks(self, batch: Sequence[Sequence[int]], starts: Sequence[int], rows: int, whole: bool = False) -> Blocks:
        for i, (ids, start) in enumerate(zip(batch, starts)):
            given = self._logits(ids, start)
            yield from ((i, start + at, given[at : at + rows]) for at in range(0, len(given), rows))

    def compare_blocks(
        self, batch: Sequence[Sequence[int]], starts: Sequence[int], expected: Sequence[Iterator[tuple[int, F32]]]
    ) -> Iterator[tuple[int, int, TokenRows]]:
        """Yield (index in batch, first position, rows) of each window, compared in vLLM's process.
        expected: the reference's blocks of each window, from its start on."""
        for i, (ids, start) in enumerate(zip(batch, starts)):
            with self.file.open("wb") as f:
                for _, block in expected[i]:
                    block.tofile(f)
            rows = self._score(ids, start, self.threads)
            yield i, start, TokenRows(**{name: np.asarray(values) for name, values in rows.items()})

    def _logits(self, ids: Sequence[int], start: int) -> F32:
        self._score(ids, start, 0)
        return np.fromfile(self.file, np.float32).reshape(-1, self.vocab_size)

    def _score(self, ids: Sequence[int], start: int, threads: int) -> dict[str, list[float]]:
        asked: Question = {
            "ids": list(ids), "start": start, "vocab": self.vocab_size, "file": str(self.file), "threads": threads
        }  # fmt: skip
        return self.driver.ask(asked)["rows"]

    # --- generation ----------------------------------------------------------------------------------------------

    def stream(self, token_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Timed:
        facts = self.driver.facts
        trace = self.trace = Trace(
            sampling=None, unknown={"sampling": ALONE}, cache_bytes=facts["cache_bytes"], cache_tokens=facts["cache_tokens"],
            element_bytes=facts["element_bytes"],
        )  # fmt: skip
        before = time.monotonic()
        for tokens, at in self._steps([token_ids], max_new_tokens, sampling):
            trace.add(at - before, 0.0)
            before = at
            yield tokens[0], at

    def stream_on(self, token_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Timed:
        raise Unsupported(NOT_KEPT)

    def stream_batch(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Iterator[tuple[list[int], float]]:
        return self._steps(prompts, max_new_tokens, Sampling(stop=False))

    def sample(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling) -> list[list[int]]:
        """Continue prompts in a batch; each reply ends at (and includes) its end token."""
        self._begin(prompts, max_new_tokens, sampling, whole=True)
        replies = self.driver.answer()["replies"]
        self.driver.answer()
        return replies

    def _begin(self, prompts: Sequence[Sequence[int]], most: int, sampling: Sampling, whole: bool) -> None:
        self.asked += 1
        asked: Question = {
            "prompts": [list(p) for p in prompts], "most": most, "temperature": sampling.temperature, "seed": sampling.seed,
            "ends": sorted(self.end_ids) if sampling.stop else [], "number": self.asked, "whole": whole,
        }  # fmt: skip
        self.driver.send(asked)

    def _steps(self, prompts: Sequence[Sequence[int]], most: int, sampling: Sampling) -> Iterator[tuple[list[int], float]]:
        self._begin(prompts, most, sampling, whole=False)
        try:
            while "done" not in (answer := self.driver.answer()):
                yield answer["tokens"], answer["at"]
        except GeneratorExit:  # the rest is not needed
            self.driver.send({})
            while "done" not in self.driver.answer():
                pass
            raise

    def kernels(self) -> dict[str, int]:
        return dict(self.driver.facts["kernels"])
