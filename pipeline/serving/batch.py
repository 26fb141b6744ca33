"""`python -m pipeline.serving.batch URL requests.jsonl results.jsonl`: many requests, each asked once.

A request is a line {key, prompt or messages, max_tokens, and any further field of the API}; without a key, its content is
its key. Results are appended as they come, one flushed line each, so a run that is killed goes on where it stopped: what
has a line is not asked again. Only what was in flight is, under the same Idempotency-Key.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TextIO

import httpx2
import typer
from filelock import FileLock, Timeout

from pipeline.core import artifacts, cli
from pipeline.core.errors import ArtifactError, DataError, ParamsError
from pipeline.serving import probe
from pipeline.serving.client import KEY, Answer, Endpoint, Request, Row, address, ask, connected, key_from
from pipeline.serving.load import together

HOLDS = {"key": str, "request": str, "model": str, "ok": bool}  # what tells a line of results from other JSON
OPENING = b'{"key": "'  # every line of results begins so, and so does one that was cut off
REFUSED = (429, 503)  # the server says that it did not take the request: it can be sent again
Sleep = Callable[[float], Awaitable[object]]


@dataclass(frozen=True)
class Item:
    """One request of the batch. digest: of its content, so that a key that comes back with another one is noticed."""

    key: str
    request: Request
    digest: str
    line: Row

    def model(self, endpoint: Endpoint) -> str:
        """Who is asked: the request may say so itself."""
        return str(self.request.options.get("model", endpoint.model))


@dataclass(frozen=True)
class Pace:
    """How fast: at once, a second (None: no limit), and how often one is tried before it has failed."""

    concurrency: int = 4
    rate: float | None = None
    tries: int = 5
    first_wait_s: float = 0.5
    longest_wait_s: float = 60.0


# --- what is asked -----------------------------------------------------------------------------------------------


def read(path: Path, max_tokens: int) -> list[Item]:
    """The requests of a file. Raises `DataError` with the line of the first that cannot be meant."""
    items: dict[str, Item] = {}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise DataError(f'{path} is missing; write one request a line: {{"key": "a", "prompt": "..."}}') from None
    for number, text in enumerate(lines, 1):
        if text.strip():
            item = _item(text, f"{path}:{number}", max_tokens)
            if item.key in items:
                raise DataError(f"{path}:{number}: key {item.key!r} is there twice; give each request its own")
            items[item.key] = item
    if not items:
        raise DataError(f"{path} holds no request")
    return list(items.values())


def _item(text: str, where: str, max_tokens: int) -> Item:
    try:
        line = json.loads(text)
        json.dumps(line, ensure_ascii=False).encode()  # half of a character alone cannot be sent or written
    except ValueError as e:
        raise DataError(f"{where}: not JSON ({e})") from None
    if not isinstance(line, dict) or ("prompt" in line) == ("messages" in line):
        raise DataError(f"{where}: a request is an object with either prompt or messages")
    if {"stream", "stream_options", "n"} & line.keys():
        raise DataError(f"{where}: stream, stream_options and n are not for requests to say; one reply is streamed for each")
    body = {"max_tokens": max_tokens} | {k: v for k, v in line.items() if k != "key"}
    if type(body["max_tokens"]) is not int or body["max_tokens"] < 1:
        raise DataError(f"{where}: max_tokens is {body['max_tokens']!r}; it is a whole number from 1 on")
    digest = artifacts.digest(body)
    options = {k: v for k, v in body.items() if k not in ("prompt", "messages", "max_tokens")}
    key = str(line.get("key", digest))
    headers = {"Idempotency-Key": artifacts.digest([key, digest])}
    prompt = line["prompt"] if "prompt" in line else line["messages"]
    request = Request(prompt, body["max_tokens"], options=options, headers=headers)
    return Item(key, request, digest, line)


# --- what was answered -------------------------------------------------------------------------------------------


def answered(results: Path, items: list[Item]) -> dict[str, Row]:
    """{key: its line} of earlier runs. A last line without its end was being written when the run was killed: it is cut off.

    Raises `ArtifactError`, before anything is cut, where a key was asked something else then, and for a file of other things.
    """
    if not results.exists():
        return {}
    *lines, last = results.read_bytes().split(b"\n")
    found: dict[str, Row] = {}
    for number, text in enumerate(lines, 1):
        if text.strip():
            row = _result(text, f"{results}:{number}")
            found[row["key"]] = row  # a later line for a key is a later try
    for item in items:
        if item.key in found and found[item.key]["request"] != item.digest:
            raise ArtifactError(f"key {item.key!r} was asked something else in {results}; give the new request a new key")
    if last:
        _check_cut(last, f"{results}:{len(lines) + 1}")
        with results.open("rb+") as f:
            f.truncate(sum(len(text) + 1 for text in lines))
    return found


def _result(text: bytes, where: str) -> Row:
    """A line of results. Raises `ArtifactError` with its place for anything else."""
    try:
        row = json.loads(text)
    except ValueError as e:
        raise ArtifactError(f"{where} is no line of results: not JSON ({e}); name another file for the results") from None
    lacks = [k for k, kind in HOLDS.items() if not isinstance(row, dict) or not isinstance(row.get(k), kind)]
    if lacks:
        raise ArtifactError(f"{where} is no line of results: no {lacks[0]!r} is there; name another file for the results")
    return dict(row)


def _check_cut(text: bytes, where: str) -> None:
    """Raise `ArtifactError` unless a last line without its end can be a result that was being written."""
    if not text.startswith(OPENING[: len(text)]):
        raise ArtifactError(f"{where} is no line of results that was cut off; name another file for the results")
    try:
        json.loads(text)
    except ValueError:
        return
    _result(text, where)


@contextmanager
def appending(results: Path) -> Iterator[TextIO]:
    """The results' file, for this process alone. Raises `ArtifactError` if another one writes to it."""
    results.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{results}.lock", timeout=0), results.open("a", encoding="utf-8", newline="\n") as f:
            yield f
    except Timeout:
        raise ArtifactError(f"another batch is writing {results}; wait for it, or name another file") from None


def _append(out: TextIO, row: Row) -> None:
    """One line, on disk before the next request is thought of."""
    out.write(json.dumps(artifacts.jsonable(row), ensure_ascii=False, allow_nan=False) + "\n")
    out.flush()
    os.fsync(out.fileno())


# --- asking ------------------------------------------------------------------------------------------------------


def is_safe(answer: Answer) -> bool:
    """Whether a failed request can be sent again: it never arrived, or the server said that it did not take it.

    One that timed out, broke off or failed inside the server may have been computed, and paid for: it is not.
    """
    return answer.row["fault"] == "connect" or (answer.row["fault"] == "http" and answer.row["status"] in REFUSED)


def wait_s(pace: Pace, tried: int, answer: Answer, rng: random.Random) -> float:
    """Seconds before the next try: doubling, each time a random half or more of it, but no less than the server asked for."""
    full = min(pace.first_wait_s * 2.0 ** (tried - 1), pace.longest_wait_s)
    return max(answer.retry_after or 0.0, full * rng.uniform(0.5, 1.0))


class Gate:
    """Lets one through every 1/rate seconds, in order."""

    def __init__(self, rate: float | None, clock: Callable[[], float], sleep: Sleep) -> None:
        self.gap, self.clock, self.sleep = 1 / rate if rate else 0.0, clock, sleep
        self.next = clock()

    async def passed(self) -> None:
        due = max(self.next, self.clock())
        self.next = due + self.gap
        if due > self.clock():
            await self.sleep(due - self.clock())


async def one(
    client: httpx2.AsyncClient, endpoint: Endpoint, item: Item, pace: Pace, gate: Gate, sleep: Sleep, rng: random.Random
) -> Row:
    """Ask for one item, again where that is safe; returns its line of the results."""
    for tried in range(1, pace.tries + 1):
        await gate.passed()
        answer = await ask(client, endpoint, item.request)
        if answer.row["ok"] or not is_safe(answer) or tried == pace.tries:
            break
        if (wait := wait_s(pace, tried, answer, rng)) > pace.longest_wait_s:
            answer.row["error"] += f"; it asks to wait {wait:.0f} s, longer than {pace.longest_wait_s:g}: try it again then"
            break
        await sleep(wait)
    row = answer.row
    kept = ("ok", "fault", "status", "error", "finish", "prompt_tokens", "output_tokens", "counted_by")
    said = {"text": answer.text, "reasoning": answer.reasoning or None} if row["ok"] else {"text": None, "reasoning": None}
    asked = {"key": item.key, "request": item.digest, "model": item.model(endpoint), "tries": tried}
    return asked | said | {k: row[k] for k in kept}


async def run(
    client: httpx2.AsyncClient, endpoint: Endpoint, items: list[Item], pace: Pace, out: TextIO, *,
    clock: Callable[[], float] = time.monotonic, sleep: Sleep = asyncio.sleep, seed: int = 0,
    tick: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Ask for every item, at most `pace.concurrency` at once, and append each result when it is there."""
    waiting, gate, rng = iter(items), Gate(pace.rate, clock, sleep), random.Random(seed)

    async def work() -> None:
        for item in waiting:
            _append(out, await one(client, endpoint, item, pace, gate, sleep, rng))
            tick()

    await together([work() for _ in range(pace.concurrency)])


async def main_async(
    endpoint: Endpoint, items: list[Item], todo: list[Item], found: dict[str, Row], pace: Pace, out: TextIO
) -> None:
    """Ask for `todo`, those of `items` that `found` does not answer. Raises `ArtifactError` if another model answered there."""
    async with connected(endpoint) as client:
        model = probe.chosen(endpoint.model, await probe.models(client, endpoint), endpoint.url)
        endpoint = replace(endpoint, model=model)
        others = sorted({row["model"] for row in found.values()} - {item.model(endpoint) for item in items})
        if others:
            raise ArtifactError(f"{out.name} has answers of {others[0]!r} and this would add {model!r}'s; name another file")
        with cli.progress(len(todo), "batch", "request") as bar:
            await run(client, endpoint, todo, pace, out, tick=bar.update)


def export(results: Path, items: list[Item]) -> tuple[int, Path]:
    """Write the requests that failed, as they were given, beside the results; returns their number and the file."""
    found = answered(results, items)
    failed = [item.line for item in items if item.key in found and not found[item.key]["ok"]]
    path = results.with_suffix(".failed.jsonl")
    artifacts.write_jsonl(path, failed)
    return len(failed), path


def main(
    url: Annotated[str, typer.Argument(help="the server, http://127.0.0.1:8000; the API key comes from QUANTGATE_API_KEY")],
    requests: Annotated[Path, typer.Argument(help="JSONL: key, prompt or messages, max_tokens, ...")],
    results: Annotated[Path, typer.Argument(help="JSONL that results are appended to")],
    model: Annotated[str, typer.Option(help="its name at the server, where there are several")] = "",
    concurrency: Annotated[int, typer.Option(min=1, help="at most so many at once")] = 4,
    rate: Annotated[float, typer.Option(min=0.0, help="at most so many a second; 0: no limit")] = 0.0,
    tries: Annotated[int, typer.Option(min=1, help="for one that was not taken; others are never sent twice")] = 5,
    max_tokens: Annotated[int, typer.Option(min=1, help="where a request does not say")] = 256,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds for a whole reply")] = 120.0,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="ask for failed ones of earlier runs too")] = False,
    key_env: Annotated[str, typer.Option(help="the variable that holds the API key")] = KEY,
) -> None:
    """Ask a server for many replies, each once; exits 1 if any failed."""
    if requests.resolve() == results.resolve():
        raise ParamsError(f"{results} holds the requests; name another file for the results")
    items = read(requests, max_tokens)
    endpoint = Endpoint(address(url, key_env), model, False, timeout, key_from(key_env), key_variable=key_env)
    with appending(results) as out:
        found = answered(results, items)
        todo = [i for i in items if i.key not in found or (retry_failed and not found[i.key]["ok"])]
        if todo:
            asyncio.run(main_async(endpoint, items, todo, found, Pace(concurrency, rate or None, tries), out))
        failed, path = export(results, items)
    told = f"; {failed} failed: {path}" if failed else ""
    cli.say("batch", f"{len(items)} requests, {len(items) - len(todo)} answered before, {len(todo)} asked{told}; {results}")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    cli.run(main)
