"""Loads: so many requests at once (closed loop), or so many a second whatever happens (open loop).

A closed loop sends the next request when one is answered, so a slow server is asked less; it shows capacity. An open loop
sends when requests are due, as users do, and queues grow if the server cannot keep up; it shows what users wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from pipeline.serving.client import Answer, Clock, Request, Row

Ask = Callable[[Request], Awaitable[Answer]]
IN_FLIGHT = 256  # an open loop sends no more than this at once: what is due beyond is a failure of its own


def schedule(rate: float, count: int, rng: np.random.Generator) -> list[float]:
    """Due times in seconds from the start of `count` Poisson arrivals at `rate` a second: gaps are exponential."""
    return [float(t) for t in np.cumsum(rng.exponential(1 / rate, count))]


async def closed(
    ask: Ask, requests: Sequence[Request], concurrency: int, *, tick: Callable[[], object] = lambda: None
) -> list[Row]:
    """Every request, `concurrency` at once; rows in the order of the requests."""
    rows: list[Row] = [{} for _ in requests]
    waiting = iter(enumerate(requests))

    async def work() -> None:
        for k, request in waiting:  # one iterator for all workers: each takes the next
            rows[k] = (await ask(request)).row
            tick()

    await together([work() for _ in range(concurrency)])
    return rows


async def opened(
    ask: Ask, requests: Sequence[Request], due: Sequence[float], *, most: int = IN_FLIGHT, clock: Clock = time.monotonic,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep, tick: Callable[[], object] = lambda: None,
) -> list[Row]:  # fmt: skip
    """Every request at its due time, answered or not; rows in the order of the requests, with t_due."""
    start, in_flight = clock(), 0

    async def one(request: Request, at: float) -> Row:
        nonlocal in_flight
        await sleep(max(0.0, at - clock()))
        if in_flight >= most:
            tick()
            return unsent(request, clock(), f"not sent: {most} requests were waiting already") | {"t_due": at}
        in_flight += 1
        try:
            return (await ask(request)).row | {"t_due": at}
        finally:
            in_flight -= 1
            tick()

    return await together([one(r, start + t) for r, t in zip(requests, due)])


async def together(work: Sequence[Awaitable[Any]]) -> list[Any]:
    """All at once; if one raises, the others are stopped before its error goes on."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def unsent(request: Request, now: float, why: str) -> Row:
    """The row of a request that never left: it failed, and it counts."""
    return {
        "prompt_tokens": None, "cached_tokens": None, "output_tokens": None, "counted_by": "no reply",
        "asked_tokens": request.max_tokens, "forced": request.forced, "t_submit": now, "t_first": None, "t_content": None,
        "t_last": None, "t_tokens": None, "t_chunks": [], "t_done": None, "t_end": now,
        "phases": {"connected": None, "headers": None}, "peak_memory_bytes": None,
        "finish": None, "ok": False, "fault": "unsent", "status": None, "error": why,
    }  # fmt: skip
