"""A server in a thread that plays what real ones do, and do wrong; a request's first word names the play."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-very-secret"
Body = dict[str, Any]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

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
        try:
            self.play(str(prompt).split(" ")[0], body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client gave up, as it may
        finally:
            with self.server.lock:
                self.server.now -= 1

    def play(self, name: str, body: Body) -> None:
        if self.server.locked and self.headers.get("Authorization") != f"Bearer {KEY}":
            self.json(401, {"error": {"message": f"Incorrect API key: {self.headers.get('Authorization')}"}})
            return
        (PLAYS | self.server.plays).get(name, plain)(self, body)

    # --- what plays are made of ----------------------------------------------------------------------------------

    def json(self, status: int, value: Any, **headers: str) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        for k, v in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
            self.send_header(k.replace("_", "-"), v)
        self.end_headers()
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
        pass  # a reset connection is no news here


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


# --- the plays ---------------------------------------------------------------------------------------------------


def plain(h: Handler, body: Body) -> None:
    """max_tokens tokens, one an event, then usage: a server as it should be."""
    h.start()
    if "messages" in body:
        h.text("", role="assistant")
    for k in range(body["max_tokens"]):
        h.text(f" {k}")
    h.text(None, "length")
    h.usage(body["max_tokens"], cached=0)
    h.done()


def many(h: Handler, body: Body) -> None:
    """10 events carry 40 tokens."""
    h.start()
    for k in range(10):
        h.text(f" {k} a b c")
    h.text(None, "length")
    if not str(body["prompt"]).endswith("silent"):
        h.usage(40)
    h.done()


def reasoning(h: Handler, body: Body) -> None:
    field = str(body["messages"][-1]["content"]).split(" ")[1]
    h.start()
    h.text("", role="assistant")
    h.text(None, **{field: "hm"})
    h.text(None, **{field: " so"})
    if not body["messages"][-1]["content"].endswith("only"):
        h.text("yes")
    h.text(None, "stop")
    h.usage(3)
    h.done()


def in_band(h: Handler, _: Body) -> None:
    h.start()
    h.text(" a")
    h.event({"error": {"message": "out of memory", "code": 500}})
    h.done()


def cut(h: Handler, _: Body) -> None:
    """The connection closes inside a chunked body."""
    h.start()
    h.text(" a")
    h.text(" b")
    h.close_connection = True


def ended(h: Handler, _: Body) -> None:
    """The body has no length, so its close looks like an end, and is none."""
    h.start(chunked=False)
    h.text(" a")


def reset(h: Handler, _: Body) -> None:
    h.start()
    h.text(" a")
    time.sleep(0.05)  # a reset overtakes what is still on its way
    h.reset()


def mute(h: Handler, _: Body) -> None:
    h.reset()


def unavailable(h: Handler, _: Body) -> None:
    h.json(503, {"error": {"message": "model is loading"}}, Retry_After="3")


def no_stream(h: Handler, _: Body) -> None:
    h.json(200, {"error": "streams are switched off"})


def hang(h: Handler, _: Body) -> None:
    """Headers and a token, then nothing for longer than anybody waits."""
    h.start()
    h.text(" a")
    h.server_hung = threading.Event()  # type: ignore[attr-defined]
    h.server_hung.wait(5)  # type: ignore[attr-defined]


def one(h: Handler, _: Body) -> None:
    h.start()
    h.text(" yes", "stop")
    h.usage(1)
    h.done()


def early(h: Handler, body: Body) -> None:
    """An end token at a length that depends on the prompt, whatever was asked for."""
    n = int(str(body["prompt"]).split(" ")[1])
    h.start()
    for k in range(n):
        h.text(f" {k}")
    h.text(None, "stop")
    h.usage(n)
    h.done()


def aborted(h: Handler, _: Body) -> None:
    h.start()
    h.text(" a", "abort")
    h.done()


def not_json(h: Handler, _: Body) -> None:
    h.start()
    h.event("<html>bad gateway</html>")


def odd_shape(h: Handler, _: Body) -> None:
    h.start()
    h.event({"choices": ["text"]})


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
    h.raw(b"data: [DONE]\n\n")
    h.wfile.write(b"0\r\n\r\n")


def held_open(h: Handler, _: Body) -> None:
    """A whole reply with its usage, and no [DONE]: the connection stays open."""
    h.start()
    h.text(" a")
    h.text(None, "length")
    h.usage(1)
    threading.Event().wait(3)


def dropped(h: Handler, _: Body) -> None:
    """A whole reply with its usage, and then a reset."""
    h.start()
    h.text(" a", "length")
    h.usage(1)
    time.sleep(0.05)
    h.reset()


def late_error(h: Handler, _: Body) -> None:
    """A whole reply with its usage, and then an error."""
    h.start()
    h.text(" a", "length")
    h.usage(1)
    h.event({"error": {"message": "out of memory"}})
    h.done()


def in_stream(h: Handler, body: Body) -> None:
    """A token, an error as the prompt spells it, and then an end as if nothing had been."""
    h.start()
    h.text(" a")
    h.raw(str(body["prompt"]).partition(" ")[2].encode() + b"\n\n")
    h.text(None, "stop")
    h.usage(1)
    h.done()


def loose(h: Handler, _: Body) -> None:
    """What real servers add to a stream: a byte order mark, events without data, pings in words and in JSON."""
    h.start()
    h.raw(b'\xef\xbb\xbfdata: {"choices": [{"index": 0, "text": "z"}]}\n\n')
    h.raw(b"data:\n\nid: 7\n\nretry: 10\n\nevent: ping\ndata: 2026-11-30 12:00\n\nevent: ping\ndata: {}\n\n")
    h.raw('data: {"choices": [{"index": 0, "text": "wölf", "finish_reason": "stop"}]}\n\n'.encode())
    h.usage(2)
    h.done()


def halves(h: Handler, body: Body) -> None:
    """A character in two escaped halves, an event each, and then half of one; usage unless the prompt ends in silent."""
    h.start()
    for half in (" \ud83d", "\ude00", "\ud83d"):
        h.text(half)
    h.text(None, "stop")
    if not str(body["prompt"]).endswith("silent"):
        h.usage(3)
    h.done()


def open_end(h: Handler, _: Body) -> None:
    """[DONE], and then the connection stays open."""
    h.start()
    h.text(" a", "length")
    h.usage(1)
    h.event("[DONE]")
    threading.Event().wait(3)


PLAYS = {
    "many": many, "reasoning": reasoning, "in_band": in_band, "cut": cut, "ended": ended, "reset": reset, "mute": mute,
    "unavailable": unavailable, "no_stream": no_stream, "hang": hang, "one": one, "early": early, "aborted": aborted,
    "not_json": not_json, "odd_shape": odd_shape, "awkward": awkward, "open_end": open_end,
    "halves": halves, "loose": loose, "in_stream": in_stream,
    "held_open": held_open, "dropped": dropped, "late_error": late_error,
}  # fmt: skip
