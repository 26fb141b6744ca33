"""lm-eval does the scoring; the rows keep what pairing needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline import engines, evaluate
from pipeline.params import Evaluate

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Any:
    return engines.load("hf", tiny, threads=2)


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))


@pytest.mark.filterwarnings("ignore")  # lm-eval's and datasets' own
def test_rows_say_what_was_asked_and_what_was_answered(engine: Any) -> None:
    setup = Evaluate(tasks=["facts", "arithmetic_copy", "prose_ppl"], batch_size=4, limit=3)
    rows = evaluate.evaluate(engine, setup, seed=1)
    assert [r["task"] for r in rows] == ["facts"] * 3 + ["arithmetic_copy"] * 3 + ["prose_ppl"] * 3
    for row in rows:
        assert row["item"] and row["doc_hash"] and row["prompt_hash"] and row["first_token_ids"] and row["n_tokens"] > 0
        assert not row["truncated"] and row["non_finite"] == 0
    choice, text, rolling = rows[0], rows[3], rows[6]
    assert len(choice["loglikelihoods"]) == 4 and choice["acc"] == float(choice["prediction"] == choice["target"])
    assert isinstance(text["prediction"], str) and text["acc"] in (0.0, 1.0)
    assert rolling["acc"] is None and rolling["bytes"] > 100 and rolling["loglikelihoods"][0] < 0
    assert evaluate.evaluate(engine, setup, seed=1) == rows


@pytest.mark.filterwarnings("ignore")
def test_log_likelihoods_are_the_models_in_float32(engine: Any) -> None:
    import numpy as np
    from scipy.special import log_softmax

    row = evaluate.evaluate(engine, Evaluate(tasks=["facts"], batch_size=4, limit=1), seed=1)[0]
    import json

    items = [json.loads(line) for line in (ROOT / "evalsets/tasks/facts.jsonl").read_text("utf-8").split("\n") if line]
    item = items[row["doc_id"]]
    assert item["id"] == row["item"]
    for choice, value in zip(item["choices"], row["loglikelihoods"]):
        ids = engine.tokenizer(item["context"] + choice).input_ids
        start = len(engine.tokenizer(item["context"]).input_ids)
        logp = log_softmax(engine.logits(ids).astype(float), -1)
        assert value == pytest.approx(sum(logp[p - 1, ids[p]] for p in range(start, len(ids))), abs=1e-3)
    assert row["prediction"] == int(np.argmax(row["loglikelihoods"]))


def test_subsets_nest() -> None:
    from pipeline.evalset import load_task, local_tasks

    chosen = [set(evaluate._subset(local_tasks()["facts"], load_task("facts"), n, 3) or []) for n in (5, 50, 500)]
    assert chosen[0] < chosen[1] < chosen[2]


def test_hashes_cover_yaml_and_rows() -> None:
    found = dict(evaluate.task_hashes(Evaluate(tasks=["facts", "prose_ppl"])))
    assert {"evalsets/tasks/facts.yaml", "evalsets/tasks/facts.jsonl", "evalsets/corpus/technical.jsonl"} <= found.keys()
