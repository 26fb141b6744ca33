"""Send one streamed request to an OpenAI-compatible endpoint; its outcome is one row, a failure too.

A token's time is when its event reached this process: latencies include the network and this client, as for any user.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2

from pipeline.core.errors import QuantgateError
from pipeline.core.records import Exchange, Json
from pipeline.serving.reply import Fault, Reply, error_in, events, message_of, paired, part

Clock = Callable[[], float]
KEY = "QUANTGATE_API_KEY"
CONNECT_S = 10.0
LOCAL = re.compile(r"localhost$|127(\.\d+){3}$|::1$")  # no proxy applies to these hosts
SECONDS = re.compile(r"[0-9]{1,12}(\.[0-9]{0,12})?")
DRAIN_S = 1.0  # the longest wait for a complete reply's stream to close, so that the connection can be reused
SHOWN = 300  # characters of a server's message
LENGTH = "max_completion_tokens"  # OpenAI's newer name for max_tokens
DISPENSABLE = ("stream_options", "max_tokens", LENGTH, "temperature")  # fields that a server may refuse and still be measured


class ServerError(QuantgateError):
    """An endpoint cannot be measured; the message says what to change."""


@dataclass(frozen=True)
class Endpoint:
    """Where requests go. key: the bearer token, never printed or written; timeout_s: for a whole reply; count: tokens of a text,
    for servers without usage; key_variable: the environment variable with the key; refused: fields that the server rejects."""

    url: str
    model: str = ""
    chat: bool = False
    timeout_s: float = 120.0
    key: str | None = field(default=None, repr=False)
    count: Callable[[str], int] | None = field(default=None, repr=False)
    key_variable: str = KEY
    refused: frozenset[str] = frozenset()

    def takes(self, body: Json) -> Json:
        """`body` without refused fields; a refused max_tokens gets its newer name."""
        renamed = {LENGTH if k == "max_tokens" and k in self.refused else k: v for k, v in body.items()}
        return {k: v for k, v in renamed.items() if k not in self.refused}

    def clean(self, text: str) -> str:
        """`text` without the key: servers quote what they refuse."""
        return text.replace(self.key, "***") if self.key else text


@dataclass(frozen=True)
class Request:
    """prompt: text, token ids (completions only) or chat messages. forced: ignore end tokens; a reply of any other length than
    max_tokens fails. options: further fields of the body."""

    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]
    max_tokens: int
    forced: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    row: Exchange
    text: str
    reasoning: str
    retry_after: float | None = None


def address(url: str, variable: str = KEY) -> str:
    """Return a server's URL with its `/v1`. Raises `ServerError` if it is invalid, or has a query or a password; the password
    belongs into `variable`."""
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        parsed = httpx2.URL("")
    is_host = re.fullmatch(r"[A-Za-z0-9._:%-]+", parsed.host) is not None and (parsed.port is None or 0 < parsed.port < 65536)
    if parsed.scheme not in ("http", "https") or not is_host or " " in url.strip():
        raise ServerError(f"invalid server URL {url!r}; write it as http://127.0.0.1:8000")
    if parsed.userinfo:
        raise ServerError(f"the URL of {parsed.host} contains a password; remove it and put the key into {variable}")
    if parsed.query:  # its values may be keys
        raise ServerError(f"the URL of {parsed.host} has a query, which requests do not carry; remove it")
    bare = re.sub(r"/(chat/completions|completions|models)$", "", str(parsed.copy_with(fragment=None)).rstrip("/"))
    return bare if httpx2.URL(bare).path.strip("/") else f"{bare}/v1"


def key_from(variable: str = KEY) -> str | None:
    """Return the API key from the environment, or None. Raises `ServerError` for a key that no header can carry: the HTTP library
    would quote it, escaped, so that `Endpoint.clean` could not remove it."""
    key = os.environ.get(variable, "").strip()  # files and command substitutions add a newline
    if not all("!" <= c <= "~" for c in key):
        raise ServerError(f"{variable} is not a valid API key: it contains a space or a character that is not printable ASCII")
    return key or None


@asynccontextmanager
async def connected(endpoint: Endpoint, transport: httpx2.AsyncBaseTransport | None = None) -> AsyncIterator[httpx2.AsyncClient]:
    """Open a client without a limit on connections. Over https it reuses them. Over http each request opens its own, at the cost of
    a round trip: llama.cpp's server closes a connection after each stream, and on reused ones a few percent of requests failed."""
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    is_plain = httpx2.URL(endpoint.url).scheme == "http"
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0 if is_plain else None)
    async with httpx2.AsyncClient(
        headers=headers, limits=limits, timeout=httpx2.Timeout(endpoint.timeout_s, connect=min(CONNECT_S, endpoint.timeout_s)),
        trust_env=not LOCAL.match(httpx2.URL(endpoint.url).host), transport=transport,
        verify=not is_plain,  # loading certificates is slow, and http without redirects needs none
    ) as client:  # fmt: skip
        yield client


def body_of(endpoint: Endpoint, request: Request) -> tuple[str, Json]:
    """Return (path, JSON body) of a request: greedy and streamed unless its options differ."""
    body: Json = {"model": endpoint.model, "max_tokens": request.max_tokens, "temperature": 0.0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if request.forced:
        body |= {"ignore_eos": True, "min_tokens": request.max_tokens}
    prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
    is_chat = isinstance(prompt, list) and all(isinstance(m, Mapping) for m in prompt)
    if is_chat or endpoint.chat:
        messages = prompt if is_chat else [{"role": "user", "content": prompt}]
        return "/chat/completions", endpoint.takes(body | {"messages": messages} | dict(request.options))
    return "/completions", endpoint.takes(body | {"prompt": prompt} | dict(request.options))


async def ask(client: httpx2.AsyncClient, endpoint: Endpoint, request: Request, *, clock: Clock = time.monotonic) -> Answer:
    """Send the request once. If it fails, its row says how (ok, fault, status, error)."""
    reply, fault, t_submit = Reply(clean=endpoint.clean), None, clock()
    try:
        await asyncio.wait_for(_stream(client, endpoint, request, reply, clock), endpoint.timeout_s)
    except Fault as e:
        fault = e
    except Exception as e:  # nothing that a server sends may end the run
        if reply.t_whole() is None:  # otherwise the reply is complete and only the stream's close was late or missing
            is_late = isinstance(e, asyncio.TimeoutError)
            fault = Fault("timeout", f"no complete reply within {endpoint.timeout_s:g} s") if is_late else _transport(e)
    whole = reply.t_whole()
    t_end = whole if whole is not None and fault is None else clock()
    try:
        row = row_of(endpoint, request, reply, t_submit, t_end, fault)
    except Exception as e:  # such as a tokenizer that cannot read the text
        row = row_of(endpoint, request, Reply(reply.status, reply.phases), t_submit, t_end, _transport(e))
    return Answer(row, paired(reply.text), paired(reply.reasoning), fault.retry_after if fault else None)


async def _stream(client: httpx2.AsyncClient, endpoint: Endpoint, request: Request, reply: Reply, clock: Clock) -> None:
    async def trace(event: str, _: Any) -> None:
        if event == "connection.connect_tcp.complete":
            reply.phases["connected"] = clock()

    path, body = body_of(endpoint, request)
    headers = {"Accept": "text/event-stream", **request.headers}
    async with client.stream("POST", endpoint.url + path, json=body, headers=headers, extensions={"trace": trace}) as response:
        reply.phases["headers"], reply.status = clock(), response.status_code
        await _refuse(response, endpoint)
        coming = events(response.aiter_bytes())
        async for event in coming:
            reply.take(event, clock())
            if reply.t_whole() is not None:
                break
        reply.check_end()

        async def drain() -> None:
            async for event in coming:
                if reply.t_done is None:
                    reply.take(event, clock())

        # [DONE] usually follows a complete reply; only an error before it can still fail the reply.
        with suppress(asyncio.TimeoutError, httpx2.HTTPError):
            await asyncio.wait_for(drain(), DRAIN_S)


async def _refuse(response: httpx2.Response, endpoint: Endpoint) -> None:
    """Raise `Fault`, with the server's message, for a reply that is not a stream of events."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if response.status_code == 200 and kind == "text/event-stream":
        return
    content = await response.aread()
    try:
        reply = response.json()
    except ValueError:
        reply = None
    if (error := error_in(reply)) is None:
        error = part(reply, "detail") or None
    message = f"error: {message_of(error)}" if error is not None else " ".join(content.decode(errors="replace").split())
    message = endpoint.clean(message)[:SHOWN] or "no reason given"  # shorten last: `clean` cannot recognize part of a key
    if response.status_code != 200:
        wait = response.headers.get("retry-after", "").strip()  # a date, its other form, is not read
        raise Fault("http", f"HTTP {response.status_code}: {message}", float(wait) if SECONDS.fullmatch(wait) else None)
    raise Fault("in_band" if message.startswith("error") else "malformed", f"HTTP 200 but no stream of events: {message}")


def refused_fields(row: Exchange) -> frozenset[str]:
    """The dispensable field that a refusal names first; those it names later are advice."""
    error = row["error"] if row["status"] in (400, 422) else None
    return frozenset(re.findall(rf"\b({'|'.join(DISPENSABLE)})\b", error or "")[:1])


def unsent(request: Request, now: float, why: str) -> Exchange:
    """The row of a request that was not sent."""
    return row_of(Endpoint(""), request, Reply(), now, now, Fault("unsent", why))


def _transport(error: Exception) -> Fault:
    message = str(error) or type(error).__name__
    if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout)):
        return Fault("connect", f"no connection: {message}")
    if isinstance(error, httpx2.TimeoutException):
        return Fault("timeout", f"{type(error).__name__}: nothing came in time")
    if isinstance(error, (httpx2.ReadError, httpx2.WriteError)):
        return Fault("reset", f"the connection was reset: {message}")
    if isinstance(error, httpx2.RemoteProtocolError):
        return Fault("cut", f"the connection closed early: {message}")
    return Fault("malformed", f"{type(error).__name__}: {message}")


def row_of(endpoint: Endpoint, request: Request, reply: Reply, t_submit: float, t_end: float, fault: Fault | None) -> Exchange:
    tokens, how = reply.output_tokens(endpoint.count) if reply.t_chunks or reply.usage else (None, "no reply")
    is_exact = how == "usage" or reply.finish != "length"  # tokenizing a generated text again can give another number of tokens
    if fault is None and request.forced and is_exact and tokens is not None and tokens != request.max_tokens:
        fault = Fault("short", f"asked for {request.max_tokens} tokens, got {tokens}")
    seen = reply.arrivals(tokens)
    return {
        "prompt_tokens": reply.used("prompt_tokens"), "cached_tokens": reply.used("prompt_tokens_details", "cached_tokens"),
        "output_tokens": tokens, "counted_by": how, "asked_tokens": request.max_tokens, "forced": request.forced,
        "t_submit": t_submit, "t_first": seen[0] if seen else None, "t_content": reply.t_content, "t_last": reply.t_last(tokens),
        "t_tokens": seen if tokens == len(seen) else None, "t_chunks": seen, "t_done": reply.t_done,
        "phases": reply.phases, "peak_memory_bytes": None, "finish": reply.finish, "ok": fault is None,
        "fault": fault.kind if fault else None, "status": reply.status,
        "error": paired(endpoint.clean(str(fault))) if fault else None, "t_end": t_end,
        **({"said": reply.said} if reply.said else {}),  # type: ignore[typeddict-item]
    }  # fmt: skip
