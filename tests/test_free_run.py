"""Free-running replies: greedy, in the reference's prompts and order, the same however an engine makes them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline import engines
from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError
from pipeline.engines import Sampling, _generation

PROMPTS = [
    {"id": "a", "domain": "news", "prompt": "The harbour"},
    {
        "id": "b",
        "domain": "dialogue",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好"}],
    },
]


def store(folder: Path, *windows: dict[str, Any]) -> Path:
    artifacts.write_jsonl(folder / "windows.jsonl", windows)
    return folder


def window(document: str, ids: list[int], first: int, name: str = "trajectory") -> dict[str, Any]:
    return {"set": name, "window": document, "document": document, "token_ids": ids, "first": first}


def test_prompts_are_those_the_reference_continued_in_its_order(tmp_path: Path) -> None:
    folder = store(tmp_path, window("n1", [1, 2, 3], 1, "news"), window("b", [4, 5, 6, 7], 3), window("a", [8, 9], 1))
    found = _generation.asked(folder, PROMPTS)
    assert [(r["id"], r["ids"]) for r in found] == [("b", [4, 5, 6]), ("a", [8])]
    assert found[0]["prompt"] == "Be brief.\n你好"  # what was written, not the template's words
    assert found[1]["prompt"] == "The harbour" and found[1]["domain"] == "news"


def test_a_prompt_that_is_gone_from_its_file_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="'c', which is not in the prompts' file"):
        _generation.asked(store(tmp_path, window("c", [1, 2], 1)), PROMPTS)


def test_replies_are_the_same_batched_and_one_at_a_time(tiny: Path) -> None:
    engine = engines.load("hf", tiny, threads=1)
    prompts = [engine.tokenizer(text).input_ids for text in ("The", "A longer prompt than that", "Rain over the")]

    class OneAtATime:
        def stream(self, ids: Sequence[int], most: int, sampling: Sampling) -> Iterator[tuple[int, float]]:
            return engine.stream(ids, most, sampling)

    batched = _generation.replies(engine, prompts, 12, 16)
    assert batched == _generation.replies(OneAtATime(), prompts, 12, 16) == _generation.replies(engine, prompts, 12, 1)
    assert all(1 <= len(r) <= 12 for r in batched)


class Echo:
    """Answers with the first prompt token, counted up; ends by itself where a prompt is shorter than two tokens."""

    class tokenizer:
        @staticmethod
        def decode(ids: list[int], **how: Any) -> str:
            return " ".join(map(str, ids))

    end_ids = {0}

    def __init__(self) -> None:
        self.calls: list[int] = []

    def sample(self, prompts: list[list[int]], most: int, sampling: Sampling) -> list[list[int]]:
        self.calls.append(len(prompts))
        return [[p[0] + k for k in range(most if len(p) > 1 else 1)] for p in prompts]


def test_rows_hold_what_later_stages_need_and_the_reference_answers_at_two_batch_sizes() -> None:
    prompts = [{"id": f"p{k}", "domain": "d", "prompt": "text", "ids": [k, k][: 1 + k % 2]} for k in range(20)]
    engine = Echo()
    rows = _generation.generate(engine, prompts, 4, is_reference=True)
    assert engine.calls == [16, 4, 8, 8, 4]
    assert [r["cut"] for r in rows[:2]] == [False, True] and rows[1]["token_ids"] == [1, 2, 3, 4] == rows[1]["again"]
    assert rows[1]["text"] == "1 2 3 4" and rows[1]["prompt_tokens"] == 2
    assert "again" not in _generation.generate(Echo(), prompts, 4, is_reference=False)[0]
    few = Echo()
    _generation.generate(few, prompts[:6], 4, is_reference=True)
    assert few.calls == [6, 3, 3]  # another batch also where all prompts fit into one
    assert "again" not in _generation.generate(Echo(), prompts[:1], 4, is_reference=True)[0]


def test_an_engine_without_batches_streams() -> None:
    class Streams:
        def stream(self, ids: Sequence[int], most: int, sampling: Sampling) -> Iterator[tuple[int, float]]:
            assert sampling.temperature == 0 and sampling.stop
            yield from ((ids[0] + k, time.monotonic()) for k in range(most))

    assert _generation.replies(Streams(), [[5], [7]], 3, 16) == [[5, 6, 7], [7, 8, 9]]


def test_a_reply_that_ends_at_the_limit_by_itself_is_not_cut() -> None:
    engine = Echo()
    engine.end_ids = {9}
    prompts = [{"id": "p", "domain": "d", "prompt": "x", "ids": [7, 7]}]
    assert [_generation.generate(engine, prompts, most, False)[0]["cut"] for most in (2, 3)] == [True, False]
