"""A server in a thread that imitates real ones and their faults; a request's first word names what it plays."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

from httpx2 import AsyncBaseTransport, AsyncClient

from pipeline.serving.client import Endpoint, connected

T = TypeVar("T")
KEY = "sk-very-secret"
Body = dict[str, Any]


def through(
    endpoint: Endpoint, work: Callable[[AsyncClient, Endpoint], Awaitable[T]], transport: AsyncBaseTransport | None = None
) -> T:
    """Do `work` with a client of the endpoint."""

    async def go() -> T:
        async with connected(endpoint, transport) as client:
            return await work(client, endpoint)

    return asyncio.run(go())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server
    at_work = False

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.json(200, {"object": "list", "data": [{"id": m} for m in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        with self.server.lock:
            self.server.asked.append((self.path, body, dict(self.headers)))
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
            self.at_work = True
        try:
            self.play(str(prompt).split(" ")[0], body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client may give up
        finally:
            self.leave()

    def leave(self) -> None:
        """Stop counting this request, before its last bytes: the client's next request could come first."""
        with self.server.lock:
            self.server.now -= self.at_work
            self.at_work = False

    def play(self, name: str, body: Body) -> None:
        if self.server.locked and self.headers.get("Authorization") != f"Bearer {KEY}":
            self.json(401, {"error": {"message": f"Incorrect API key: {self.headers.get('Authorization')}"}})
            return
        (PLAYS | self.server.plays).get(name, plain)(self, body)

    # --- parts of plays ------------------------------------------------------------------------------------------

    def json(self, status: int, value: Any, **headers: str) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        for k, v in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
            self.send_header(k.replace("_", "-"), v)
        self.end_headers()
        self.leave()
        self.wfile.write(content)

    def start(self, chunked: bool = True) -> None:
        self.chunked = chunked
        self.send_response(200)
        self.send_header("Content-Type", f"text/event-stream; charset={self.server.charset}")
        self.send_header(*(("Transfer-Encoding", "chunked") if chunked else ("Connection", "close")))
        self.end_headers()
        self.close_connection = not chunked

    def raw(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if self.chunked else data)
        self.wfile.flush()

    def event(self, value: Any) -> None:
        self.raw(f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode())

    def text(self, text: str | None, finish: str | None = None, **delta: Any) -> None:
        if self.path.endswith("/chat/completions"):
            said = delta | ({} if text is None else {"content": text})
            self.event({"choices": [{"index": 0, "delta": said, "finish_reason": finish}]})
        else:
            self.event({"choices": [{"index": 0, "text": text or "", "finish_reason": finish}]})

    def usage(self, n: int, cached: int | None = None) -> None:
        details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
        self.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": n, **details}})

    def done(self) -> None:
        self.leave()
        self.event("[DONE]")
        if self.chunked:
            self.wfile.write(b"0\r\n\r\n")

    def reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, Body, dict[str, str]]] = []
        self.plays: dict[str, Callable[[Handler, Body], None]] = {}
        self.models, self.locked, self.now, self.most = ["m"], False, 0, 0
        self.charset = "utf-8"
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, *_: Any) -> None:
        pass  # reset connections are expected


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def plain(h: Handler, body: Body) -> None:
    """max_tokens tokens, one per event, then usage: a correct server."""
    h.start()
    if "messages" in body:
        h.text("", role="assistant")
    for k in range(body["max_tokens"]):
        h.text(f" {k}")
    h.text(None, "length")
    h.usage(body["max_tokens"], cached=0)
    h.done()


def stream(*steps: Any, chunked: bool = True) -> Callable[[Handler, Body], None]:
    """A play of steps: a text, (text, finish), a number of tokens as usage, bytes, an event, or a call with the handler."""

    def play(h: Handler, body: Body) -> None:
        h.start(chunked)
        for step in steps:
            if callable(step):
                step(h)
            elif isinstance(step, (str, tuple)):
                h.text(*([step] if isinstance(step, str) else step))
            else:
                (h.usage if isinstance(step, int) else h.raw if isinstance(step, bytes) else h.event)(step)

    return play


def wait(h: Handler) -> None:
    """Send nothing, for longer than any client waits."""
    threading.Event().wait(3)


def pause(h: Handler) -> None:
    time.sleep(0.05)  # a reset overtakes data in flight


def close(h: Handler) -> None:
    h.close_connection = True


def many(h: Handler, body: Body) -> None:
    """10 events carry 40 tokens."""
    is_silent = str(body["prompt"]).endswith("silent")
    stream(*(f" {k} a b c" for k in range(10)), (None, "length"), *([] if is_silent else [40]), Handler.done)(h, body)


def early(h: Handler, body: Body) -> None:
    """A reply that ends at the length in the prompt, whatever max_tokens says."""
    n = int(str(body["prompt"]).split(" ")[1])
    stream(*(f" {k}" for k in range(n)), (None, "stop"), n, Handler.done)(h, body)


def in_stream(h: Handler, body: Body) -> None:
    """A token, an error as the prompt spells it, and then a normal end."""
    stream(" a", str(body["prompt"]).partition(" ")[2].encode() + b"\n\n", (None, "stop"), 1, Handler.done)(h, body)


def halves(h: Handler, body: Body) -> None:
    """A character in two escaped halves, one per event, and then half of one; usage unless the prompt ends in silent."""
    is_silent = str(body["prompt"]).endswith("silent")
    stream(" \ud83d", "\ude00", "\ud83d", (None, "stop"), *([] if is_silent else [3]), Handler.done)(h, body)


def awkward(h: Handler, _: Body) -> None:
    """What the event-stream format allows: comments, CR LF, a field over several lines, other fields, a character and a
    line end cut in two, several events at once."""
    h.start()
    h.raw(b": ping\r\n\r\n")
    h.raw(b'id: 1\r\nevent: message\r\nretry: 10\r\ndata: {"choices": [{"index": 0,\r\ndata:  "text": "one"}]}\r')
    h.raw(b"\n\r\n")
    word = json.dumps({"choices": [{"index": 0, "text": "zwölf 🚢"}]}, ensure_ascii=False).encode()
    for k in range(0, len(word), 3):
        h.raw((b"data:" if k == 0 else b"") + word[k : k + 3])
    h.raw(b"\n\n" + b'data: {"choices": [{"index": 0, "text": "a"}]}\n\ndata: {"choices": [{"index": 0, "text": "b"}]}\n\n')
    h.raw(b'data: {"choices": [{"index": 0, "text": "\xff\xfe", "finish_reason": "stop"}]}\n\n')
    h.usage(5)
    h.done()


OOM = {"error": {"message": "out of memory", "code": 500}}
LOOSE = (  # what real servers add to a stream: a byte order mark, events without data, pings as text and as JSON
    b'\xef\xbb\xbfdata: {"choices": [{"index": 0, "text": "z"}]}\n\n',
    b"data:\n\nid: 7\n\nretry: 10\n\nevent: ping\ndata: 2026-11-30 12:00\n\nevent: ping\ndata: {}\n\n",
    'data: {"choices": [{"index": 0, "text": "wölf", "finish_reason": "stop"}]}\n\n'.encode(),
)
PLAYS: dict[str, Callable[[Handler, Body], None]] = {
    "many": many, "early": early, "in_stream": in_stream, "halves": halves, "awkward": awkward,
    "one": stream((" yes", "stop"), 1, Handler.done), "loose": stream(*LOOSE, 2, Handler.done),
    # failures
    "in_band": stream(" a", OOM, Handler.done), "aborted": stream((" a", "abort"), Handler.done),
    "late_error": stream((" a", "length"), 1, OOM, Handler.done),
    "cut": stream(" a", " b", close),  # inside a chunked body
    "ended": stream(" a", chunked=False),  # the body has no length, so its close looks like an end
    "reset": stream(" a", pause, Handler.reset), "mute": lambda h, _: h.reset(), "hang": stream(" a", wait, wait),
    "not_json": stream(b"data: <html>bad gateway</html>\n\n"), "odd_shape": stream({"choices": ["text"]}),
    "unavailable": lambda h, _: h.json(503, {"error": {"message": "model is loading"}}, Retry_After="3"),
    "no_stream": lambda h, _: h.json(200, {"error": "streams are switched off"}),
    # complete replies whose stream does not close: with [DONE] and without
    "open_end": stream((" a", "length"), 1, b"data: [DONE]\n\n", wait), "held_open": stream(" a", (None, "length"), 1, wait),
    "dropped": stream((" a", "length"), 1, pause, Handler.reset),
    "behind": stream((" a", "length"), 1, b"data: [DONE]\n\n", OOM, lambda h: h.wfile.write(b"0\r\n\r\n")),
}  # fmt: skip
