"""lm-eval does the scoring; the rows keep what pairing needs."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from pipeline import engines, evaluate
from pipeline.core import params
from pipeline.core.artifacts import read_jsonl, write_jsonl
from pipeline.core.errors import DataError
from pipeline.core.params import Evaluate

pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's and datasets' own


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Any:
    return engines.load("hf", tiny, threads=1)


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def answered(engine: Any, tasks: Any = None, batch_size: int = 8) -> Any:
    """Answers to these tasks, or to all items of `mine`."""
    with tempfile.TemporaryDirectory() as scratch:
        return evaluate.evaluate(engine, Evaluate(batch_size=batch_size), tasks or {"mine": "all"}, 1, Path(scratch))


def test_rows_say_what_was_asked_and_what_was_answered(engine: Any) -> None:
    tasks = {"facts": 3, "arithmetic_copy": 3, "prose_ppl": 3}
    rows = answered(engine, tasks)
    assert [r["task"] for r in rows] == ["facts"] * 3 + ["arithmetic_copy"] * 3 + ["prose_ppl"] * 3
    for row in rows:
        assert row["item"] and row["doc_hash"] and row["prompt_hash"] and row["first_token_ids"] and row["n_tokens"] > 0
        assert not row["truncated"] and row["non_finite"] == 0
    choice, text, rolling = rows[0], rows[3], rows[6]
    assert len(choice["loglikelihoods"]) == 4 and choice["acc"] == float(choice["prediction"] == choice["target"])
    assert isinstance(text["prediction"], str) and text["acc"] in (0.0, 1.0)
    assert rolling["acc"] is None and rolling["bytes"] > 100 and rolling["loglikelihoods"][0] < 0
    assert answered(engine, tasks) == rows


def test_log_likelihoods_are_the_models_in_float32(engine: Any) -> None:
    import numpy as np
    from scipy.special import log_softmax

    row = answered(engine, {"facts": 1})[0]
    item = read_jsonl(Path("evalsets/tasks/facts.jsonl"))[row["doc_id"]]
    assert item["id"] == row["item"]
    for choice, value in zip(item["choices"], row["loglikelihoods"]):
        ids = engine.tokenizer(item["context"] + choice).input_ids
        start = len(engine.tokenizer(item["context"]).input_ids)
        logp = log_softmax(engine.logits(ids).astype(float), -1)
        assert value == pytest.approx(sum(logp[p - 1, ids[p]] for p in range(start, len(ids))), abs=1e-3)
    assert row["prediction"] == int(np.argmax(row["loglikelihoods"]))


def test_a_16_bit_model_answers_again_in_float32_and_a_float32_one_says_why_not(engine: Any, tiny_bf16: Path) -> None:
    settings = params.load()
    tier = settings.amount.model_copy(update={"tasks": {"facts": 3, "instruct": 2, "prose_ppl": 1}})
    settings = settings.model_copy(update={"tiers": {settings.tier: tier}, "seed": 1})
    loaded = engines.load("hf", tiny_bf16, threads=1)
    rows = answered(loaded, tier.tasks, settings.evaluate.batch_size)
    with tempfile.TemporaryDirectory() as scratch:
        assert evaluate.answer_again(rows, loaded, settings, Path(scratch)) is None
        assert "float32 already" in str(evaluate.answer_again([], engine, settings, Path(scratch)))
    again = answered(loaded, tier.tasks, settings.evaluate.batch_size)  # it computes in float32 from now on
    assert ["again" in row for row in rows] == [True] * 5 + [False]
    for row, alone in zip(rows[:5], again):
        assert row["again"] == {k: alone[k] for k in ("loglikelihoods", "prediction", "acc")}
    first, second = rows[0]["loglikelihoods"], rows[0]["again"]["loglikelihoods"]
    assert first != second and second == pytest.approx(first, abs=0.3)


def test_hashes_cover_yaml_and_rows() -> None:
    found = dict(evaluate.task_hashes(["facts", "prose_ppl"]))
    assert {"evalsets/tasks/facts.yaml", "evalsets/tasks/facts.jsonl", "evalsets/corpus/technical.jsonl"} <= found.keys()


OWN: Any = [
    {"id": "a", "context": "The sky is", "choices": [" blue", " made of stone"], "answer": 0},
    {"id": "b", "context": "Water is", "choices": [" dry", " wet"], "answer": 1},
]


@pytest.fixture
def own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An evalsets/tasks of one task, `mine`, whose rows a test writes."""
    home = tmp_path / "house/evalsets/tasks"
    home.mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "house")
    file = home / "mine.jsonl"
    write_jsonl(file, OWN)
    return file


def test_an_edited_set_is_scored_anew(engine: Any, own_task: Path) -> None:
    """Even if its time says nothing: `datasets` goes by name and time."""
    when = own_task.stat().st_mtime_ns
    before = answered(engine)
    hashes = dict(evaluate.task_hashes(["mine"]))
    write_jsonl(own_task, [OWN[0] | {"context": "The sea is"}, OWN[1]])
    os.utime(own_task, ns=(when, when))
    after = answered(engine)
    assert before[0]["loglikelihoods"] != after[0]["loglikelihoods"] and before[1] == after[1]
    assert dict(evaluate.task_hashes(["mine"])) != hashes


def test_no_variant_is_answered_from_another_s_cache(engine: Any, own_task: Path) -> None:
    """Every run sends every request through the model: the second time as the first."""
    write_jsonl(own_task, [*OWN, {"id": "c", "context": "word " * 400, "choices": [" one", " two three"], "answer": 0}])
    wanted = {t for row in OWN for choice in row["choices"] for t in engine.tokenizer(row["context"] + choice).input_ids[:-1]}
    runs: list[list[int]] = [[], []]
    for seen in runs:
        with hooked(engine.model.get_input_embeddings(), lambda args, out, seen=seen: seen.extend(args[0].flatten().tolist())):
            answered(engine)
    assert runs[0][-len(runs[1]) :] == runs[1], "the first may have begun with a look at the model"
    assert wanted <= set(runs[1])


@contextlib.contextmanager
def hooked(module: Any, hook: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Let `hook` see a module's arguments and output, and change the output."""
    handle = module.register_forward_hook(lambda module, args, out: hook(args, out))
    try:
        yield
    finally:
        handle.remove()


def test_one_row_of_nan_makes_the_variant_invalid_though_the_right_answer_comes_first(engine: Any, own_task: Path) -> None:
    rows = [row | {"choices": row["choices"][:: 1 if row["answer"] == 0 else -1], "answer": 0} for row in OWN]
    write_jsonl(own_task, rows)
    tokens = [{*engine.tokenizer(row["context"]).input_ids} for row in OWN]
    marked = min(tokens[0] - tokens[1])  # a token of the first item's context only
    poison = lambda args, out: out.masked_fill((args[0] == marked)[..., None], float("nan"))  # noqa: E731
    with hooked(engine.model.get_input_embeddings(), poison):
        answers = answered(engine)
    assert [row["non_finite"] for row in answers] == [2, 0], "the other item was read in the same pass"
    why = evaluate.check(answers, engine.tokenizer)
    assert why and "1 of 2 items have a log-likelihood that is not finite" in why


@pytest.mark.parametrize("kind", ["no pad token", "padded on the right"])
def test_generation_does_not_depend_on_batch_or_padding(tiny: Path, own_task: Path, kind: str) -> None:
    own = engines.load("hf", tiny, threads=1)
    tokenizer = own.tokenizer  # type: ignore[attr-defined]
    if kind == "no pad token":
        tokenizer.pad_token = None
    else:
        tokenizer.padding_side = "right"
    write_jsonl(own_task, [{"id": str(k), "context": "one two three " * k + "four", "target": "five"} for k in range(1, 6)])
    replies = [[r["prediction"] for r in answered(own, batch_size=b)] for b in (1, 4)]
    assert replies[0] == replies[1] and len(set(replies[0])) > 1


def test_empty_replies_and_cut_items_are_marked(engine: Any, own_task: Path) -> None:
    write_jsonl(
        own_task, [{"id": "long", "context": "word " * 1100, "target": "x"}, {"id": "short", "context": "word", "target": "x"}]
    )
    ends = engine.model.generation_config.eos_token_id

    def only_the_end(args: Any, out: Any) -> Any:
        out.logits[...] = 0.0
        out.logits[..., ends] = 9.0
        return out

    with hooked(engine.model, only_the_end):
        rows = answered(engine, batch_size=1)
    assert [r["truncated"] for r in rows] == [True, False] and all(r["empty"] for r in rows)


@pytest.mark.parametrize("front, first, refused", [
    ("", [], False), ("<|im_start|>", [1], False), ("<|im_start|><|im_start|>", [1, 1], True),
])  # fmt: skip
def test_what_stands_first_is_recorded_and_two_bos_are_refused(
    engine: Any, own_task: Path, front: str, first: list[int], refused: bool
) -> None:
    write_jsonl(own_task, [row | {"context": front + row["context"]} for row in OWN])
    rows = answered(engine)
    for row, own in zip(rows, OWN):
        assert row["first_token_ids"][: len(first) + 1] == [*first, engine.tokenizer(own["context"]).input_ids[0]]
    assert bool(evaluate.check(rows, engine.tokenizer)) == refused


def test_a_choice_that_brings_what_stands_for_no_context_is_not_taken_for_doubled(engine: Any, own_task: Path) -> None:
    choices = ["<|im_start|>one", "<|im_start|>two three"]
    write_jsonl(own_task, [{"id": "a", "context": "", "choices": choices, "answer": 0}])
    rows = answered(engine)
    assert rows[0]["first_token_ids"][0] == 1 != rows[0]["first_token_ids"][1] and not evaluate.check(rows, engine.tokenizer)


def test_choices_past_the_window_are_marked_as_cut(engine: Any, own_task: Path) -> None:
    write_jsonl(own_task, [OWN[0] | {"context": "word " * 1100 + "is"}, OWN[1]])
    assert [row["truncated"] for row in answered(engine)] == [True, False]


def test_a_choice_without_a_token_of_its_own_is_named(engine: Any, own_task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its likelihood would be that of nothing, 1, and it would always win."""
    from pipeline.engines import _lm_eval

    monkeypatch.setattr(_lm_eval.ForestLM, "_encode_pair", lambda self, context, choice: (self.tok_encode(context + choice), []))
    with pytest.raises((DataError, ValueError), match="one token of its own at least"):
        answered(engine)


def test_a_column_that_datasets_takes_for_dates_is_named(engine: Any, own_task: Path) -> None:
    """It would be compared as `2024-01-01 00:00:00`: no answer would ever be right, for any variant."""
    write_jsonl(own_task, [{"id": str(k), "context": f"The {k}th day is", "target": f"2024-01-0{k}"} for k in range(1, 4)])
    with pytest.raises(DataError, match="task 'mine' item '1': 'target' is '2024-01-01' in the file"):
        answered(engine)
