"""Generate load: a fixed number of concurrent requests (closed loop), or a fixed rate (open loop).

A closed loop sends the next request when one is answered, so a slow server gets fewer; it shows capacity. An open loop sends
requests when they are due, as users do, and queues grow if the server cannot keep up; it shows how long users wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from pipeline.serving.client import Answer, Clock, Endpoint, Request, Row, row_of
from pipeline.serving.reply import Fault, Reply

Ask = Callable[[Request], Awaitable[Answer]]
IN_FLIGHT = 256  # an open loop's limit; a request that is due beyond it fails as `unsent`


def schedule(rate: float, count: int, rng: np.random.Generator) -> list[float]:
    """Due times of `count` Poisson arrivals at `rate` a second, in seconds from the start."""
    return [float(t) for t in np.cumsum(rng.exponential(1 / rate, count))]


async def closed(
    ask: Ask, requests: Sequence[Request], concurrency: int, *, tick: Callable[[], object] = lambda: None
) -> list[Row]:
    """Send all requests, `concurrency` at once; rows in the order of the requests."""
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
    """Send each request when it is due; rows in the order of the requests, with t_due."""
    start, in_flight = clock(), 0

    async def one(request: Request, at: float) -> Row:
        nonlocal in_flight
        await sleep(max(0.0, at - clock()))
        if in_flight >= most:
            tick()
            now, why = clock(), f"not sent: {most} requests were already waiting"
            phases: dict[str, float | None] = {"connected": None, "headers": None}
            row = row_of(Endpoint(""), request, Reply(), now, phases, Fault("unsent", why))  # it counts as failed
            return row | {"t_end": now, "t_due": at}
        in_flight += 1
        try:
            return (await ask(request)).row | {"t_due": at}
        finally:
            in_flight -= 1
            tick()

    return await together([one(r, start + t) for r, t in zip(requests, due)])


async def together(work: Sequence[Awaitable[Any]]) -> list[Any]:
    """Run all at once; if one raises, cancel the others before raising."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
