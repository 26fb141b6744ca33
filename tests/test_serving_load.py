"""Loads: concurrency is kept, arrivals wait for no reply, and no cache has seen a prompt."""

import asyncio
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.serving import measure
from pipeline.serving.client import Request
from pipeline.serving.measure import Plan

REQUESTS = [Request(f"p{k}", 1) for k in range(12)]


class Fake:
    """Replies after some turns of the event loop, and records the most requests that it had at once."""

    def __init__(self, turns: int = 3) -> None:
        self.turns, self.now, self.most, self.order = turns, 0, 0, list[str]()

    async def __call__(self, request: Request) -> Any:
        self.order.append(str(request.prompt))
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(self.turns + len(self.order) % 3):
            await asyncio.sleep(0)
        self.now -= 1
        return {"prompt": request.prompt}


@pytest.mark.parametrize("concurrency", [1, 3, 12, 40])
def test_a_closed_loop_keeps_its_number_and_asks_everything_once_in_order(concurrency: int) -> None:
    fake = Fake()
    rows = asyncio.run(measure.closed(fake, REQUESTS, concurrency))
    assert fake.most == min(concurrency, 12) and fake.order == [r.prompt for r in REQUESTS]
    assert [r["prompt"] for r in rows] == [r.prompt for r in REQUESTS]


def test_an_open_loop_sends_when_due_whether_or_not_others_were_answered() -> None:
    now, fake = [0.0], Fake(turns=50)

    async def sleep(seconds: float) -> None:
        now[0] = max(now[0], seconds)

    rows = asyncio.run(measure.opened(fake, REQUESTS, [0.1 * k for k in range(12)], clock=lambda: now[0], sleep=sleep))
    assert fake.most == 12, "arrivals waited for answers"
    assert [r["t_due"] for r in rows] == pytest.approx([0.1 * k for k in range(12)])


def test_what_an_open_loop_cannot_send_is_a_failure_and_not_forgotten() -> None:
    rows = asyncio.run(measure.opened(Fake(turns=50), REQUESTS, [0.0] * 12, most=4))
    unsent = [r for r in rows if r.get("fault") == "unsent"]
    assert len(rows) == 12 and len(unsent) == 8 and "4 requests were already waiting" in unsent[0]["error"] and not unsent[0]["ok"]


def test_arrivals_are_poisson() -> None:
    """Gaps are exponential: mean and standard deviation are both 1 / rate; counts a second have variance = mean."""
    due = measure.arrivals(20.0, 40_000, np.random.default_rng(3))
    gaps = np.diff([0.0, *due])
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.02) and gaps.std() == pytest.approx(1 / 20, rel=0.03)
    counts = np.bincount(np.asarray(due).astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.1)
    assert due == measure.arrivals(20.0, 40_000, np.random.default_rng(3))


def test_an_error_of_our_own_stops_the_load_and_comes_through() -> None:
    stopped = []

    async def broken(request: Request) -> Any:
        if request.prompt == "p3":
            raise RuntimeError("a bug")
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            stopped.append(request.prompt)
            raise
        raise AssertionError

    with pytest.raises(RuntimeError, match="a bug"):
        asyncio.run(measure.closed(broken, REQUESTS, 12))
    assert len(stopped) == 11


def test_prompts_differ_from_their_first_characters_on() -> None:
    def cut(text: str, tokens: int, count: int) -> list[str]:
        return measure.prompts([{"text": text}], Plan([1], requests=count, rounds=1, warmups=0, prompt_tokens=tokens), None, False)

    pieces = cut(" ".join(map(str, range(4000))), 50, 300)
    assert {len(p) for p in pieces} == {200} and len({p[: measure.OPENING] for p in pieces}) == 300
    assert pieces == cut(" ".join(map(str, range(4000))), 50, 300)
    with pytest.raises(DataError, match="1 different prompts of 40; 4 are needed"):
        cut("a" * 500, 10, 4)
    with pytest.raises(DataError, match="0 different prompts of 40"):
        cut("short", 10, 4)


def test_a_plan_counts_the_prompts_it_needs_and_fills_every_level() -> None:
    plan = Plan([4, 1, 4], [2.0, 0.5], requests=8, rounds=3, warmups=2)
    assert plan.levels() == [("closed-1", 8), ("closed-4", 16), ("open-0.5", 8), ("open-2", 8)] and Plan([]).levels() == []
    assert plan.prompts() == 3 * (8 + 16 + 8 + 8) + 2 + 4 + 2 + 2
    assert Plan([8], [2.0], requests=8, rounds=1, warmups=0).prompts() == 32 + 8
