"""Two live processes in turns; every request is a row, failures too; nothing is left behind."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from conftest import ROOT

from pipeline import benchmark
from pipeline.core.errors import ArtifactError, Crashed, Unsupported
from pipeline.core.params import Requests, Variant
from pipeline.engines import Trace, _worker
from pipeline.engines._worker import Request, Worker
from pipeline.speed import hardware, schedule
from pipeline.speed.roofline import shape_of
from pipeline.speed.rounds import Looks

HF = Variant(quantizer="cast", engine="hf", options={"dtype": "float32"})
SETUP = Requests(prompt_tokens=8, output_tokens=6, warmups=1, rounds=5)
ASKED = [[k + 5 + i for i in range(8)] for k in range(6)]
Two = tuple[Worker, Worker]


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(scope="module")
def two(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("home"))
        patch.setenv("PYTHONPATH", str(ROOT))
        with closing(Worker(HF, tiny, 1)) as a, closing(Worker(HF, tiny, 1)) as b:
            yield a, b
    assert not any(psutil.pid_exists(w.process.pid or 0) for w in (a, b)), "nothing is left behind"


def test_rounds_interleave_and_output_length_is_forced(two: Two) -> None:
    """The first test that asks the two, so that a first request of each is there."""
    rows = list(benchmark.measure(*two, SETUP, ASKED))
    assert len(rows) == 12 and all(r["ok"] and r["output_tokens"] == 6 for r in rows)
    assert [r["round"] for r in rows] == [None, None] + [k for k in range(5) for _ in "ab"]
    assert [r["who"] for r in rows[:4]] == ["reference", "variant", "variant", "reference"]
    assert [r["cold"] for r in rows] == [True, True] + [False] * 10, "the first request of each process stands apart"
    times = [t for r in rows for t in (r["t_submit"] or 0, *r["t_tokens"])]
    assert times == sorted(times), "requests overlapped"
    assert all((r["peak_memory_bytes"] or 0) > 0 and (r["kv_bytes_per_token"] or 0) > 0 for r in rows)
    assert two[0].facts["load_s"] > 0


def test_phases_of_a_request_lie_within_it(two: Two) -> None:
    row: Any = two[0].ask(ASKED[0], 6)
    phases = row["phases"]
    assert len(phases["decode"]) == 5 and len(phases["sampling"]) == 6 and row["phases_unknown"] == {}
    inside = phases["prefill"] + sum(phases["decode"]) + sum(phases["sampling"])
    assert 0 < inside <= row["t_tokens"][-1] - row["t_submit"] and phases["prefill"] < row["t_first"] - row["t_submit"]
    assert phases["tokenize"] > 0 and phases["detokenize"] > 0
    assert row["cache_tokens"] == 8 + 6 - 1 and row["cache_bytes"] == row["cache_tokens"] * row["kv_bytes_per_token"]


@pytest.mark.parametrize("planned, is_open, last", [(2, True, 4), (2, False, 2), (1, True, 2)])
def test_rounds_are_added_once_where_a_second_look_is_planned_and_the_first_leaves_the_bound_open(
    two: Two, planned: int, is_open: bool, last: int
) -> None:
    class Told(Looks):
        def unsettled(self, rows: Sequence[Any], confidence: float) -> bool:
            assert [r["round"] for r in rows if not r["warmup"]] == [0, 0, 1, 1, 2, 2]
            return is_open

    setup = SETUP.model_copy(update={"rounds": 3, "max_rounds": 5})
    rows, looked = benchmark.in_rounds(*two, setup, ASKED, Told(planned, (1.0,)), 0.95)
    assert looked["taken"] == 1 + (last == 4) and [r["round"] for r in rows[2:]] == [k for k in range(last + 1) for _ in "ab"]
    assert sum(r["warmup"] for r in rows) == 2, "there are no second warm-ups"


def test_a_sweep_runs_on_a_real_engine(two: Two) -> None:
    setup = Requests(prompt_tokens=16, contexts=[64, 4096], batches=[1, 3])
    plan = schedule.plan(setup, min(two[0].facts["max_length"], 4000))
    schedule.fill(plan, schedule.Prompts([k * 7919 % 500 for k in range(4000)], 1))
    rows: Any = {(r["scenario"], r["round"]): r for r in schedule.run(two[0], plan)}
    assert {s for s, _ in rows} == {"context-64", "context-1024", "batch-1", "batch-3"} and all(r["ok"] for r in rows.values())
    assert rows["batch-3", 0]["output_tokens"] == 3 * schedule.OUTPUT
    assert rows["context-1024", 0]["prompt_tokens"] == 1024 - schedule.OUTPUT
    assert len({r["cache_bytes"] / r["cache_tokens"] for (s, _), r in rows.items() if s.startswith("context")}) == 1
    assert "keeps no prefix" in plan.absent()["prefix-warm"]


def test_a_process_that_dies_is_a_crash_and_one_that_is_killed_is_none(two: Two) -> None:
    """The last test that asks the two."""
    crash = (signal.SIGILL, Crashed, "benchmark model: the process died of SIGILL")
    for one, (number, error, words) in zip(two, (crash, (signal.SIGKILL, ArtifactError, "stopped by SIGKILL"))):
        os.kill(one.process.pid or 0, number)
        with pytest.raises(error, match=words):
            one.ask([1, 2], 2)


def test_a_failed_or_short_request_is_a_row_and_not_the_end() -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("reset")

    now = time.monotonic()
    engine = SimpleNamespace(
        tokenizer=type("Tokenizer", (), {"decode": str, "__call__": lambda *_, **__: ""})(), trace=Trace(None, None, None),
        stream=broken, stream_on=lambda *_: [(1, now)], stream_batch=lambda *_: [([1], now)] * 4,
    )  # fmt: skip
    row: Any = _worker.answer(engine, Request([[1]], 4), False)
    assert not row["ok"] and row["error"] == "RuntimeError: reset" and row["t_tokens"] == []
    row = _worker.answer(engine, Request([[1]], 4, "stream_on"), False)
    assert not row["ok"] and row["error"] == "asked for 4 tokens, got 1"
    assert row["phases_unknown"] == dict.fromkeys(("prefill", "decode", "sampling"), "the engine does not say")
    assert "other than 2 tokens" in _worker.answer(engine, Request([[1], [2]], 4, "stream_batch"), False)["error"]


def test_a_model_that_cannot_run_here_is_unsupported_and_not_a_crash(tmp_path: Path) -> None:
    variant = HF.model_copy(update={"engine_options": {"device": "cuda"}})
    if __import__("torch").cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(Unsupported, match="no CUDA device"), closing(Worker(variant, tmp_path, 1)):
        pass


def test_the_machine_is_described_and_its_rates_measured() -> None:
    facts = hardware.describe(2)
    assert facts["cores"] >= 1 and facts["memory_bytes"] > 1 << 28 and facts["cpu"]
    assert hardware.memory_bandwidth(1, size=1 << 24, repeats=2) > 1e8 < hardware.copy_bandwidth(1, size=1 << 24)
    rate = hardware.matrix_rate(1, "float32", size=256, seconds=0.01)
    assert rate is not None and 1e8 < rate < 1e15
    assert hardware.matrix_rate(1, "int5", size=256) is None, "no such type"


@pytest.mark.parametrize("config, tied", [
    ({"model_type": "gemma"}, True), ({"model_type": "llama"}, False), ({"model_type": "of our own"}, None), ({}, None),
    ({"model_type": "llama", "tie_word_embeddings": True}, True), ({"model_type": "gemma", "tie_word_embeddings": False}, False),
    ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, True),
    ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "tie_word_embeddings": False}}, False),
])  # fmt: skip
def test_what_a_config_leaves_out_of_its_head_is_what_transformers_takes(config: dict[str, Any], tied: bool | None) -> None:
    assert shape_of(benchmark.with_tying(config))["tied"] is tied


class FakeCuda:
    """torch.cuda's counters, as its documentation has them: reserved is allocated, and what is kept for later."""

    def __init__(self) -> None:
        self.allocated, self.kept, self.peaks = 0, 0, (0, 0)
        self.is_available = self.is_initialized = lambda: True
        self.max_memory_allocated, self.max_memory_reserved = lambda: self.peaks[0], lambda: self.peaks[1]
        self.device_memory_used = lambda: self.allocated + self.kept

    def take(self, size: int) -> None:
        new = max(0, size - self.kept) if size > 0 else 0
        self.kept += new - size
        self.allocated += size
        self.peaks = max(self.peaks[0], self.allocated), max(self.peaks[1], self.allocated + self.kept)

    def empty_cache(self) -> None:
        self.kept = 0

    def reset_peak_memory_stats(self) -> None:
        self.peaks = self.allocated, self.allocated + self.kept


def test_what_loading_left_on_a_gpu_is_not_in_a_request_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    for size in (100, 30, -100):  # weights as they are stored, packed, and gone
        cuda.take(size)
    facts = _worker.load_facts(SimpleNamespace(max_length=8, device="cuda"), 1.0)
    assert facts["load_cuda_memory"] == {"allocated": 130, "reserved": 130, "nvml": 130}
    cuda.take(5)
    assert hardware.cuda_memory() == {"allocated": 35, "reserved": 35, "nvml": 35}


def test_a_device_of_two_kinds_has_no_rates() -> None:
    found: dict[str, Any] = hardware.rates(1, "mixed", ["float32"])
    assert found["read"] is None and found["matrix"] == {"float32": None}
