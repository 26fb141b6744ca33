"""Free-running replies: greedy, in the reference's prompts and order, the same however an engine makes them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import engines
from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError
from pipeline.engines import Sampling, _generation
from pipeline.engines._generation import Prompt

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好"}]
PROMPTS: Any = [
    {"id": "a", "domain": "news", "prompt": "The harbour"}, {"id": "b", "domain": "dialogue", "messages": CHAT},
]  # fmt: skip


def store(folder: Path, *windows: tuple[str, str, list[int], int]) -> Path:
    names = ("set", "document", "token_ids", "first")
    rows = [dict(zip(names, w)) | {"window": w[1], "domain": "d"} for w in windows]
    artifacts.write_jsonl(folder / "windows.jsonl", rows)
    return folder


def test_prompts_are_those_the_reference_continued_in_its_order(tmp_path: Path) -> None:
    windows = ("news", "n1", [1, 2, 3], 1), ("trajectory", "b", [4, 5, 6, 7], 3), ("trajectory", "a", [8, 9], 1)
    asked = _generation.asked(store(tmp_path, *windows), PROMPTS)
    assert asked == [
        Prompt("b", "dialogue", "Be brief.\n你好", [4, 5, 6]),  # what was written, not the template's words
        Prompt("a", "news", "The harbour", [8]),
    ]


def test_a_prompt_that_is_gone_from_its_file_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="'c', which is not in the prompts' file"):
        _generation.asked(store(tmp_path, ("trajectory", "c", [1, 2], 1)), PROMPTS)


def test_replies_are_the_same_batched_and_one_at_a_time(tiny: Path) -> None:
    engine: Any = engines.load("hf", tiny, threads=1)
    prompts = [engine.tokenizer(text).input_ids for text in ("The", "A longer prompt than that", "Rain over the")]
    batched = _generation.replies(engine, prompts, 12, 16)
    streams = SimpleNamespace(stream=engine.stream)  # an engine without batches
    assert batched == _generation.replies(streams, prompts, 12, 16) == _generation.replies(engine, prompts, 12, 1)
    assert all(1 <= len(r) <= 12 for r in batched)


class Echo:
    """Answers with the first prompt token, counted up; ends by itself where a prompt is shorter than two tokens."""

    tokenizer = SimpleNamespace(decode=lambda ids, **how: " ".join(map(str, ids)))

    def __init__(self, end: int = 0) -> None:
        self.calls, self.end_ids = list[int](), {end}

    def sample(self, prompts: list[list[int]], most: int, sampling: Sampling) -> list[list[int]]:
        self.calls.append(len(prompts))
        return [[p[0] + k for k in range(most if len(p) > 1 else 1)] for p in prompts]


def test_rows_hold_what_later_stages_need_and_the_reference_answers_at_two_batch_sizes() -> None:
    prompts = [Prompt(f"p{k}", "d", "text", [k, k][: 1 + k % 2]) for k in range(20)]
    engine, few = Echo(), Echo()
    rows = _generation.generate(engine, prompts, 4, is_reference=True)
    assert engine.calls == [16, 4, 8, 8, 4]
    assert rows[0]["cut"] is False and rows[1] == {
        "id": "p1", "domain": "d", "prompt": "text", "prompt_tokens": 2, "token_ids": [1, 2, 3, 4], "text": "1 2 3 4", "cut": True,
        "again": [1, 2, 3, 4],
    }  # fmt: skip
    _generation.generate(few, prompts[:6], 4, is_reference=True)
    assert few.calls == [6, 3, 3], "another batch also where all prompts fit into one"
    for given, is_reference in ((prompts, False), (prompts[:1], True)):
        assert "again" not in _generation.generate(Echo(), given, 4, is_reference)[0]


def test_a_reply_that_ends_at_the_limit_by_itself_is_not_cut() -> None:
    prompts = [Prompt("p", "d", "x", [7, 7])]
    assert [_generation.generate(Echo(end=9), prompts, most, False)[0]["cut"] for most in (2, 3)] == [True, False]
