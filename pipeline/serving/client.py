"""One request to an OpenAI-compatible endpoint, streamed, and what becomes of it: one timings row.

What is seen from here: a token's time is when its event reached this process, so network and this client's own work are
in every figure, as they are for whoever uses the server. A failed request is a row like any other, with its error.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from typing import Any

import httpx2

from pipeline.core.errors import QuantgateError
from pipeline.serving.events import Event, Parser
from pipeline.serving.reply import Fault, Reply, error_in, message_of, paired

Row = dict[str, Any]
Clock = Callable[[], float]
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
KEY = "QUANTGATE_API_KEY"
CONNECT_S = 10.0
SECONDS = re.compile(r"[0-9]{1,12}(\.[0-9]{0,12})?")
DRAIN_S = 1.0  # a whole reply's stream is read to its close, so that a connection can be used again, for at most this long


class ServerError(QuantgateError):
    """An endpoint that cannot be measured; the message says what to change."""


LENGTH = "max_completion_tokens"  # max_tokens in newer servers of OpenAI's
DISPENSABLE = ("stream_options", "max_tokens", LENGTH, "temperature")  # a server that refuses them may still be measured


@dataclass(frozen=True)
class Endpoint:
    """Where requests go. key: sent as a bearer token, never printed or written; timeout_s: for a whole reply."""

    url: str
    model: str = ""
    chat: bool = False
    timeout_s: float = 120.0
    key: str | None = field(default=None, repr=False)
    count: Callable[[str], int] | None = field(default=None, repr=False)  # tokens of a text, where usage is not sent
    key_variable: str = KEY  # where the key came from, for messages
    refused: frozenset[str] = frozenset()  # fields of a body that the server does not take

    def takes(self, body: Row) -> Row:
        """A body without the fields that the server refuses; max_tokens has a newer name."""
        named = {LENGTH if k == "max_tokens" and k in self.refused else k: v for k, v in body.items()}
        return {k: v for k, v in named.items() if k not in self.refused}

    def clean(self, text: str) -> str:
        """`text` without the key: servers like to repeat what they refuse."""
        return text.replace(self.key, "***") if self.key else text


@dataclass(frozen=True)
class Request:
    """prompt: text, token ids (completions only) or chat messages. forced: end tokens are ignored, and a reply that does
    not have exactly max_tokens has failed. options: further fields of the body."""

    prompt: Prompt
    max_tokens: int
    forced: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A request's row, and what was said."""

    row: Row
    text: str
    reasoning: str
    retry_after: float | None = None


def address(url: str, variable: str = KEY) -> str:
    """An endpoint's address with its `/v1`. Raises `ServerError` for what is no address, or carries a password, with the
    variable that a key belongs into."""
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        parsed = httpx2.URL("")
    named = re.fullmatch(r"[A-Za-z0-9._:%-]+", parsed.host) is not None and (parsed.port is None or 0 < parsed.port < 65536)
    if parsed.scheme not in ("http", "https") or not named or " " in url.strip():
        raise ServerError(f"{url!r} is no address of a server; write it as http://127.0.0.1:8000")
    if parsed.userinfo:
        raise ServerError(f"the address of {parsed.host} carries a password; put the key into {variable} and leave it out there")
    if parsed.query:  # its values may be keys
        raise ServerError(f"the address of {parsed.host} has a query, which no request here carries; give one without")
    bare = re.sub(r"/(chat/completions|completions|models)$", "", str(parsed.copy_with(fragment=None)).rstrip("/"))
    return bare if httpx2.URL(bare).path.strip("/") else f"{bare}/v1"


def key_from(variable: str = KEY) -> str | None:
    """The API key of the environment, or None. Raises `ServerError`, without the value, for what no header can carry:
    the HTTP library's own message would repeat it, escaped, so that `Endpoint.clean` would not know it again."""
    key = os.environ.get(variable, "").strip()  # a line end comes along from files and command substitutions
    if not all("!" <= c <= "~" for c in key):
        raise ServerError(f"the value of {variable} is no API key: it has a space, or what is not printable ASCII; set it anew")
    return key or None


@asynccontextmanager
async def connected(endpoint: Endpoint, transport: httpx2.AsyncBaseTransport | None = None) -> AsyncIterator[httpx2.AsyncClient]:
    """A client with as many connections as are asked for at once; no request waits for another's.

    Over http each request has a connection of its own: that costs one round trip, which its row tells, and none can fall
    on a connection that the server is about to close (llama.cpp's closes after each stream, and a few requests in a
    hundred were lost to that). Over https, where a handshake costs several, connections are kept.
    """
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    is_plain = httpx2.URL(endpoint.url).scheme == "http"
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0 if is_plain else None)
    async with httpx2.AsyncClient(
        headers=headers, limits=limits, timeout=httpx2.Timeout(endpoint.timeout_s, connect=min(CONNECT_S, endpoint.timeout_s)),
        trust_env=not _is_local(endpoint.url), transport=transport,
        verify=not is_plain,  # http has nothing to verify, no redirect is followed, and certificates take long to load
    ) as client:  # fmt: skip
        yield client


def _is_local(url: str) -> bool:
    """Whether an address is this machine's own, which no proxy has a part in."""
    host = httpx2.URL(url).host
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def body_of(endpoint: Endpoint, request: Request) -> tuple[str, Row]:
    """(path, JSON body) of a request: greedy and streamed, unless its options say otherwise."""
    body: Row = {"model": endpoint.model, "max_tokens": request.max_tokens, "temperature": 0.0, "stream": True}
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
    """Ask once. Whatever goes wrong with the request or its reply is in the row (ok, fault, status, error)."""
    reply = Reply(clean=endpoint.clean)
    phases: dict[str, float | None] = {"connected": None, "headers": None}
    t_submit = clock()
    fault = await _heard(client, endpoint, request, reply, phases, clock)
    whole = reply.t_whole()
    t_end = whole if whole is not None and fault is None else clock()
    try:
        row = _row(endpoint, request, reply, t_submit, phases, fault)
    except Exception as e:  # a tokenizer that cannot read the text, for one
        row = _row(endpoint, request, Reply(status=reply.status), t_submit, phases, _transport(e))
    retry_after = fault.retry_after if fault else None
    return Answer(row | {"t_end": t_end}, paired(reply.text), paired(reply.reasoning), retry_after)


async def _heard(
    client: httpx2.AsyncClient, endpoint: Endpoint, request: Request, reply: Reply, phases: dict[str, float | None], clock: Clock
) -> Fault | None:
    """Fill `reply`, whatever the server does; returns what went wrong."""
    try:
        await asyncio.wait_for(_stream(client, endpoint, request, reply, phases, clock), endpoint.timeout_s)
    except Fault as e:
        return e
    except Exception as e:  # whatever a server sends, its request has failed and the run goes on
        if reply.t_whole() is None:  # else the stream was only held open, or dropped
            late = isinstance(e, asyncio.TimeoutError)
            return Fault("timeout", f"no complete reply within {endpoint.timeout_s:g} s") if late else _transport(e)
    return None


async def _stream(
    client: httpx2.AsyncClient, endpoint: Endpoint, request: Request, reply: Reply, phases: dict[str, float | None], clock: Clock
) -> None:
    async def trace(event: str, _: Any) -> None:
        if event == "connection.connect_tcp.complete":
            phases["connected"] = clock()

    path, body = body_of(endpoint, request)
    headers = {"Accept": "text/event-stream", **request.headers}
    async with client.stream("POST", endpoint.url + path, json=body, headers=headers, extensions={"trace": trace}) as response:
        phases["headers"], reply.status = clock(), response.status_code
        await _refuse(response, endpoint)
        events = _events(response)
        async for event in events:
            _take(reply, event, clock())
            if reply.t_whole() is not None:
                break
        reply.check_end()
        await _drain(events, reply, clock)


def _take(reply: Reply, event: Event, now: float) -> None:
    try:
        reply.take(event.data, now, event.kind)
    except RecursionError:
        raise Fault("malformed", "an event is nested too deeply to be read") from None


async def _events(response: httpx2.Response) -> AsyncIterator[Event]:
    parser = Parser()
    async for content in response.aiter_bytes():
        for event in parser.feed(content):
            yield event


async def _drain(events: AsyncIterator[Event], reply: Reply, clock: Clock) -> None:
    """Read what follows a whole reply: [DONE], mostly, and after it nothing. Only an error that the server names before
    [DONE] can still fail it; a stream that is held open or dropped cannot."""

    async def rest() -> None:
        async for event in events:
            if reply.t_done is None:
                _take(reply, event, clock())

    with suppress(asyncio.TimeoutError, httpx2.HTTPError):
        await asyncio.wait_for(rest(), DRAIN_S)


async def _refuse(response: httpx2.Response, endpoint: Endpoint) -> None:
    """Raise `Fault` for an answer that is no stream of events, with the server's own words."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if response.status_code == 200 and kind == "text/event-stream":
        return
    said = _words(response, await response.aread(), endpoint)
    if response.status_code != 200:
        raise Fault("http", f"HTTP {response.status_code}: {said}", _retry_after(response))
    raise Fault("in_band" if said.startswith("error") else "malformed", f"HTTP 200 but no stream of events: {said}")


def _words(response: httpx2.Response, content: bytes, endpoint: Endpoint) -> str:
    """What the server said, cut only when the key is out of it: a part of the key would not be known for what it is."""
    try:
        found = response.json()
        error = error_in(found) if isinstance(found, dict) else None
        if error is not None or (isinstance(found, dict) and (error := found.get("detail"))):
            return endpoint.clean(f"error: {message_of(error)}")[:300]
    except ValueError:
        pass
    return endpoint.clean(" ".join(content.decode(errors="replace").split()))[:300] or "no reason given"


def _retry_after(response: httpx2.Response) -> float | None:
    """Seconds from now that a Retry-After header asks for, as a number or as a date; None where it holds neither."""
    value = response.headers.get("retry-after", "").strip()
    if SECONDS.fullmatch(value):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError, OSError):
        return None


def _transport(error: Exception) -> Fault:
    said = str(error) or type(error).__name__
    if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout)):
        return Fault("connect", f"no connection: {said}")
    if isinstance(error, httpx2.TimeoutException):
        return Fault("timeout", f"{type(error).__name__}: nothing came in time")
    if isinstance(error, (httpx2.ReadError, httpx2.WriteError)):
        return Fault("reset", f"the connection was reset: {said}")
    if isinstance(error, httpx2.RemoteProtocolError):
        return Fault("cut", f"the connection closed early: {said}")
    return Fault("malformed", f"{type(error).__name__}: {said}")


def _row(
    endpoint: Endpoint, request: Request, reply: Reply, t_submit: float, phases: dict[str, float | None], fault: Fault | None
) -> Row:
    """DESIGN's timings row. t_chunks: when each event with a token came; t_tokens: the same where each carried one;
    t_last: the last token, or the reply's end where that one was not seen."""
    tokens, how = reply.output_tokens(endpoint.count) if reply.t_chunks or reply.usage else (None, "no reply")
    sure = how == "usage" or reply.finish != "length"  # a text's tokens, made anew, can be one more or less than were sent
    if fault is None and request.forced and sure and tokens is not None and tokens != request.max_tokens:
        fault = Fault("short", f"asked for {request.max_tokens} tokens, got {tokens}")
    seen = reply.arrivals(tokens)
    return {
        "prompt_tokens": reply.prompt_tokens(), "cached_tokens": reply.cached_tokens(), "output_tokens": tokens,
        "counted_by": how, "asked_tokens": request.max_tokens, "forced": request.forced, "t_submit": t_submit,
        "t_first": seen[0] if seen else None, "t_content": reply.t_content, "t_last": reply.t_last(tokens),
        "t_tokens": seen if tokens == len(seen) else None, "t_chunks": seen, "t_done": reply.t_done,
        "phases": phases, "peak_memory_bytes": None, "finish": reply.finish, "ok": fault is None,
        "fault": fault.kind if fault else None, "status": reply.status,
        "error": paired(endpoint.clean(str(fault))) if fault else None,
    }  # fmt: skip
