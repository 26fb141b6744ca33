"""Engine vllm without vLLM: a model that calls `compute_logits` as vLLM's runner does, and each way in which that can go wrong."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, make_model
from store_house import columns, stored, windows_of

from pipeline import engines, quantizers
from pipeline.core import params, venvs
from pipeline.core.errors import Crashed, InvalidVariant, ParamsError, Unsupported
from pipeline.core.params import Variant
from pipeline.divergence.in_vllm import LogitsReader
from pipeline.divergence.store import Store
from pipeline.engines import Sampling, _vllm_driver, vllm
from pipeline.preflight import model as preflight
from pipeline.speed import hardware

FACTS = {
    "device": "cpu", "attention": "TOY", "version": "0", "cache_type": "torch.bfloat16", "element_bytes": 2, "kernels": {},
    "cache_bytes": 80, "cache_tokens": 10,
}  # fmt: skip


class Model:
    def __init__(self, head: Callable[[Any], Any]) -> None:
        self.head = head

    def compute_logits(self, hidden: Any) -> Any:
        return self.head(hidden)


class Toy:
    """What the driver asks of `LLM`, on a transformers model. fault(toy, last, rest) calls compute_logits in another way than
    vLLM does, where it should call it for hidden states [1, d], which it samples from, and then for [n - 1, d]."""

    def __init__(self, model: Any, fault: Callable[..., None] | None = None, other_card: bool = False) -> None:
        self.engine, self.fault = model, fault
        self.runner = Model(model.head.tensor)
        self.workers = [LogitsReader() for _ in range(1 + other_card)]
        for worker in self.workers:
            worker.model_runner = SimpleNamespace(model=self.runner)
        if other_card:
            self.workers[0].model_runner = SimpleNamespace(model=Model(lambda hidden: None))

    def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(worker, name)(*args) for worker in self.workers]

    def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> Any:
        ids = prompts[0]["prompt_token_ids"]
        assert (params["prompt_logprobs"], params["max_tokens"]) == (1, 1)
        hidden, plain = self.engine.hidden([ids])[0], self.engine.head
        if self.fault:
            self.fault(self, hidden[-1:], hidden[:-1])
        else:
            for worker in self.workers:  # as on every card
                worker.model_runner.model.compute_logits(hidden[-1:])
                worker.model_runner.model.compute_logits(hidden[:-1])
        logp = torch.log_softmax(plain.tensor(hidden[:-1]).float(), -1)
        said = [None, *({ids[p + 1]: SimpleNamespace(logprob=float(logp[p, ids[p + 1]]))} for p in range(len(ids) - 1))]
        return [SimpleNamespace(prompt_logprobs=said)]


class InProcess(vllm.Driver):
    """The driver's loop in this process, behind the same lines of JSON."""

    def __init__(self, llm: Any, facts: dict[str, Any] = FACTS) -> None:
        self.llm, self.facts, self.lines = llm, facts, list[str]()
        self.process: Any = SimpleNamespace(stdout=SimpleNamespace(readline=lambda: self.lines.pop(0)))

    def send(self, question: dict[str, Any]) -> None:
        line = json.dumps(question)
        _vllm_driver.serve(self.llm, dict, [line], lambda answer: self.lines.append(json.dumps(answer)), lambda: False)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_bf16: Path) -> tuple[Store, Any]:
    engine: Any = engines.load("hf", tiny_bf16, threads=1)
    return stored(engine, windows_of(engine), tmp_path_factory.mktemp("vllm") / "reference"), engine


def engine_on(model: Any, fault: Any = None, **how: Any) -> vllm.VllmEngine:
    return vllm.VllmEngine(InProcess(Toy(model, fault, **how)), model.tokenizer, Path(model.model.name_or_path), 512, 128, 1)


@pytest.mark.parametrize("other_card", [False, True])
def test_rows_compared_in_the_worker_are_those_that_its_logits_give_here(base: Any, tmp_path: Path, other_card: bool) -> None:
    where, _ = base
    other: Any = engines.load("hf", make_model(tmp_path / "other", dtype="bfloat16", seed=5), threads=1)
    inside = engine_on(other, other_card=other_card)
    here = SimpleNamespace(logit_blocks=inside.logit_blocks, vocab_size=512, tokenizer=other.tokenizer)
    rows, again = columns(inside, where), columns(here, where)
    assert rows == again and min(rows["kld"]) > 0 and len(rows["kld"]) == where.manifest["tokens"]
    ids = list(where.windows[0].token_ids)
    np.testing.assert_allclose(inside.logits(ids), other.logits(ids), atol=0.02)


def calls(*parts: Callable[[Any, Any], Any]) -> Any:
    """compute_logits is called with these instead. parts: hidden states, made of the sampled row's and the others'."""
    return lambda toy, last, rest: [toy.runner.compute_logits(part(last, rest)) for part in parts]


def width(n: int) -> Any:
    """compute_logits gives so many entries a row."""
    return lambda toy, last, rest: [toy.workers[0]._calls.append(torch.zeros(len(h), n)) for h in (last, rest)]


def sampled(last: Any, rest: Any) -> Any:
    return last


FAULTS = {
    "before the last norm": (calls(sampled, lambda _, rest: rest * 1.5), "self-check: .* differ from vLLM's own at"),
    "by another head": (calls(sampled, lambda _, rest: rest.roll(1, -1)), "self-check: "),  # as x W' = x' W
    "the sampled row for the prompt's last": (calls(sampled, lambda last, rest: torch.cat([rest[1:], last])), "self-check: "),
    "not a number": (calls(sampled, lambda _, rest: rest * float("nan")), "self-check: .*nan by the logits"),
    "the sampled row behind": (calls(lambda _, rest: rest, sampled), "of shapes"),
    "in chunks": (calls(sampled, lambda _, rest: rest[:5], sampled, lambda _, rest: rest[5:]), "of shapes"),
    "a card's part of the vocabulary": (width(256), "of shapes .*256.* a vocabulary of 512"),
    "with the vocabulary's padding": (width(576), "of shapes"),
    "nowhere": (calls(), "no logits in the model's"),
}


@pytest.mark.parametrize("fault, words", FAULTS.values(), ids=FAULTS)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_logits_that_are_not_those_vllm_counts_with_give_no_figure(base: Any, fault: Any, words: str) -> None:
    engine = engine_on(base[1], fault)
    with pytest.raises(InvalidVariant, match=words):
        columns(engine, base[0])
    with pytest.raises(InvalidVariant, match=words):
        engine.logits(list(range(5, 40)))


class Steps:
    """vLLM's engine for streams: request k's first token comes in step k, as where prompts wait for one another."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[int]] = {}

    def add_request(self, name: str, prompt: dict[str, Any], how: dict[str, Any]) -> None:
        first = prompt["prompt_token_ids"][0]
        ends, self.params = how["stop_token_ids"], how
        reply = [first + k for k in range(how["max_tokens"])]
        stop = next((k + 1 for k, t in enumerate(reply) if t in ends), len(reply))
        self.waiting[name] = reply[:stop]
        self.step_of = {n: iter(range(-k, 10**6)) for k, n in enumerate(self.waiting)}

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> Iterator[Any]:
        for name in list(self.waiting):
            known = self.waiting[name][: next(self.step_of[name]) + 1]
            yield SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=known)])
            if known == self.waiting[name]:
                del self.waiting[name]


def test_tokens_come_one_of_each_prompt_and_end_where_they_should(base: Any) -> None:
    engine = engine_on(base[1])
    engine.driver.llm = SimpleNamespace(llm_engine=Steps())
    assert [t for t, _ in engine.stream([7, 8], 4, Sampling(stop=False))] == [7, 8, 9, 10]
    assert len(engine.trace.decode or []) == 3 and engine.trace.prefill and engine.trace.bytes_per_token == 8
    batch = list(engine.stream_batch([[7], [50]], 3))
    assert [tokens for tokens, _ in batch] == [[7, 50], [8, 51], [9, 52]]
    end = min(engine.end_ids)
    assert [t for t, _ in engine.stream([end - 1], 9, Sampling())][-1] == end
    out = [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(7, 2))]), SimpleNamespace(outputs=[SimpleNamespace(token_ids=(9,))])]
    engine.driver.llm = SimpleNamespace(llm_engine=None, generate=lambda prompts, how, use_tqdm: out[: len(prompts)])
    assert engine.sample([[1], [3]], 5, Sampling()) == [[7, 2], [9]] and engine.driver.lines == []
    with pytest.raises(Unsupported, match="prefix cache"):
        engine.stream_on([1], 1, Sampling())


def test_a_stream_that_nobody_asks_on_is_ended(base: Any) -> None:
    stopping = itertools.chain([False], itertools.repeat(True))
    steps = Steps()
    ended: list[Any] = []
    steps.abort_request = lambda names: (ended.extend(names), steps.waiting.clear())  # type: ignore[attr-defined]
    asked: Any = {"prompts": [[7]], "most": 50, "temperature": 0, "seed": 1, "ends": [], "number": 3, "whole": False}
    told = list(_vllm_driver.stream(SimpleNamespace(llm_engine=steps), dict, asked, lambda: next(stopping)))
    assert ended == ["3-0"] and [t["tokens"] for t in told] == [[7], [8]]
    engine, told = engine_on(base[1]), []
    stream = engine.stream([7], 50, Sampling(stop=False))
    engine.driver.lines, engine.driver.send = ANSWERS[:], told.append
    next(stream)
    stream.close()
    assert told[1:] == [{}] and engine.driver.lines == [], "what was still to come was taken from the pipe"


ANSWERS = [json.dumps({"tokens": [7], "at": 1.0}), json.dumps({"tokens": [8], "at": 2.0}), json.dumps({"done": True})]


@pytest.mark.parametrize("script, error, words", [
    ("print('{\"unsupported\": \"ValueError: no such format\"}')", Unsupported, "cannot load this model here: ValueError: no such"),
    ("raise SystemExit('no memory left')", Crashed, r"exit\(1\); its last words: no memory left"),
])  # fmt: skip
def test_a_process_that_gives_no_model_says_why(script: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        vllm.Driver([sys.executable, "-c", script], {}, Path("log"), 1)


def test_a_cache_that_was_not_quantized_is_no_result(base: Any) -> None:
    folder, tokenizer = Path(base[1].model.name_or_path), base[1].tokenizer
    vllm.VllmEngine(InProcess(None, FACTS | {"element_bytes": 1}), tokenizer, folder, 512, 128, 1, "fp8")
    with pytest.raises(InvalidVariant, match="fp8 was requested, but vLLM stores keys and values as torch.bfloat16"):
        vllm.VllmEngine(InProcess(None), tokenizer, folder, 512, 128, 1, "fp8")


def test_it_loads_what_transformers_loads_and_check_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    quantizers.check_engine("gptq", "vllm")
    with pytest.raises(ParamsError, match="use engine: llamacpp"):
        quantizers.check_engine("gguf", "vllm")
    monkeypatch.setenv(venvs.VLLM, "/none/python")
    settings = params.load(ROOT / "params.yaml").model_copy(update={"variants": {"int8": Variant(quantizer="cast", engine="vllm")}})
    (line,) = preflight.notes(settings)
    assert line.startswith(
        "variants.int8 will be unsupported: vLLM needs its own environment: build it with `python -m pipeline.core"
    )
    assert line.endswith("('/none/python' is not a program), and it is required: the gate will FAIL")
    monkeypatch.setenv(venvs.VLLM, sys.executable)
    assert preflight.notes(settings) == []


def test_a_model_s_memory_is_counted_in_the_process_that_holds_it() -> None:
    script = "x = b'1' * (100 << 20); print(flush=True); input()"
    before = hardware.peak_memory() or 0
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline()
        assert (hardware.peak_memory() or 0) > before + (100 << 20)
        child.communicate(b"\n")
