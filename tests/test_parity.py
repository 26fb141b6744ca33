"""Answers are lm-eval's own: those of its command line, and its own class on requests of every shape."""

import functools
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, make_model
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from pipeline import engines, evaluate
from pipeline.core import artifacts
from pipeline.core.params import Evaluate
from pipeline.engines._forest import grown
from pipeline.engines._lm_eval import has_stopped, is_plain, lm_for, takes_forests

pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's and datasets' own

SEED, BATCH = 7, 4
SAME = ("doc_id", "doc_hash", "prompt_hash", "target_hash")
# Every kind: one-token and longer choices, no context, contexts past the window (they are cut), replies, rolling; a chat alone
TASKS = {
    False: {"facts": 9, "commonsense": 6, "grammar": 6, "retrieval": 6, "arithmetic_copy": 9, "prose_ppl": 2},
    True: {"instruct": 9},
}


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Any:
    return engines.load("hf", tiny, threads=1)


@pytest.fixture(scope="module")
def theirs(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """{(task, hash of the document): sample} that `lm_eval run --log_samples` writes, plain and chat.

    Without its index of its own tasks and its look at the machine, which take it 20 s.
    """
    import datasets
    import lm_eval.evaluator
    import lm_eval.tasks
    from lm_eval._cli import HarnessCLI

    out = tmp_path_factory.mktemp("theirs")
    for chat, tasks in TASKS.items():
        chosen = {task: evaluate.subset(len(evaluate.load_task(task)[1]), n, SEED) for task, n in tasks.items()}
        words = ["lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={tiny},dtype=float32", "--device", "cpu"]
        words += ["--tasks", ",".join(tasks), "--samples", json.dumps(chosen), "--include_path", "evalsets/tasks"]
        words += ["--batch_size", str(BATCH), "--log_samples", "--output_path", str(out / str(chat)), "--seed", str(SEED)]
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch.chdir(ROOT)
            patch.setenv("TOKENIZERS_PARALLELISM", "false")
            patch.setattr(datasets.config, "HF_DATASETS_CACHE", out / "cache")
            patch.setattr(lm_eval.tasks, "TaskManager", functools.partial(lm_eval.tasks.TaskManager, include_defaults=False))
            patch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
            patch.setattr(sys, "argv", words + ["--apply_chat_template"] * chat)
            command = HarnessCLI()
            command.execute(command.parse_args())
    names = [t for tasks in TASKS.values() for t in tasks]
    files = {file: next(t for t in names if file.name.startswith(f"samples_{t}_")) for file in out.rglob("samples_*.jsonl")}
    return {(task, sample["doc_hash"]): sample for file, task in files.items() for sample in artifacts.read_jsonl(file)}


@pytest.mark.parametrize("chat", TASKS, ids={False: "plain", True: "chat"}.get)
def test_rows_say_what_lm_eval_s_command_line_says(
    engine: Any,
    theirs: dict[tuple[str, str], dict[str, Any]],
    tmp_path: Path,
    chat: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    ours = evaluate.evaluate(engine, Evaluate(batch_size=BATCH), dict(TASKS[chat]), SEED, tmp_path)
    assert len(ours) == sum(task in TASKS[chat] for task, _ in theirs) == sum(TASKS[chat].values())
    assert chat or any(row["truncated"] for row in ours)
    for row in ours:
        sample = theirs[row["task"], row["doc_hash"]]
        assert {k: row[k] for k in SAME} == {k: sample[k] for k in SAME}
        assert row["target"] is None or str(row["target"]) == sample["target"]
        assert row["acc"] == next((float(sample[k]) for k in evaluate.SCORES if k in sample), None)
        if row["kind"] == "generate_until":
            assert row["prediction"] == sample["filtered_resps"][0]
        else:
            replies = sample["resps"][0] if row["kind"] == "loglikelihood_rolling" else [r[0] for r in sample["resps"]]
            values = [float(r[0] if isinstance(r, list) else r) for r in replies]
            assert row["loglikelihoods"] == pytest.approx(values, abs=1e-3, rel=0)
            assert row["prediction"] in (None, int(np.argmax(values)))


def mixed(tokenizer: Any) -> list[tuple[str, str]]:
    """(context, choice): short and long, shared and alone, empty, cut, one token and many, the same twice."""
    passage = " ".join(f"The code of room {k} is {7 * k % 10}{k}." for k in range(30))
    pairs = [
        (f"{passage} Question: room {room}? Answer: {'the code is ' * (room % 3)}", choice)
        for room in (3, 4, 5)
        for choice in (" 1", " 21 and more", " 28", " thirty-five")
    ]
    pairs += [(f"The {k}th word is", choice) for k in range(40) for choice in (" one", " two three", " ", " four")]
    pairs += [("short", " one"), ("short", " one"), ("", "alone"), ("", "alone again"), ("trailing space ", "moves")]
    pairs += [("", tokenizer.bos_token + "begins with what stands for no context")]
    return pairs + [(f"{passage} " * 6, choice) for choice in (" is cut", " is cut too", " 28")]


def requests_of(kind: str, arguments: list[Any]) -> list[Instance]:
    return [Instance(kind, {}, pair, k) for k, pair in enumerate(arguments)]


def plain_lm(engine: Any, batch_size: int) -> HFLM:
    """lm-eval's own class."""
    return HFLM(
        pretrained=engine.model, tokenizer=engine.tokenizer, batch_size=batch_size, max_length=1024, softmax_dtype="float32"
    )


def test_requests_of_every_shape_are_answered_as_by_lm_eval_s_own_class(engine: Any) -> None:
    requests, plain = requests_of("loglikelihood", mixed(engine.tokenizer)), plain_lm(engine, 3)
    expected = plain.loglikelihood(requests, disable_tqdm=True)
    seen: list[int] = []
    hook = engine.model.get_input_embeddings().register_forward_hook(lambda module, args, out: seen.append(args[0].numel()))
    try:
        answers = lm_for(engine, 3).loglikelihood(requests, disable_tqdm=True)
    finally:
        hook.remove()
    assert [v for v, _ in answers] == pytest.approx([v for v, _ in expected], abs=1e-3, rel=0)
    assert [greedy for _, greedy in answers] == [greedy for _, greedy in expected]
    assert sum(seen) < 0.45 * sum(min(1024, len(plain.tok_encode(c + a))) for c, a in (r.args for r in requests))


def test_the_tokens_that_rows_report_are_those_that_were_scored(engine: Any) -> None:
    lm, pairs = lm_for(engine, 3), mixed(engine.tokenizer)
    scored: list[tuple[list[int], list[int]]] = []
    lm._loglikelihood_tokens = lambda requests, **_: scored.extend((c, a) for _, c, a in requests)
    lm.loglikelihood(requests_of("loglikelihood", pairs), disable_tqdm=True)
    assert [lm.encoded(*pair) for pair in pairs] == scored


@pytest.mark.parametrize("kind", ["a sliding window", "positions of its own"])
def test_a_model_that_cannot_read_forests_is_left_to_lm_eval(tmp_path: Path, kind: str) -> None:
    """Its answers must be lm-eval's all the same."""
    from transformers import MistralConfig, MistralForCausalLM

    folder = make_model(tmp_path / "model")
    if kind == "a sliding window":
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = MistralConfig(vocab_size=512, sliding_window=32, num_key_value_heads=2, **shape)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            MistralForCausalLM(config).save_pretrained(folder)
    other: Any = engines.load("hf", folder, threads=1)
    if kind == "positions of its own":  # as a model does that numbers tokens by where they stand
        inner, forward = other.model.model.rotary_emb, other.model.model.rotary_emb.forward
        inner.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None])
    context = "The code of the door is written here. " * 12
    requests = requests_of("loglikelihood", [(context, choice) for choice in (" one", " two three", " four")])
    expected = [value for value, _ in plain_lm(other, 3).loglikelihood(requests, disable_tqdm=True)]
    lm = lm_for(other, 3)
    assert not takes_forests(other)
    assert [v for v, _ in lm.loglikelihood(requests, disable_tqdm=True)] == pytest.approx(expected, abs=1e-4)


def test_replies_that_leave_the_batch_are_those_of_generate(engine: Any) -> None:
    """Replies of different lengths: by stop sequences, by the model's end token, by the limit."""
    plain = plain_lm(engine, 5)

    def requests(until: list[str]) -> list[Instance]:
        how = {"until": until, "max_gen_toks": 20, "do_sample": False}
        return requests_of("generate_until", [("one two three " * k + "four", dict(how)) for k in range(1, 12)])

    free = plain.generate_until(requests([]), disable_tqdm=True)
    asked, rows = requests([free[0][9:12], free[4][4:6], "never said"]), list[int]()
    hook = engine.model.register_forward_hook(lambda module, args, kwargs, out: rows.append(len(out.logits)), with_kwargs=True)
    try:
        replies = lm_for(engine, 5).generate_until(asked, disable_tqdm=True)
    finally:
        hook.remove()
    assert replies == plain.generate_until(asked, disable_tqdm=True)
    assert len({len(reply) for reply in replies}) > 2 and len(set(rows)) > 2, "some left before others"


def test_only_plain_greedy_settings_are_taken_over() -> None:
    from transformers import GenerationConfig

    greedy = {"do_sample": False, "attention_mask": None}
    assert is_plain(GenerationConfig(eos_token_id=2, temperature=0.6, top_p=0.9, do_sample=True), greedy)
    for setting in ({"repetition_penalty": 1.1}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": [5]}, {"num_beams": 2}):
        assert not is_plain(GenerationConfig(**setting), greedy), setting
    assert not is_plain(GenerationConfig(), {"do_sample": True}) and not is_plain(GenerationConfig(), greedy | {"num_beams": 3})


@pytest.mark.parametrize("text, stop, ended", [
    ("answer", ["\n"], False), ("answer\n", ["\n"], True), ("a bx", [" b", "a bc"], True), ("a bc", [" b", "a bc"], True),
    ("a b", [" b", "a bc"], False),  # the other stop began earlier, and may still come
    ("a", ["", "b"], False),
])  # fmt: skip
def test_a_reply_ends_where_no_later_token_could_change_its_cut(text: str, stop: list[str], ended: bool) -> None:
    assert has_stopped(text, stop) == ended


def test_a_full_forest_stays_open_only_where_that_is_cheaper() -> None:
    context = list(range(400))
    choices = [[*context, 1000 + k] for k in range(4)]
    strangers = [[2000 + k, *range(100)] for k in range(4)]
    sizes = [len(forest.tokens) for forest, _ in grown(choices + strangers, 256)]
    assert sizes == [404, 202, 202]
