"""`quantgate batch URL requests.jsonl results.jsonl`: send many requests, each once.

A request is a line {key, prompt or messages, max_tokens, any further field of the API}, such as

    {"key": "q1", "prompt": "The capital of France is", "max_tokens": 8}
    {"key": "q2", "messages": [{"role": "user", "content": "Name a river."}], "temperature": 0.7}

The default key is a digest of the request's content. Results are appended as they come, so a killed run continues: requests with
a result are not sent again; those in flight are, with the same Idempotency-Key.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TextIO

import httpx2
import typer
from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from pipeline.core import artifacts, cli, explain
from pipeline.core.errors import ArtifactError, DataError, ParamsError
from pipeline.core.records import Json
from pipeline.serving import measure
from pipeline.serving.client import KEY, Answer, Endpoint, Request, address, ask, connected, key_from
from pipeline.serving.reply import LINE_END

KEPT = ("ok", "fault", "status", "error", "finish", "prompt_tokens", "output_tokens", "counted_by")  # of a request's row
OPENING = b'{"key": "'  # of every result, even one that was cut off
REFUSED = (429, 503)  # the server did not accept the request, so it can be sent again
Sleep = Callable[[float], Awaitable[object]]


class Result(TypedDict):
    """The fields of a result that a later run reads. request: digest of the request's content; model: its name at the server."""

    key: str
    request: str
    model: str
    ok: bool


RESULT = TypeAdapter(Result)


@dataclass(frozen=True)
class Item:
    """One request of the batch. digest: of its content, to notice a key that is used for another request."""

    key: str
    request: Request
    digest: str

    def model(self, endpoint: Endpoint) -> str:
        """The model that the request names, or the endpoint's."""
        return str(self.request.options.get("model", endpoint.model))


@dataclass(frozen=True)
class Pace:
    """How fast to send. rate: requests per second, None for no limit; tries: for each request."""

    concurrency: int = 4
    rate: float | None = None
    tries: int = 5
    first_wait_s: float = 0.5
    longest_wait_s: float = 60.0


def read(path: Path, max_tokens: int) -> list[Item]:
    """Read a file of requests. Raises `DataError` with the first invalid line."""
    items: dict[str, Item] = {}
    missing = f'{path} does not exist; write one request per line: {{"key": "a", "prompt": "..."}}'
    for number, text in enumerate(LINE_END.split(explain.read_text(path, DataError, missing)), 1):
        if text.strip():
            item = _item(text, f"{path}:{number}", max_tokens)
            if item.key in items:
                raise DataError(f"{path}:{number}: key {item.key!r} occurs twice; give each request its own")
            items[item.key] = item
    if not items:
        raise DataError(f"{path} has no requests")
    return list(items.values())


def _item(text: str, where: str, max_tokens: int) -> Item:
    try:
        line = json.loads(text)
        json.dumps(line, ensure_ascii=False).encode()  # a lone surrogate cannot be sent or written
    except ValueError as e:
        raise DataError(f"{where}: not JSON ({e})") from None
    if not isinstance(line, dict) or ("prompt" in line) == ("messages" in line):
        raise DataError(f"{where}: a request is an object with either prompt or messages")
    if {"stream", "stream_options", "n"} & line.keys():
        raise DataError(f"{where}: a request cannot set stream, stream_options or n; each gets one streamed reply")
    body = {"max_tokens": max_tokens} | {k: v for k, v in line.items() if k != "key"}
    if type(body["max_tokens"]) is not int or body["max_tokens"] < 1:
        raise DataError(f"{where}: max_tokens is {body['max_tokens']!r}; give a whole number, at least 1")
    digest = artifacts.digest(body)
    key = str(line.get("key", digest))
    headers = {"Idempotency-Key": artifacts.digest([key, digest])}
    prompt, tokens = body.pop("prompt" if "prompt" in body else "messages"), body.pop("max_tokens")
    return Item(key, Request(prompt, tokens, options=body, headers=headers), digest)


def answered(results: Path, items: list[Item]) -> dict[str, Result]:
    """Return {key: its result} of previous runs, and remove a last line that a killed run left incomplete. Raises `ArtifactError`,
    before changing the file, if a key had another request, or if the file holds anything but results."""
    if not results.exists():
        return {}
    *lines, last = results.read_bytes().split(b"\n")
    rows = [_result(text, f"{results}:{number}") for number, text in enumerate(lines, 1) if text.strip()]
    previous = {row["key"]: row for row in rows}  # a key's last line is its last try
    for item in items:
        if item.key in previous and previous[item.key]["request"] != item.digest:
            raise ArtifactError(f"key {item.key!r} has another request in {results}; give the new request a new key")
    if last:
        where = f"{results}:{len(lines) + 1}"
        if not last.startswith(OPENING[: len(last)]):
            raise ArtifactError(f"{where} is not a result that was cut off; choose another file for the results")
        with suppress(ValueError):  # complete JSON must be a result
            json.loads(last)
            _result(last, where)
        with results.open("rb+") as f:
            f.truncate(sum(len(text) + 1 for text in lines))
    return previous


def _result(text: bytes, where: str) -> Result:
    """Parse a result. Raises `ArtifactError` with its line for anything else."""
    try:
        return RESULT.validate_json(text, strict=True)
    except ValidationError as e:
        first = e.errors()[0]
        reason = ": ".join([*map(str, first["loc"]), first["msg"].lower()])
        raise ArtifactError(f"{where} is not a result ({reason}); choose another file for the results") from None


@contextmanager
def appending(results: Path) -> Iterator[TextIO]:
    """Open and lock the results. Raises `ArtifactError` if another process has the lock."""
    results.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{results}.lock", timeout=0), results.open("a", encoding="utf-8", newline="\n") as f:
            yield f
    except Timeout:
        raise ArtifactError(f"another batch is writing {results}; wait for it, or choose another file") from None


def is_safe(answer: Answer) -> bool:
    """Whether a failed request can be sent again: it never arrived, or the server did not accept it. After any other failure (a
    timeout, a broken stream, an internal error) the reply may have been computed and paid for."""
    return answer.row["fault"] == "connect" or (answer.row["fault"] == "http" and answer.row["status"] in REFUSED)


def wait_s(pace: Pace, tried: int, answer: Answer, rng: random.Random) -> float:
    """Seconds before the next try: doubled each time, randomized by up to half, and at least what the server asks for."""
    full = min(pace.first_wait_s * 2.0 ** (tried - 1), pace.longest_wait_s)
    return max(answer.retry_after or 0.0, full * rng.uniform(0.5, 1.0))


class Gate:
    """Limits the rate: lets one request pass every 1/rate seconds, in order."""

    def __init__(self, rate: float | None, clock: Callable[[], float], sleep: Sleep) -> None:
        self.gap, self.clock, self.sleep = 1 / rate if rate else 0.0, clock, sleep
        self.next = clock()

    async def passed(self) -> None:
        due = max(self.next, self.clock())
        self.next = due + self.gap
        if due > self.clock():
            await self.sleep(due - self.clock())


async def one(client: httpx2.AsyncClient, endpoint: Endpoint, item: Item, pace: Pace, gate: Gate, rng: random.Random) -> Json:
    """Send one request, repeatedly where that is safe; returns its result."""
    for tried in range(1, pace.tries + 1):
        await gate.passed()
        answer = await ask(client, endpoint, item.request)
        if answer.row["ok"] or not is_safe(answer) or tried == pace.tries:
            break
        if (wait := wait_s(pace, tried, answer, rng)) > pace.longest_wait_s:
            limit = f"the server asks to wait {wait:.0f} s, more than {pace.longest_wait_s:g}: try again then"
            answer.row["error"] = f"{answer.row['error']}; {limit}"
            break
        await gate.sleep(wait)
    row = dict(answer.row)
    text, reasoning = (answer.text, answer.reasoning or None) if row["ok"] else (None, None)
    request: Json = {"key": item.key, "request": item.digest, "model": item.model(endpoint), "tries": tried}
    return request | {"text": text, "reasoning": reasoning} | {k: row[k] for k in KEPT}


async def run(
    client: httpx2.AsyncClient, endpoint: Endpoint, items: list[Item], pace: Pace, out: TextIO, *,
    sleep: Sleep = asyncio.sleep, tick: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Send every request, at most `pace.concurrency` at once, and append each result as it comes."""
    gate, rng = Gate(pace.rate, time.monotonic, sleep), random.Random()

    async def send(item: Item) -> None:
        row = await one(client, endpoint, item, pace, gate, rng)
        out.write(json.dumps(artifacts.jsonable(row), ensure_ascii=False, allow_nan=False) + "\n")
        out.flush()
        os.fsync(out.fileno())

    await measure.closed(send, items, pace.concurrency, tick)


async def main_async(
    endpoint: Endpoint, items: list[Item], todo: list[Item], previous: Mapping[str, Result], pace: Pace, out: TextIO
) -> None:
    """Send `todo`, the `items` without a result in `previous`. Raises `ArtifactError` if another model gave these."""
    async with connected(endpoint) as client:
        endpoint, _ = await measure.named(client, endpoint)
        others = sorted({row["model"] for row in previous.values()} - {item.model(endpoint) for item in items})
        if others:
            raise ArtifactError(f"{out.name} has results of {others[0]!r}, not {endpoint.model!r}; choose another file")
        with cli.progress(len(todo), "batch", "request") as bar:
            await run(client, endpoint, todo, pace, out, tick=bar.update)


def main(
    url: Annotated[str, typer.Argument(help="the server, http://127.0.0.1:8000; the API key comes from QUANTGATE_API_KEY")],
    requests: Annotated[Path, typer.Argument(help="JSONL: key, prompt or messages, max_tokens, ...")],
    results: Annotated[Path, typer.Argument(help="JSONL that results are appended to")],
    model: Annotated[str, typer.Option(help="the model's name at the server, if it serves several")] = "",
    concurrency: Annotated[int, typer.Option(min=1, help="concurrent requests")] = 4,
    rate: Annotated[float, typer.Option(min=0.0, help="requests per second; 0: no limit")] = 0.0,
    tries: Annotated[int, typer.Option(min=1, help="for a request that was not accepted; others are never sent twice")] = 5,
    max_tokens: Annotated[int, typer.Option(min=1, help="for requests without max_tokens")] = 256,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds for a whole reply")] = 120.0,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="send failed requests of previous runs again")] = False,
    key_env: Annotated[str, typer.Option(help="the variable that holds the API key")] = KEY,
) -> None:
    """Send many requests to a server, each once. Exits 1 if any failed."""
    if requests.resolve() == results.resolve():
        raise ParamsError(f"{results} has the requests; choose another file for the results")
    items = read(requests, max_tokens)
    endpoint = Endpoint(address(url, key_env), model, False, timeout, key_from(key_env), key_variable=key_env)
    with appending(results) as out:
        previous = answered(results, items)
        todo = [i for i in items if i.key not in previous or (retry_failed and not previous[i.key]["ok"])]
        if todo:
            asyncio.run(main_async(endpoint, items, todo, previous, Pace(concurrency, rate or None, tries), out))
        previous = answered(results, items)
    failed = sum(item.key in previous and not previous[item.key]["ok"] for item in items)
    failures = f"; {failed} failed (--retry-failed sends them again)" if failed else ""
    cli.say("batch", f"{len(items)} requests, {len(items) - len(todo)} answered before, {len(todo)} sent{failures}; {results}")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    cli.run(main)
