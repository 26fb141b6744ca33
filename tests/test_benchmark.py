"""Two live processes in turns; every request is a row, failures too; nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pipeline import benchmark
from pipeline.core.errors import ArtifactError, Crashed, Unsupported
from pipeline.core.params import Requests, Variant
from pipeline.engines import _worker
from pipeline.speed import hardware, schedule
from pipeline.speed.roofline import Shape
from pipeline.speed.rounds import Looks

HF = Variant(quantizer="cast", engine="hf", options={"dtype": "float32"})
SETUP = Requests(prompt_tokens=8, output_tokens=6, warmups=1, rounds=5)
ASKED = [[k + 5 + i for i in range(8)] for k in range(6)]


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent))


@pytest.fixture(scope="module")
def two(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[_worker.Worker, _worker.Worker]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("home"))
        patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent))
        with _worker.working(HF, tiny, 1) as a, _worker.working(HF, tiny, 1) as b:
            yield a, b
    assert not any(psutil.pid_exists(w.process.pid or 0) for w in (a, b)), "nothing is left behind"


def test_rounds_interleave_and_output_length_is_forced(two: tuple[_worker.Worker, _worker.Worker]) -> None:
    """The first test that asks the two, so that a first request of each is there."""
    rows = list(benchmark.measure(*two, SETUP, ASKED))
    assert len(rows) == 12 and all(r["ok"] and r["output_tokens"] == 6 for r in rows)
    assert [r["round"] for r in rows] == [None, None] + [k for k in range(5) for _ in "ab"]
    assert [r["who"] for r in rows[:4]] == ["reference", "variant", "variant", "reference"]
    assert [r["cold"] for r in rows] == [True, True] + [False] * 10, "the first request of each process stands apart"
    times = [t for r in rows for t in (r["t_submit"], *r["t_tokens"])]
    assert times == sorted(times), "requests overlapped"
    assert all(r["peak_memory_bytes"] > 0 and r["kv_bytes_per_token"] > 0 for r in rows)
    assert two[0].facts["load_s"] > 0


def test_phases_of_a_request_lie_within_it(two: tuple[_worker.Worker, _worker.Worker]) -> None:
    row = two[0].ask(ASKED[0], 6)
    phases = row["phases"]
    assert len(phases["decode"]) == 5 and len(phases["sampling"]) == 6 and row["phases_unknown"] == {}
    inside = phases["prefill"] + sum(phases["decode"]) + sum(phases["sampling"])
    assert 0 < inside <= row["t_tokens"][-1] - row["t_submit"] and phases["prefill"] < row["t_first"] - row["t_submit"]
    assert phases["tokenize"] > 0 and phases["detokenize"] > 0
    assert row["cache_tokens"] == 8 + 6 - 1 and row["cache_bytes"] == row["cache_tokens"] * row["kv_bytes_per_token"]


@pytest.mark.parametrize("is_open, last", [(True, 4), (False, 2)])
def test_rounds_are_added_once_where_the_first_ones_leave_the_bound_open(
    two: tuple[_worker.Worker, _worker.Worker], is_open: bool, last: int
) -> None:
    class Told(Looks):
        def unsettled(self, rows: Sequence[dict[str, Any]], confidence: float) -> bool:
            assert [r["round"] for r in rows if not r["warmup"]] == [0, 0, 1, 1, 2, 2]
            return is_open

    setup = SETUP.model_copy(update={"rounds": 3, "max_rounds": 5})
    rows, told = benchmark.in_rounds(*two, setup, ASKED, Told(2, (1.0,)), 0.95)
    assert told["taken"] == 1 + is_open and [r["round"] for r in rows[2:]] == [k for k in range(last + 1) for _ in "ab"]
    assert sum(r["warmup"] for r in rows) == 2, "there are no second warm-ups"


def test_one_planned_look_never_adds_rounds(two: tuple[_worker.Worker, _worker.Worker]) -> None:
    setup = SETUP.model_copy(update={"rounds": 3, "max_rounds": 5})
    rows, told = benchmark.in_rounds(*two, setup, ASKED[:4], Looks(1, (1.0,)), 0.95)
    assert told["taken"] == 1 and len(rows) == 8


def test_a_sweep_runs_on_a_real_engine(two: tuple[_worker.Worker, _worker.Worker]) -> None:
    setup = Requests(prompt_tokens=16, contexts=[64, 4096], batches=[1, 3])
    plan = schedule.plan(setup, min(two[0].facts["max_length"], 4000))
    schedule.fill(plan, schedule.Prompts([t for k in range(4000) for t in [k * 7919 % 500]], 1))
    rows = {(r["scenario"], r["round"]): r for r in schedule.run(two[0], plan)}
    assert {s for s, _ in rows} == {"context-64", "context-1024", "batch-1", "batch-3"} and all(r["ok"] for r in rows.values())
    assert (
        rows["batch-3", 0]["output_tokens"] == 3 * schedule.OUTPUT
        and rows["context-1024", 0]["prompt_tokens"] == 1024 - schedule.OUTPUT
    )
    per_token = {r["cache_bytes"] / r["cache_tokens"] for (s, _), r in rows.items() if s.startswith("context")}
    assert len(per_token) == 1
    assert "keeps no prefix" in plan.absent()["prefix-warm"]


def test_a_process_that_dies_is_a_crash_and_one_that_is_killed_is_none(two: tuple[_worker.Worker, _worker.Worker]) -> None:
    """The last test that asks the two."""
    crash = (signal.SIGILL, Crashed, "benchmark model: the process died of SIGILL")
    for one, (number, error, words) in zip(two, (crash, (signal.SIGKILL, ArtifactError, "stopped by SIGKILL"))):
        os.kill(one.process.pid or 0, number)
        with pytest.raises(error, match=words):
            one.ask([1, 2], 2)


def test_a_failed_request_is_a_row_and_not_the_end() -> None:
    class Broken:
        def stream(self, *_: object) -> object:
            raise RuntimeError("reset")

    row = _worker._safely(Broken(), [[1]], 4, "stream", False)
    assert not row["ok"] and row["error"] == "RuntimeError: reset" and row["t_tokens"] == []


def test_a_short_reply_is_not_ok_and_an_engine_that_keeps_no_trace_has_no_phases() -> None:
    class Short:
        def stream(self, *_: object) -> list[tuple[int, float]]:
            return [(1, time.monotonic())]

        def stream_batch(self, *_: object) -> list[tuple[list[int], float]]:
            return [([1], time.monotonic())] * 4

    row = _worker._safely(Short(), [[1]], 4, "stream", False)
    assert not row["ok"] and row["error"] == "asked for 4 tokens, got 1"
    assert set(row["phases"].values()) == {None} and row["phases_unknown"].keys() == row["phases"].keys()
    assert "other than 2 tokens" in _worker._safely(Short(), [[1], [2]], 4, "stream_batch", False)["error"]


def test_a_model_that_cannot_run_here_is_unsupported_and_not_a_crash(tmp_path: Path) -> None:
    variant = HF.model_copy(update={"engine_options": {"device": "cuda"}})
    if __import__("torch").cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(Unsupported, match="no CUDA device"), _worker.working(variant, tmp_path, 1):
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
    assert Shape.of(benchmark.with_tying(config)).tied is tied


def test_a_saved_config_that_leaves_it_out_is_read_as_the_model_was_made() -> None:
    from transformers import CONFIG_MAPPING

    for kind in ("gemma", "llama", "qwen2", "gpt2"):
        made = CONFIG_MAPPING[kind]()
        assert benchmark.with_tying({"model_type": kind})["tie_word_embeddings"] is made.tie_word_embeddings


class FakeCuda:
    """torch.cuda's counters, as its documentation has them: reserved is allocated, and what is kept for later."""

    def __init__(self) -> None:
        self.allocated, self.kept, self.peaks = 0, 0, (0, 0)

    def take(self, size: int) -> None:
        new = max(0, size - self.kept) if size > 0 else 0
        self.kept += new - size
        self.allocated += size
        self.peaks = max(self.peaks[0], self.allocated), max(self.peaks[1], self.allocated + self.kept)

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def max_memory_allocated(self) -> int:
        return self.peaks[0]

    def max_memory_reserved(self) -> int:
        return self.peaks[1]

    def device_memory_used(self) -> int:
        return self.allocated + self.kept

    def empty_cache(self) -> None:
        self.kept = 0

    def reset_peak_memory_stats(self) -> None:
        self.peaks = self.allocated, self.allocated + self.kept


def test_what_loading_left_on_a_gpu_is_not_in_a_request_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    cuda.take(100)  # weights as they are stored
    cuda.take(30)  # packed
    cuda.take(-100)
    facts = _worker._facts(SimpleNamespace(max_length=8, device="cuda"), 1.0)
    assert facts["load_cuda_memory"] == {"allocated": 130, "reserved": 130, "nvml": 130}
    cuda.take(5)
    assert hardware.cuda_memory() == {"allocated": 35, "reserved": 35, "nvml": 35}


FAKE_TORCH = """
import os, pathlib
float32 = "float32"
class cuda:
    synchronize = staticmethod(lambda: None)
class Tensor:
    def copy_(self, other): pathlib.Path("pid").write_text(str(os.getpid()))
def full(*_, **__): return Tensor()
ones = empty_like = full
def mm(a, b, out): assert isinstance(a, Tensor)
get_num_threads, set_num_threads = (lambda: 1), (lambda n: None)
"""


def test_a_gpu_s_rates_are_measured_in_a_process_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = hardware.rates(1, "cuda", ["float32", "int5"])
    assert found["device"] == "cuda" and found["read"] == found["copy"] > 0
    assert found["matrix"]["float32"] > 0 and found["matrix"]["int5"] is None
    pid = int(Path("pid").read_text(encoding="utf-8"))
    assert pid != os.getpid() and not psutil.pid_exists(pid)


def test_an_error_in_a_process_apart_comes_through() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        hardware.apart(int, "seven")


def test_a_device_of_two_kinds_has_no_rates() -> None:
    found: dict[str, Any] = hardware.rates(1, "mixed", ["float32"])
    assert found["read"] is None and found["matrix"] == {"float32": None}
