"""What is asked: prompts that no cache knows, contexts that fit, and what cannot be asked is missing with its reason."""

import itertools
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import ArtifactError, DataError, Unsupported
from pipeline.core.params import Requests
from pipeline.speed import schedule
from pipeline.speed.schedule import HEAD, OUTPUT, REPEATS, Prompts

IDS = np.random.default_rng(0).integers(0, 500, 9000).tolist()
SETUP = Requests(prompt_tokens=64, contexts=[256, 1024], batches=[1, 4])


class Fake:
    """Answers everything, or raises what it is told to."""

    def __init__(self, fault: dict[str, Exception] | None = None) -> None:
        self.fault, self.asked = fault or {}, list[tuple[str, Any, int]]()

    def ask(self, prompt: list[int], n: int, *, how: str, fresh: bool) -> dict[str, Any]:
        return self.ask_batch([prompt], n, how)

    def ask_batch(self, prompts: list[list[int]], n: int, how: str = "stream_batch") -> dict[str, Any]:
        if how in self.fault:
            raise self.fault[how]
        self.asked.append((how, prompts, n))
        return {"ok": True, "t_tokens": [0.0] * n, "batch": len(prompts)}


def planned(setup: Requests = SETUP, longest: int = 4096, ids: list[int] = IDS) -> schedule.Plan:
    plan = schedule.plan(setup, longest)
    schedule.fill(plan, Prompts(ids, seed=1))
    return plan


def test_no_prompt_begins_as_another_does() -> None:
    prompts = Prompts(IDS + IDS, seed=1)  # the text says everything twice
    cut = [prompts.cut(n) for n in [64] * 80 + [512, 1016, 32, 8]]
    assert [len(p) for p in cut] == [64] * 80 + [512, 1016, 32, 8]
    assert not any(a[:HEAD][: len(b)] == b[:HEAD][: len(a)] for a, b in itertools.combinations(cut, 2))


def test_a_text_that_is_too_short_is_an_error_with_its_size() -> None:
    with pytest.raises(DataError, match="9000 tokens of text make no more than 0 different prompts, and none of 9001"):
        Prompts(IDS, 1).cut(9001)
    prompts = Prompts([7] * 1000, 1)
    prompts.cut(64)
    with pytest.raises(DataError, match="no more than 1 different"):
        prompts.cut(64)


def test_every_step_has_prompts_of_its_lengths_and_contexts_hold_the_reply() -> None:
    plan, worker = planned(), Fake()
    rows = list(schedule.run(worker, plan))
    names = [r["scenario"] for r in rows]
    assert names == ["context-256", "context-1024"] * 2 + ["batch-1", "batch-4"] * 2 + ["prefix-cold", "prefix-warm"] * 2
    assert REPEATS == 2 and all(n == OUTPUT for _, _, n in worker.asked)
    lengths = {r["scenario"]: {len(p) for p in prompts} for r, (_, prompts, _) in zip(rows, worker.asked)}
    assert lengths["context-1024"] == {1024 - OUTPUT} and lengths["batch-4"] == {schedule.BATCH_PROMPT}
    assert plan.notes == plan.absent() == {}


def test_only_the_warm_prompt_shares_a_beginning() -> None:
    plan = planned()
    heads = [tuple(p[:HEAD]) for s in plan.steps if s.scenario != "prefix-warm" for p in s.prompts]
    assert len(set(heads)) == len(heads)
    cold, warm = (s.prompts[0] for s in plan.steps[-2:])
    assert cold[:48] == warm[:48] and cold[48:] != warm[48:] and len(warm) == 64


def test_a_context_beyond_the_window_is_capped_once_and_says_so() -> None:
    plan = planned(Requests(contexts=[256, 1024, 4096]), longest=700)
    assert {s.scenario for s in plan.steps if s.kind == "context"} == {"context-256", "context-700"}
    assert "4096 tokens were asked for; 700" in plan.notes["context-700"]


def test_a_text_without_enough_prompts_leaves_those_scenarios_out_with_the_reason() -> None:
    plan = planned(Requests(prompt_tokens=64, contexts=[256], batches=[8]), ids=IDS[:300])
    assert [r["scenario"] for r in schedule.run(Fake(), plan)].count("context-256") == 2
    assert "300 tokens of text" in plan.absent()["batch-8"]


def test_what_an_engine_cannot_do_is_missing_with_its_reason_and_the_rest_goes_on() -> None:
    plan = planned()
    rows = list(schedule.run(Fake({"stream_on": Unsupported("keeps no prefix")}), plan))
    assert {r["scenario"] for r in rows} == {"context-256", "context-1024", "batch-1", "batch-4"}
    assert plan.absent() == {"prefix-cold": "keeps no prefix", "prefix-warm": "keeps no prefix"}


def test_a_process_that_dies_ends_the_sweep_with_a_failed_row() -> None:
    rows = list(schedule.run(Fake({"stream_batch": ArtifactError("died (exit code -9); out of memory?")}), planned()))
    assert [r["ok"] for r in rows] == [True] * 4 + [False] and "out of memory" in rows[-1]["error"]
    assert rows[-1]["scenario"] == "batch-1" and rows[-1]["t_tokens"] == []
