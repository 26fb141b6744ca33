"""Two live processes in turns; every request is a row, failures too; nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from pipeline import benchmark, hardware
from pipeline.errors import ArtifactError, DataError, Unsupported
from pipeline.params import Requests, Variant

HF = Variant(quantizer="cast", engine="hf", options={"dtype": "float32"})
SETUP = Requests(prompt_tokens=8, output_tokens=6, warmups=1, rounds=5)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent))


def test_rounds_interleave_and_output_length_is_forced(tiny: Path) -> None:
    asked = [[k + 5 + i for i in range(8)] for k in range(6)]
    with benchmark.serving(HF, tiny, 1) as a, benchmark.serving(HF, tiny, 1) as b:
        rows = list(benchmark.measure(a, b, SETUP, asked))
        pids = [a.process.pid, b.process.pid]
    assert len(rows) == 12 and all(r["ok"] and r["output_tokens"] == 6 for r in rows)
    assert [r["round"] for r in rows] == [None, None] + [k for k in range(5) for _ in "ab"]
    assert [r["who"] for r in rows[:4]] == ["reference", "variant", "variant", "reference"]
    times = [t for r in rows for t in (r["t_submit"], *r["t_tokens"])]
    assert times == sorted(times), "requests overlapped"
    assert all(r["peak_memory_bytes"] > 0 and r["kv_bytes_per_token"] > 0 for r in rows)
    assert a.facts["load_s"] > 0 and not any(psutil.pid_exists(p) for p in pids)  # type: ignore[arg-type]


def test_a_failed_request_is_a_row_and_not_the_end() -> None:
    class Broken:
        def stream(self, *_: object) -> object:
            raise RuntimeError("reset")

    row = benchmark._answer(Broken(), [1], 4)
    assert not row["ok"] and row["error"] == "RuntimeError: reset" and row["t_tokens"] == []


def test_a_short_reply_is_not_ok() -> None:
    class Short:
        def stream(self, *_: object) -> list[tuple[int, float]]:
            return [(1, time.monotonic())]

    row = benchmark._answer(Short(), [1], 4)
    assert not row["ok"] and row["error"] == "asked for 4 tokens, got 1"


def test_a_killed_process_is_an_error_in_words(tiny: Path) -> None:
    with benchmark.serving(HF, tiny, 1) as server:
        os.kill(server.process.pid or 0, signal.SIGKILL)
        with pytest.raises((ArtifactError, OSError)):
            server.ask([1, 2], 2)


def test_a_model_that_cannot_run_here_is_unsupported_and_not_a_crash(tmp_path: Path) -> None:
    variant = HF.model_copy(update={"engine_options": {"device": "cuda"}})
    if __import__("torch").cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(Unsupported, match="no CUDA device"), benchmark.serving(variant, tmp_path, 1):
        pass


def test_prompts_are_distinct_and_of_equal_length(tiny: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    documents = [{"text": " ".join(f"Document {k} speaks of rain {k * 31 + i} and council." for i in range(20))} for k in range(3)]
    found = benchmark.prompts(documents, tokenizer, 16, 10, seed=1)
    assert {len(p) for p in found} == {16} and len({tuple(p) for p in found}) == 10
    with pytest.raises(DataError, match="different prompts of 5000"):
        benchmark.prompts(documents, tokenizer, 5000, 10, seed=1)


def test_the_machine_is_described_and_its_memory_measured() -> None:
    facts = hardware.describe(2)
    assert facts["cores"] >= 1 and facts["memory_bytes"] > 1 << 28 and facts["cpu"]
    assert hardware.memory_bandwidth(1, size=1 << 24, repeats=2) > 1e8
