"""Measure one server: from its launch or URL through the probe to the last row and the metrics.

A level is a load. A closed loop sends the next request when one is answered, so a slow server gets fewer; it shows capacity. An
open loop sends requests when they are due, as users do; queues grow if the server cannot keep up. It shows how long users wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import numpy as np

from pipeline.core import artifacts, cli
from pipeline.core.errors import DataError
from pipeline.core.explain import did_you_mean
from pipeline.core.params import Prefix
from pipeline.core.records import Exchange, Finding, Launch, Metric, Metrics, Options, Probe, RequestRow, TextRow
from pipeline.evalset import load_texts
from pipeline.metrics.serving import PREFIX, TAIL, Objective, in_a_round, level, reuse, saturation_point, scenarios, warm_ups
from pipeline.serving import launch
from pipeline.serving.client import Clock, Endpoint, Request, ServerError, address, ask, connected, key_from, refused_fields, unsent
from pipeline.serving.reply import part
from pipeline.speed.schedule import Prompts

T = TypeVar("T")
R = TypeVar("R")
Tick = Callable[[], object]
CHARACTERS = 4  # of English text in a token, where no tokenizer counts them
OPENING = 24  # tokens or characters within which prompts differ, so that a prefix cache has no hits
CONFIDENCE = 0.95
TEMPLATE_TOKENS = 256  # that a chat template and an end token may add to a prompt
END_TOKENS = 16  # that a server may add to a prompt without a template
PROBE_TOKENS = 512  # the most that a request of the probe takes, with any tokenizer
IN_FLIGHT = 256  # an open loop's limit; a request that is due beyond it fails as `unsent`
NATURAL = 48  # tokens: a reply that ends by itself before this shows whether ignore_eos works
TEXT = "The harbour master counted the boats that came in before the storm, and wrote their names into a book."
CHAT = [{"role": "user", "content": "Answer with one word: yes or no?"}]


@dataclass(frozen=True)
class Plan:
    """The load on a server. requests: in a level and round, at least four for each concurrent one; warmups: in a level, at least
    one for each concurrent one unless 0."""

    concurrency: Sequence[int] = (1, 2, 4, 8, 16)
    rates: Sequence[float] = ()
    requests: int = 16
    rounds: int = 3
    warmups: int = 2
    prompt_tokens: int = 256
    output_tokens: int = 32
    forced: bool = True
    objective: Objective = field(default_factory=Objective)
    seed: int = 0

    def levels(self) -> list[tuple[str, int]]:
        """(scenario, requests in a round) of each level; closed ones by rising concurrency."""
        return [(name, in_a_round(name, self.requests)) for name in scenarios(self.concurrency, self.rates)]

    def prompts(self) -> int:
        """The number of different prompts that the run needs."""
        return sum(self.rounds * n + warm_ups(name, self.warmups) for name, n in self.levels())


# ---- what a server can do -----------------------------------------------------------------------------------------------------


def finding(value: bool | None, reason: str | None = None) -> Finding:
    return {"value": value, "reason": reason}


async def named(client: httpx2.AsyncClient, endpoint: Endpoint) -> tuple[Endpoint, list[str]]:
    """Return (the endpoint with its model, names of all models). Raises `ServerError` if the server is down, refuses the key, or
    does not serve the model; or if it serves several and none is named."""
    url = endpoint.url
    try:
        response = await client.get(f"{url}/models")
        listed = response.json() if response.status_code == 200 else None
    except httpx2.HTTPError as e:
        reason = endpoint.clean(str(e)) or type(e).__name__
        raise ServerError(f"no server answers at {url} ({reason}); start it, or correct the URL") from None
    except ValueError:
        raise ServerError(f"{url}/models is not JSON; is this an OpenAI-compatible server?") from None
    if response.status_code in (401, 403):
        key = "refuses this API key" if endpoint.key else "requires an API key"
        raise ServerError(f"{url} {key}; set {endpoint.key_variable} to the right one")
    if response.status_code != 200:
        raise ServerError(f"{url}/models answers HTTP {response.status_code}; is this an OpenAI-compatible server?")
    models, model = [str(name) for m in part(listed, "data") or [] if (name := part(m, "id"))], endpoint.model
    names = ", ".join(models[:5])
    if not models:
        raise ServerError(f"{url} serves no model; load one there")
    if model and model not in models:
        raise ServerError(f"{url} does not serve model {model!r}{did_you_mean(model, models)}; it has {names}")
    if not model and len(models) > 1:
        raise ServerError(f"{url} serves {len(models)} models: choose one with --model ({names})")
    return replace(endpoint, model=model or models[0]), models


async def probe(client: httpx2.AsyncClient, endpoint: Endpoint) -> tuple[Endpoint, Probe]:
    """Return (the endpoint with its model and refused fields, what it can do). Raises `ServerError` if it cannot be measured."""
    endpoint, models = await named(client, endpoint)
    api = "chat" if endpoint.chat else "completions"
    while True:
        row = (await ask(client, endpoint, Request(TEXT, 4))).row
        if not (more := refused_fields(row) - endpoint.refused):
            break
        endpoint = replace(endpoint, refused=endpoint.refused | more)
    if not row["ok"]:
        how = {200: "does not stream", None: "does not answer"}.get(row["status"], "refuses")
        raise ServerError(f"{endpoint.url} {how} {api}: {row['error']}")
    without = f"requests go without {', '.join(sorted(endpoint.refused))}, which it refuses"
    is_counted, events, tokens = row["counted_by"] == "usage", len(row["t_chunks"]), row["output_tokens"]
    several = None if events == tokens else f"{tokens} tokens came in {events} events"
    return endpoint, {
        "url": endpoint.url, "model": endpoint.model, "models": models, "api": api,
        **({"all_fields": finding(False, without)} if endpoint.refused else {}),  # type: ignore[typeddict-item]
        "stream_usage": finding(is_counted, None if is_counted else "no usage came, though stream_options asked for it"),
        "one_token_an_event": finding(None, row["counted_by"]) if tokens is None else finding(not several, several),
        "ignore_eos": await _ignores_eos(client, endpoint),
    }  # fmt: skip


async def _ignores_eos(client: httpx2.AsyncClient, endpoint: Endpoint) -> Finding:
    """Whether ignore_eos extends a reply that would end by itself."""
    prompts: list[Any] = [CHAT] if endpoint.chat else [CHAT, TEXT]  # a chat ends soon, and both APIs use the same sampler
    for prompt in prompts:
        forced = (await ask(client, endpoint, Request(prompt, NATURAL, forced=True))).row
        if forced["fault"] != "http":
            break
    if not forced["ok"]:
        return finding(False, forced["error"])
    if forced["output_tokens"] is None:
        return finding(None, forced["counted_by"])
    natural = (await ask(client, endpoint, Request(prompt, NATURAL))).row
    if natural["finish"] == "length" or natural["output_tokens"] == NATURAL:
        return finding(None, f"the model's own reply is longer than {NATURAL} tokens; every reply's length is checked anyway")
    return finding(True)


# ---- its load -----------------------------------------------------------------------------------------------------------------


@contextmanager
def endpoint_of(
    url: str | None, kind: str | None, folder: Path | None, plan: Plan, *, tokenizer: Any, model: str,
    chat: bool = False, timeout_s: float, key_env: str, threads: int, options: Options | None = None, prefix: Prefix | None = None,
) -> Iterator[tuple[Endpoint, Launch | None]]:  # fmt: skip
    """Yield (the endpoint, facts of its launch): the server at `url`, or one of `kind` that is started on a model's folder for the
    block. tokenizer: of the model, or None; options: the variant's engine options."""
    count = (lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)) if tokenizer else None
    if not kind or folder is None:
        yield Endpoint(address(url or "", key_env), model, chat, timeout_s, key_from(key_env), count, key_env), None
        return
    # The context that one request needs, and no more: a server reserves memory for all requests at once, and refuses a context
    # longer than the model's. A prompt whose tokens were not counted may have half as many again.
    prompt = max(plan.prompt_tokens, prefix.shared_tokens + TAIL if prefix else 0)
    spare = max(TEMPLATE_TOKENS if chat else END_TOKENS, 0 if tokenizer else prompt // 2)
    parallel, context = max(plan.concurrency, default=8), max(PROBE_TOKENS, prompt + plan.output_tokens + spare)
    with launch.launched(
        kind, folder, threads=threads, parallel=parallel, context=context, options=options, reuse=prefix is not None
    ) as server:
        yield Endpoint(server.url, model, chat, timeout_s, server.key, count, key_env), server.facts


def prompts(documents: Sequence[TextRow], plan: Plan, tokenizer: Any, as_ids: bool, prefix: Prefix | None = None) -> list[Any]:
    """The plan's prompts, no two with the same opening: token ids, or text of about as many tokens where ids cannot be sent. Then,
    for a prefix, two prompts that begin alike for each of its requests."""
    source, unit = "\n\n".join(d["text"] for d in documents), 1 if tokenizer else CHARACTERS
    if tokenizer:
        source = tokenizer.encode(source, add_special_tokens=False).ids
    lengths = [plan.prompt_tokens] * plan.prompts() + ([prefix.shared_tokens, TAIL, TAIL] * prefix.requests if prefix else [])
    length = unit * max(lengths)
    cutter = Prompts(source, plan.seed, starts=range(len(source) - length + 1), opening=OPENING)
    try:
        pieces = [cutter.cut(unit * n) for n in lengths]
    except DataError:
        made = f"the text makes {len(cutter.openings)} different prompts of {length}"
        raise DataError(f"{made}; {len(lengths)} are needed: add text, or ask for fewer") from None
    shared = pieces[plan.prompts() :]
    pieces[plan.prompts() :] = [a + tail for a, *tails in zip(shared[::3], shared[1::3], shared[2::3]) for tail in tails]
    return [tokenizer.decode(p) for p in pieces] if tokenizer and not as_ids else pieces


def arrivals(rate: float, count: int, rng: np.random.Generator) -> list[float]:
    """Due times of `count` Poisson arrivals at `rate` a second, in seconds from the start."""
    return [float(t) for t in np.cumsum(rng.exponential(1 / rate, count))]


async def closed(send: Callable[[R], Awaitable[T]], requests: Sequence[R], concurrency: int, tick: Tick = lambda: None) -> list[T]:
    """Send all requests, `concurrency` at once; rows in the order of the requests."""
    rows: dict[int, T] = {}
    waiting = iter(enumerate(requests))

    async def work() -> None:
        for k, request in waiting:  # one iterator for all workers: each takes the next
            rows[k] = await send(request)
            tick()

    await together([work() for _ in range(concurrency)])
    return [rows[k] for k in sorted(rows)]


async def opened(
    send: Callable[[Request], Awaitable[Exchange]], requests: Sequence[Request], due: Sequence[float], *, most: int = IN_FLIGHT,
    clock: Clock = time.monotonic, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep, tick: Tick = lambda: None,
) -> list[Exchange]:  # fmt: skip
    """Send each request when it is due, unless `most` are waiting: then it fails. Rows in the order of the requests, with t_due."""
    start, room = clock(), asyncio.Semaphore(most)

    async def one(request: Request, at: float) -> Exchange:
        await sleep(max(0.0, at - clock()))
        if room.locked():
            row = unsent(request, clock(), f"not sent: {most} requests were already waiting")
        else:
            async with room:
                row = await send(request)
        tick()
        row["t_due"] = at
        return row

    return await together([one(r, start + t) for r, t in zip(requests, due)])


async def together(work: Sequence[Awaitable[T]]) -> list[T]:
    """Run all concurrently; if one raises, cancel the others before raising."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def unfinished(rows: Path) -> Path:
    """The file that holds rows, round by round, until a run ends. No metric uses it: rounds of two runs cannot be mixed."""
    return rows.with_suffix(".unfinished.jsonl")


async def measured(
    endpoint: Endpoint, plan: Plan, corpus: Path, tokenizer: Any, path: Path, prefix: Prefix | None = None,
    served_by: str | None = None,
) -> tuple[Probe, Plan, list[RequestRow]]:  # fmt: skip
    """Return (what the endpoint can do, the plan as carried out, rows). path: the file that rows will be written to; served_by: the
    kind of a server that was launched here. Every level is warmed up. Rounds go over the levels forwards and backwards in turn,
    so that a drift of the machine affects all alike."""
    async with connected(endpoint) as client:
        endpoint, abilities = await probe(client, endpoint)
        plan = replace(plan, forced=plan.forced and abilities["ignore_eos"]["value"] is not False)
        texts = prompts(load_texts(corpus), plan, tokenizer, not endpoint.chat, prefix)
        unused, rng, rows = iter(texts), np.random.default_rng(plan.seed), list[RequestRow]()

        async def send(request: Request) -> Exchange:
            return (await ask(client, endpoint, request)).row

        def take(n: int) -> list[Request]:
            return [Request(next(unused), plan.output_tokens, forced=plan.forced) for _ in range(n)]

        def add(answered: list[Exchange], scenario: str, number: int | None) -> None:
            rows.extend({"round": number, "scenario": scenario, "warmup": number is None, **row} for row in answered)

        with cli.progress(len(texts), "serving", "request") as bar:
            for number in range(plan.rounds):
                for name, n in plan.levels()[:: -1 if number % 2 else 1]:
                    if number == 0:
                        warmups = warm_ups(name, plan.warmups)
                        add(await closed(send, take(warmups), max(1, warmups), bar.update), name, None)
                    kind, _, size = name.partition("-")
                    if kind == "closed":
                        add(await closed(send, take(n), int(size), bar.update), name, number)
                    else:
                        add(await opened(send, take(n), arrivals(float(size), n, rng), tick=bar.update), name, number)
                artifacts.write_jsonl(unfinished(path), rows)
            for number in range(prefix.requests if prefix else 0):
                pair = take(2)
                for scenario, which, options in _steps(served_by, endpoint.chat):
                    add([await send(replace(pair[which], options=options))], scenario, number)
                    bar.update()
        return abilities, plan, rows


def _steps(kind: str | None, chat: bool) -> list[tuple[str, int, Options]]:
    """(scenario, which of two prompts that begin alike, fields) of each request: the first, the other, and, where the server can be
    asked, the first again with and without its cache."""
    using, alone, _ = launch.REUSE[kind] if kind else ({}, None, [])
    steps = [("prefix-cold", 0, using), ("prefix-warm", 1, using)]
    if alone is not None:
        tops = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
        steps += [("prefix-hit", 0, using | tops), ("prefix-alone", 0, alone | tops)]
    return steps


def metrics_of(
    rows: list[RequestRow], plan: Plan, confidence: float = CONFIDENCE, between: float | None = None
) -> tuple[dict[str, Metrics], Metric]:
    """Return ({scenario: its metrics}, the saturation point) of a run's rows. between: the variation between whole runs."""
    by_level = {name: [r for r in rows if r["scenario"] == name] for name, _ in plan.levels()}
    by_concurrency = {int(name.partition("-")[2]): r for name, r in by_level.items() if name.startswith("closed-")}
    by_level |= {name: found for name in PREFIX if (found := [r for r in rows if r["scenario"] == name])}
    levels = {name: level(r, confidence, plan.objective, between) for name, r in by_level.items()}
    if PREFIX[1] in levels:
        levels[PREFIX[1]] |= reuse(rows, confidence, between)
    return levels, saturation_point(by_concurrency, confidence)


def failure(rows: list[RequestRow]) -> str | None:
    """Why a run has no metrics (no request was complete), or None."""
    counted = [r for r in rows if not r["warmup"]]
    if any(r["ok"] for r in counted):
        return None
    return f"none of {len(counted)} requests was complete; the first failed with: {counted[0]['error']}"


def summary(rows: list[RequestRow], knee: Metric) -> str:
    """A run's result in one line: complete requests, and the saturation point or why there is none."""
    complete = f"{len(rows)} requests, {sum(r['ok'] for r in rows)} complete"
    if knee["value"] is None:
        return f"{complete}; no saturation point: {knee['warnings'][0]}"
    return f"{complete}; saturation point: {knee['value']:g} concurrent requests"
