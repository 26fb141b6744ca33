"""One streamed request becomes one row, whatever the server does; what an endpoint lacks is named and recorded."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from pipeline.core import artifacts, cli, quiet
from pipeline.core.errors import DataError, ParamsError
from pipeline.core.params import Prefix
from pipeline.engines._forest import common_prefix
from pipeline.metrics import serving as figures
from pipeline.metrics.serving import tipped
from pipeline.serving import client, measure
from pipeline.serving.client import Answer, Endpoint, Request, ServerError
from pipeline.serving.reply import Event, Fault, Reply, events, said_in
from tests import serving_server
from tests.serving_server import KEY, Body, Handler, Server, through
from tools import serve_url as command

Script = list[tuple[float, Any]]  # seconds and events


def asked(endpoint: Endpoint, request: Request) -> Answer:
    return through(endpoint, lambda c, e: client.ask(c, e, request))


def ask(server: Server, prompt: Any, n: int = 4, forced: bool = False, **more: Any) -> Answer:
    return asked(Endpoint(server.url, "m", **more), Request(prompt, n, forced=forced))


def words(text: str) -> int:
    """Count as a tokenizer does, which rejects half a character."""
    return len(text.encode().split())


# --- times, by a fake clock ----------------------------------------------------------------------------------------


def timed(script: Script, *, t_headers: float = 0.0, error: Exception | None = None, **more: Any) -> dict[str, Any]:
    """The row of a reply whose events come at given seconds, on a fake network and clock; error: what ends it."""
    now = [0.0]

    class Stream(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for at, value in script:
                now[0] = at
                yield f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
            if error:
                raise error

    def reply(_: httpx2.Request) -> httpx2.Response:
        now[0] = t_headers
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=Stream())

    endpoint = Endpoint("http://127.0.0.1:1/v1", "m", chat=True, **more)
    answer = through(
        endpoint, lambda c, e: client.ask(c, e, Request("hello", 8), clock=lambda: now[0]), httpx2.MockTransport(reply)
    )  # fmt: skip
    return dict(answer.row)


def whole(script: Script, n: Any, **more: Any) -> dict[str, Any]:
    """The row of a script that ends in usage and [DONE]."""
    end = script[-1][0] + 0.1
    return timed([*script, (end, usage(n)), (end, "[DONE]")], **more)


def said(text: str | None = None, **delta: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta | ({} if text is None else {"content": text})}]}


def usage(n: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": n}}


def ended(text: str = "") -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "length"}]}


EIGHT = [(0.1 * k, said("x")) for k in (1, 2, 4, 5, 6, 7, 8)]  # llama.cpp's: the third of eight tokens completes no character


@pytest.mark.parametrize("script, n, t_headers, ttft, tpot, e2e, timed_tokens", [
    # role and usage are not tokens; the reply ends with the last token
    ([(0.05, said("", role="assistant")), *((0.30 + 0.05 * k, said("x")) for k in range(21))], 21, 0.04, 0.30, 0.05, 1.30, 21),
    # usage counts tokens, not events; the four tokens of an event have no times
    ([(0.2 + 0.2 * k, said("a b c d")) for k in range(10)], 40, 0.0, 0.2, 1.8 / 39, 2.0, 0),
    # slow headers; one token, or all at once, have no time per token
    ([(3.5, said("x"))], 1, 3.0, 3.5, None, 3.5, 1), ([(0.5, said("a b c"))], 3, 0.0, 0.5, None, 0.5, 0),
    # a buffered token came with its empty event; with more empty events than tokens, none counts
    ([(0.05, said("", role="assistant")), *((0.1 * k, said(t)) for k, t in enumerate(["", "", "x", "", "y"], 1)), (0.6, ended())],
     5, 0.0, 0.1, 0.1, 0.5, 5),
    ([(0.1, said("")), (0.3, said("x")), (0.4, said("y")), (0.5, ended())], 2, 0.0, 0.3, 0.1, 0.4, 2),
    # an unseen last token came no later than the reply's end; that end is not used if every token was seen
    ([*EIGHT, (0.9, ended())], 9, 0.0, 0.1, 0.1, 0.9, 0), ([*EIGHT, (0.9, ended())], 7, 0.0, 0.1, 0.7 / 6, 0.8, 7),
    ([*EIGHT, (0.9, ended("x"))], 8, 0.0, 0.1, 0.8 / 7, 0.9, 8),
])  # fmt: skip
def test_times_are_those_of_the_tokens(
    script: Script, n: int, t_headers: float, ttft: float, tpot: float | None, e2e: float, timed_tokens: int
) -> None:
    row: Any = whole(script, n, t_headers=t_headers)
    assert figures.ttft(row) == pytest.approx(ttft) and figures.e2e(row) == pytest.approx(e2e)
    assert figures.tpot(row) == (None if tpot is None else pytest.approx(tpot)) and len(row["t_tokens"] or ()) == timed_tokens
    assert row["output_tokens"] == n and row["counted_by"] == "usage" and row["prompt_tokens"] == 5
    assert row["phases"]["headers"] == t_headers and row["t_done"] == pytest.approx(script[-1][0] + 0.1)


def test_a_usage_in_every_event_counts_once_and_one_before_the_last_text_not_at_all() -> None:
    row = timed([*((0.1 * k, said("x") | {"usage": {"completion_tokens": k}}) for k in (1, 2, 3)), (0.4, "[DONE]")])
    assert row["output_tokens"] == 3 and row["t_tokens"] == pytest.approx([0.1, 0.2, 0.3])
    early = [(0.1, said("a")), (0.2, said("b")), (0.3, usage(2)), (0.4, said("c") | {"usage": None}), (0.5, "[DONE]")]
    row = timed(early)
    assert row["ok"] and row["output_tokens"] is None and "after the last text" in row["counted_by"]
    assert whole(early[:-1], 3)["counted_by"] == "usage"
    counted = timed(early, count=len)
    assert counted["output_tokens"] == 3 and counted["counted_by"].startswith("tokenizer") and "after" in counted["counted_by"]


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "2", None, 10**400])
def test_an_impossible_usage_is_not_believed(n: Any) -> None:
    row = whole([(0.1, said("a")), (0.2, said("b"))], n)
    assert row["ok"] and row["output_tokens"] is None and "no usage that counts" in row["counted_by"]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_the_first_token_and_content_is_timed_apart(field: str) -> None:
    thought = (0.2, said(None, **{field: "hm"}))
    row: Any = whole([thought, (2.0, said("yes"))], 2)
    assert figures.ttft(row) == pytest.approx(0.2) and figures.ttfc(row) == pytest.approx(2.0)
    assert whole([thought], 1)["t_content"] is None


@pytest.mark.parametrize("first, last", [(ended(), usage(1)), (usage(1), ended())])
def test_without_done_a_reply_is_complete_once_its_finish_and_its_usage_are_there(first: Any, last: Any) -> None:
    row = timed([(0.3, said("a")), (1.0, first), (1.5, last)])
    assert row["ok"] and row["t_done"] is None and row["t_end"] == 1.5


@pytest.mark.parametrize("error", [OSError("gone"), httpx2.StreamClosed(), ZeroDivisionError("x")])
def test_whatever_breaks_while_a_reply_is_read_is_that_request_s_row(error: Exception) -> None:
    row = timed([(0.1, said("x"))], error=error)
    assert not row["ok"] and type(error).__name__ in row["error"] and len(row["t_chunks"]) == 1


# --- a live server -------------------------------------------------------------------------------------------------


def test_a_reply_is_a_row_with_its_times_in_order(server: Server) -> None:
    answer = ask(server, "plain words", 6, forced=True)
    row: Any = answer.row
    assert row["ok"] and row["output_tokens"] == 6 and answer.text == " 0 1 2 3 4 5" and row["finish"] == "length"
    times = [row["t_submit"], row["phases"]["connected"], row["phases"]["headers"], *row["t_tokens"], row["t_done"]]
    assert times == sorted(times) and row["t_first"] == row["t_tokens"][0] and row["cached_tokens"] == 0
    path, body, _ = server.asked[0]
    assert path == "/v1/completions" and body["ignore_eos"] and body["min_tokens"] == body["max_tokens"] == 6
    assert body["stream"] and body["stream_options"] == {"include_usage": True} and body["temperature"] == 0


def test_without_usage_the_joined_text_is_tokenized_or_nothing_is_claimed(server: Server) -> None:
    def broken(text: str) -> int:
        raise TypeError("TextInputSequence must be str")

    row: Any = ask(server, "many silent", count=words).row
    assert row["output_tokens"] == 40 and "tokenizer" in row["counted_by"] and "no usage" in row["counted_by"]
    row = ask(server, "many silent").row
    assert row["ok"] and row["output_tokens"] is None and "not counted" in row["counted_by"]
    row = ask(server, "many silent", count=broken).row
    assert not row["ok"] and row["fault"] == "malformed" and row["status"] == 200 and "TextInputSequence" in row["error"]


@pytest.mark.parametrize("play, fault, message", [
    ("in_band", "in_band", "out of memory"), ("aborted", "in_band", "abort"), ("no_stream", "in_band", "switched off"),
    ("cut", "cut", "closed early"), ("ended", "cut", "without its end, after 1 chunk"), ("reset", "reset", "reset"),
    ("mute", "reset", "reset"), ("unavailable", "http", "HTTP 503: error: model is loading"),
    ("not_json", "malformed", "bad gateway"), ("odd_shape", "malformed", "not a completion chunk"),
    ("late_error", "in_band", "out of memory"), ("hang", "timeout", "0.6 s"), ("away", "connect", "no connection"),
])  # fmt: skip
def test_every_way_to_fail_is_a_row_with_its_reason(server: Server, play: str, fault: str, message: str) -> None:
    url = "http://127.0.0.1:9/v1" if play == "away" else server.url
    answer = asked(Endpoint(url, "m", timeout_s=0.6 if play == "hang" else 60), Request(play, 4))
    row: Any = answer.row
    assert not row["ok"] and row["fault"] == fault and message in row["error"]
    assert row["status"] == {"unavailable": 503, "mute": None, "away": None}.get(play, 200)
    assert len(row["t_chunks"]) == {"hang": 1, "away": 0}.get(play, len(row["t_chunks"]))
    assert answer.retry_after == (3.0 if play == "unavailable" else None)


@pytest.mark.parametrize("event", [
    'event: error\ndata: {"message": "oom", "code": 500}', "event: error\ndata: oom",
    'event: error\ndata: {"error": {"message": "oom"}}', 'event: completion.error\ndata: "oom"',
    'data: {"object": "error", "message": "oom", "code": 400}', 'data: {"type": "error", "error": {"message": "oom"}}',
    'error: {"code": 500, "message": "oom"}', 'data: {"error": "oom"}', 'data: {"error": {}}',
    'data: {"choices": [{"index": 0, "text": "", "error": {"message": "oom"}}]}', 'data: {"choices": [], "error": {"code": "oom"}}',
])  # fmt: skip
def test_an_error_inside_a_stream_fails_it_whatever_came_before_and_comes_after(server: Server, event: str) -> None:
    row: Any = ask(server, f"in_stream {event}").row
    assert not row["ok"] and row["fault"] == "in_band" and ("oom" in row["error"]) == ("oom" in event) and len(row["t_chunks"]) == 1
    assert ask(server, 'in_stream data: {"error": null, "choices": []}').row["ok"]


@pytest.mark.parametrize("play, drain", [
    ("behind", 0.2), ("open_end", 0.2), ("held_open", 0.2), ("held_open", 30.0), ("dropped", 30.0),
])  # fmt: skip
def test_what_follows_a_complete_reply_cannot_fail_it(
    server: Server, monkeypatch: pytest.MonkeyPatch, play: str, drain: float
) -> None:
    monkeypatch.setattr(client, "DRAIN_S", drain)
    row: Any = ask(server, play, 1, forced=True, timeout_s=1.5 if drain > 1 else 30).row
    assert row["ok"] and row["output_tokens"] == 1 and row["t_end"] >= row["t_last"]
    assert row["t_end"] == row["t_done"] if play in ("behind", "open_end") else row["t_done"] is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_proxy_is_used_on_this_machine(server: Server, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    for name, value in {"HTTP_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setenv(name.lower(), value)
    row = asked(Endpoint(server.url.replace("127.0.0.1", host), "m"), Request("plain", 2)).row
    assert row["ok"], row["error"]


@pytest.mark.parametrize("play, charset, text, n", [
    ("awkward", "utf-8", "onezwölf 🚢ab\ufffd\ufffd", 5), ("loose", "utf-8", "zwölf", 2), ("loose", "iso-8859-1", "zwölf", 2),
    ("loose", "no-such-thing", "zwölf", 2),
])  # fmt: skip
def test_all_that_an_event_stream_may_hold_is_read_and_what_servers_add_is_no_token(
    server: Server, play: str, charset: str, text: str, n: int
) -> None:
    server.charset = charset
    answer = ask(server, play)
    assert answer.row["ok"], answer.row["error"]
    assert answer.text == text and answer.row["output_tokens"] == n == len(answer.row["t_chunks"])


def read(*pieces: str) -> list[tuple[str, str]]:
    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece.encode()

    async def go() -> list[tuple[str, str]]:
        return [(e.kind, e.data) async for e in events(stream())]

    return asyncio.run(go())


def test_lines_end_as_the_standard_says_wherever_the_stream_is_cut_and_an_endless_event_is_given_up() -> None:
    for end in ("\n", "\r", "\r\n"):
        text = end.join(["event: a", "data: 1", "data:2", "", ": no", "data: x\u2028y", "", ""])
        assert read(text) == read(*text) == [("a", "1\n2"), ("message", "x\u2028y")], repr(end)
    assert read("data: 1\r", "data: 2\r", "\r") == [("message", "1\n2")] and read("data: 1\n\ndata: 2\n") == [("message", "1")]
    for piece in ("data: x", "data: x\n"):
        with pytest.raises(Fault, match="more than"):
            read(piece.replace("x", "x" * 2**19), piece.replace("x", "x" * 2**19), piece)


def test_a_character_in_halves_is_joined_and_a_lone_half_is_marked(server: Server) -> None:
    for play in ("halves", "halves silent"):
        answer = ask(server, play, count=words)
        assert answer.row["ok"] and answer.text == " 😀\ufffd" and json.dumps(answer.row, ensure_ascii=False).encode()
    assert answer.row["output_tokens"] == 1
    server.plays = {"half": lambda h, _: h.json(400, {"error": "no \ud83d"})}
    assert ask(server, "half").row["error"] == "HTTP 400: error: no \ufffd"


def test_a_forced_reply_of_another_length_has_failed_and_a_free_one_has_not(server: Server) -> None:
    row = ask(server, "early 3", 8, forced=True).row
    assert not row["ok"] and row["fault"] == "short" and row["error"] == "asked for 8 tokens, got 3"
    assert ask(server, "early 3", 2, forced=True).row["error"] == "asked for 2 tokens, got 3"
    assert ask(server, "early 3", 8).row["ok"]
    server.plays = {how: serving_server.stream(" a b c", (None, how), Handler.done) for how in ("length", "stop")}
    row = ask(server, "length", 4, forced=True, count=words).row
    assert row["ok"] and row["output_tokens"] == 3, "a text tokenized again may differ by a token"
    assert ask(server, "stop", 4, forced=True, count=words).row["error"] == "asked for 4 tokens, got 3"
    assert ask(server, "length", 4, forced=True).row["output_tokens"] is None


# --- URLs and keys -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url, completed", [
    ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"), ("http://h:1/v1/", "http://h:1/v1"), ("https://h/api#x", "https://h/api"),
    ("https://api.example.org/v1", "https://api.example.org/v1"), ("http://[::1]:81", "http://[::1]:81/v1"),
    ("http://my-host_1:9", "http://my-host_1:9/v1"), ("http://h/v1/chat/completions", "http://h/v1"),
    ("http://h/completions/", "http://h/v1"), ("http://h/a/v1/models", "http://h/a/v1"),
])  # fmt: skip
def test_a_url_gets_what_it_lacks(url: str, completed: str) -> None:
    assert client.address(url) == completed


@pytest.mark.parametrize("url, message", [
    *((url, "invalid server URL") for url in (
        "localhost:8000", "", "ftp://h", "http://", "http://[::1", "http://a b:80", "http://h:99999", "http://h:0", "h:80")),
    ("http://me:hunter2@h/v1", "put the key into OTHER_KEY"), ("https://h/v1?api_key=hunter2", "the URL of h has a query"),
])  # fmt: skip
def test_an_invalid_url_or_one_with_a_password_is_refused_and_no_password_repeated(url: str, message: str) -> None:
    with pytest.raises(ServerError, match=message) as e:
        client.address(url, "OTHER_KEY")
    assert "hunter2" not in str(e.value)


def test_the_key_is_sent_and_appears_nowhere_else(server: Server) -> None:
    server.locked = True
    assert ask(server, "plain", key=KEY).row["ok"]
    server.plays = {"tell": lambda h, _: h.json(400, {"error": {"message": f"bad request with {h.headers['Authorization']}"}})}
    row: Any = ask(server, "tell", key=KEY).row
    assert row["status"] == 400 and "bad request with Bearer ***" in row["error"]
    assert KEY not in json.dumps(row) and KEY not in repr(Endpoint(server.url, "m", key=KEY))


def test_a_key_is_read_without_white_space_and_one_that_no_header_can_carry_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for around in ("{}\r", "{}\n", "{} ", "\t{}\r\n"):
        for value, key in ((KEY, KEY), ("", None)):
            monkeypatch.setenv("OTHER_KEY", around.format(value))
            assert client.key_from("OTHER_KEY") == key
    for value in (f"{KEY} b", f"{KEY}\nb", f"{KEY}ü", f"{KEY}\x7f", f"{KEY}\udcff"):
        monkeypatch.setenv("OTHER_KEY", value)
        with pytest.raises(ServerError, match="OTHER_KEY") as e:
            client.key_from("OTHER_KEY")
        assert KEY not in str(e.value) and len(str(e.value).splitlines()) == 1


def long(h: Handler, body: Body) -> None:
    """Put the key across the place where a message is cut."""
    _, n, kind = str(body["prompt"]).split(" ")
    message = "x" * int(n) + h.headers["Authorization"].removeprefix("Bearer ")
    if kind == "json":
        h.json(400, {"error": {"message": message}})
    elif kind == "text":
        h.send_response(502)
        h.send_header("Content-Length", str(len(message)))
        h.end_headers()
        h.wfile.write(message.encode())
    else:
        h.start()
        h.event(message)


@pytest.mark.parametrize("kind, end", [("json", 300 - len("error: ")), ("text", 300), ("event", 80)])
def test_no_part_of_the_key_is_left_where_a_message_is_cut(server: Server, kind: str, end: int) -> None:
    server.plays = {"long": long}
    for n in range(end - len(KEY), end):
        error: Any = ask(server, f"long {n} {kind}", key=KEY).row["error"]
        assert "x" * n + "*" in error and "sk" not in error and "s'" not in error and not error.endswith("s"), (n, error)


def unreachable(request: httpx2.Request) -> httpx2.Response:
    raise httpx2.ConnectError(f"refused {request.headers['Authorization']}")


@pytest.mark.parametrize("key, reply, message", [
    (KEY, unreachable, r"no server answers at .*refused Bearer \*\*\*"),
    (KEY, lambda _: httpx2.Response(401), "refuses this API key; set OTHER_KEY to the right one$"),
    (None, lambda _: httpx2.Response(401), "requires an API key; set OTHER_KEY to the right one$"),
])  # fmt: skip
def test_a_server_that_is_away_or_needs_another_key_is_one_line_without_the_key(key: str | None, reply: Any, message: str) -> None:
    endpoint = Endpoint("http://127.0.0.1:1/v1", key=key, key_variable="OTHER_KEY")
    with pytest.raises(ServerError, match=message) as e:
        through(endpoint, measure.named, httpx2.MockTransport(reply))
    assert KEY not in str(e.value)


# --- probe ---------------------------------------------------------------------------------------------------------


def probed(server: Server, **more: Any) -> dict[str, Any]:
    return dict(through(Endpoint(server.url, **more), measure.probe)[1])


def capable(h: Handler, body: Body) -> None:
    """A server that can do everything; its replies end by themselves unless ignore_eos is set."""
    n = body["max_tokens"] if body.get("ignore_eos") or body["max_tokens"] < 20 else 5
    h.start()
    for k in range(n):
        h.text(f" {k}")
    h.text(None, "length" if n == body["max_tokens"] else "stop")
    h.usage(n, cached=8 if body["max_tokens"] == 1 else 0)
    h.done()


def always(play: Any) -> dict[str, Any]:
    """Plays for every request of the probe."""
    return {"The": play, "Answer": play}


def test_a_probe_finds_what_a_server_can(server: Server) -> None:
    server.plays = always(capable)
    can: Any = probed(server)
    for name in ("stream_usage", "one_token_an_event", "ignore_eos"):
        assert can[name]["value"] is True, name
    assert can["model"] == "m" and command.lacking(can) == []


REFUSALS = {
    "OpenAI": "Unsupported parameter: '{}' is not supported with this model. Use 'max_completion_tokens' instead.",
    "pydantic": [{"type": "extra_forbidden", "loc": ["body", "{}"], "msg": "Extra inputs are not permitted"}],
    "plain": "Unknown argument {}",
}


@pytest.mark.parametrize("style", list(REFUSALS))
@pytest.mark.parametrize("refused", [
    ["stream_options"], ["max_tokens"], ["temperature"], ["stream_options", "temperature"], ["max_tokens", "max_completion_tokens"],
])  # fmt: skip
def test_a_server_that_refuses_a_field_is_asked_again_without_it(refused: list[str], style: str, server: Server) -> None:
    def picky(h: Handler, body: Body) -> None:
        for field in refused:
            if field in body:
                detail = json.loads(json.dumps(REFUSALS[style]).replace("{}", field, 1))
                h.json(422 if style == "pydantic" else 400, {"detail" if style == "pydantic" else "error": detail})
                return
        capable(h, {"max_tokens": body.get("max_completion_tokens", 16)} | body)

    server.plays = always(picky)
    can = probed(server)
    assert can["one_token_an_event"]["value"]
    assert can["all_fields"]["reason"] == f"requests go without {', '.join(sorted(refused))}, which it refuses"


def test_a_probe_says_what_a_server_lacks_and_what_is_unknown(server: Server) -> None:
    def poor(h: Handler, body: Body) -> None:
        if body.get("ignore_eos"):
            h.json(400, {"detail": "extra fields not permitted: ignore_eos"})
            return
        h.start()
        h.text(f" {len(h.server.asked)}", "stop")  # a different text each time
        h.done()

    can: Any = probed(server)  # `plain` always sends max_tokens tokens
    assert can["ignore_eos"]["value"] is None
    assert "ignore_eos: unknown: " in " ".join(command.lacking(can))
    server.plays = always(poor)
    can = probed(server)
    assert can["ignore_eos"] == {"value": False, "reason": "HTTP 400: error: extra fields not permitted: ignore_eos"}
    assert can["stream_usage"]["value"] is False and can["one_token_an_event"]["value"] is None
    assert {line.split(":")[0] for line in command.lacking(can)} == set(can) - {"url", "model", "models", "api"}


@pytest.mark.parametrize("models, model, play, message", [
    ([], "", capable, "serves no model"), (["a", "b"], "", capable, "choose one with --model"),
    (["llama", "b"], "lama", capable, "did you mean 'llama'"), ([None], "", capable, "serves no model"),
    (["m"], "", lambda h, _: h.json(400, {"error": "for embeddings"}), "refuses completions: HTTP 400: error: for embeddings"),
    (["m"], "", lambda h, _: h.json(401, {}), "refuses completions: HTTP 401"),
])  # fmt: skip
def test_a_server_that_cannot_be_measured_is_one_line(server: Server, models: Any, model: str, play: Any, message: str) -> None:
    server.models, server.plays = models, always(play)
    with pytest.raises(ServerError, match=message):
        probed(server, model=model)
    assert len(server.asked) <= 1, "a refusal is not repeated"


def test_no_request_of_the_probe_is_longer_than_a_launched_server_takes(server: Server) -> None:
    server.plays = always(capable)
    probed(server)
    bodies = [body for _, body, _ in server.asked]
    texts = [body.get("prompt") or "".join(m["content"] for m in body["messages"]) for body in bodies]
    lengths = [len(text) + body["max_tokens"] for text, body in zip(texts, bodies)]  # at worst one token per letter
    assert len(lengths) > 2 and max(lengths) + measure.END_TOKENS <= measure.PROBE_TOKENS


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def texts() -> Path:
    """A text in the working directory."""
    path = Path("texts.jsonl")
    path.write_text(json.dumps({"id": "a", "domain": "d", "text": " ".join(map(str, range(9000)))}) + "\n")
    return path


def test_the_command_writes_rows_and_metrics_and_no_key(
    server: Server, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTHER_KEY", f"{KEY}\r\n")
    server.locked = True
    command.main(
        url=server.url.removesuffix("/v1"), concurrency="1,2", rates="200", requests=8, rounds=2, warmups=1, prompt_tokens=10,
        output_tokens=4, prompts=texts, objective="ttft_ms=60000", timeout=20.0, name="here", key_env="OTHER_KEY",
    )  # fmt: skip
    rows = artifacts.read_jsonl(Path("artifacts/serving/here.jsonl"))
    report = artifacts.read_json(Path("artifacts/serving/here.figures.json"))
    assert len(rows) == 3 * 2 * 8 + 1 + 2 + 1 and all(r["ok"] for r in rows)
    assert [r["scenario"] for r in rows if r["warmup"]] == ["closed-1", "closed-2", "closed-2", "open-200"]
    levels = ("closed-1", "closed-2", "open-200")
    assert {(r["scenario"], r["round"]) for r in rows} == {(s, k) for s in levels for k in (None, 0, 1)}
    sent = [b["prompt"] for _, b, _ in server.asked if b.get("ignore_eos") and b.get("max_tokens") == 4]
    assert len(sent) == len({p[:24] for p in sent}) == len(rows), "every prompt is new to the server"
    for metrics in report["levels"].values():
        assert metrics["failure_rate"]["value"] == 0 and metrics["goodput_req_s"]["value"] == metrics["throughput_req_s"]["value"]
        assert all(m["value"] is not None or m["warnings"] for m in metrics.values())
    assert report["knee"]["value"] is None and "a knee needs three" in report["knee"]["warnings"][0]
    assert not any(KEY in f.read_text() for f in tmp_path.rglob("*") if f.is_file()) and KEY not in "".join(capfd.readouterr())


@pytest.mark.parametrize("options, message", [
    ({"url": ""}, "name a server"), ({"concurrency": "1,x"}, "--concurrency: 'x' is not a positive number"),
    ({"concurrency": "1.5"}, "whole number"), ({"concurrency": ""}, "nothing to measure"), ({"rates": "-1"}, "--rates: '-1'"),
    ({"objective": "ttft=5"}, "did you mean 'ttft_ms'"), ({"objective": "ttft_ms=inf"}, "not a positive number"),
    ({"tokenizer": Path("nowhere")}, "tokenizer.json"), ({"url": "http://h", "launch_": "vllm"}, "give one of them"),
])  # fmt: skip
def test_mistakes_on_the_command_line_are_named_before_anything_is_asked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError if "tokenizer" not in options else DataError, match=message):
        command.main(**{"url": "http://127.0.0.1:9", **options})


def test_a_server_that_refuses_ignore_eos_is_measured_unforced_and_reported_so(server: Server, texts: Path) -> None:
    def refusing(h: Handler, body: Body) -> None:
        h.json(400, {"error": "no ignore_eos"}) if body.get("ignore_eos") else serving_server.plain(h, body)

    server.plays = always(refusing)
    plan = measure.Plan([1], requests=4, rounds=1, warmups=0, prompt_tokens=8, output_tokens=2)
    can, held, rows = asyncio.run(measure.measured(Endpoint(server.url, "m"), plan, texts, None, Path("rows.jsonl")))
    assert can["ignore_eos"]["value"] is False and not held.forced and len(rows) == 4 and not any(r["forced"] for r in rows)


class Keeper:
    """A server that caches the last prompt and replies with its last number; `faulty`: after a hit, with the cached one's."""

    def __init__(self, faulty: bool) -> None:
        self.faulty, self.kept = faulty, ""

    def __call__(self, h: Handler, body: Body) -> None:
        prompt, tops = body["prompt"], "logprobs" in body
        common = common_prefix(prompt, self.kept) if body.get("cache_prompt") else 0
        said = (self.kept if self.faulty and common > 100 else prompt).split()[-1]
        self.kept = prompt
        h.start()
        for _ in range(body["max_tokens"]):
            best = [{"token": said, "logprob": -0.1}, {"token": "x", "logprob": -3.1}]
            likely = {"logprobs": {"content": [best[0] | {"top_logprobs": best}]}} if tops else {}
            h.event({"choices": [{"index": 0, "text": said, "finish_reason": None, **likely}]})
        h.text(None, "length")
        details = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
        h.event({"choices": [], "usage": details | {"prompt_tokens_details": {"cached_tokens": common}}})
        h.done()


@pytest.mark.parametrize("faulty", [False, True])
def test_prompts_that_begin_alike_are_hits_and_a_reply_that_a_hit_changes_is_a_fault(
    server: Server, texts: Path, monkeypatch: pytest.MonkeyPatch, faulty: bool
) -> None:
    server.plays = always(serving_server.plain)  # the probe's
    monkeypatch.setattr(serving_server, "plain", Keeper(faulty))
    plan = measure.Plan([1], requests=4, rounds=1, warmups=0, prompt_tokens=8, output_tokens=2)
    prefix, path = Prefix(shared_tokens=32, requests=3), Path("rows.jsonl")
    _, _, rows = asyncio.run(measure.measured(Endpoint(server.url, "m"), plan, texts, None, path, prefix, "llamacpp"))
    assert [r["scenario"] for r in rows[4:8]] == ["prefix-cold", "prefix-warm", "prefix-hit", "prefix-alone"]
    assert [r["round"] for r in rows[4:]] == [k for k in range(3) for _ in range(4)]
    levels, _ = measure.metrics_of(rows, plan)
    warm = levels["prefix-warm"]
    assert 128 / 384 <= warm["prefix_hit_rate"]["value"] <= 140 / 384 and levels["prefix-cold"]["cached_tokens"]["value"] < 60
    assert (warm["prefix_same"]["value"], warm["prefix_gap"]["value"]) == ((0, pytest.approx(3)) if faulty else (1, 0))
    assert ("3 nats apart" in (tipped(levels) or "")) is faulty and "closed-1" in levels
    _, _, rows = asyncio.run(measure.measured(Endpoint(server.url, "m"), plan, texts, None, path, prefix))
    alone = measure.metrics_of(rows, plan)[0]["prefix-warm"]["prefix_same"]
    assert alone["value"] is None and "without what it keeps" in alone["warnings"][0], "asked only of a server started here"


def test_log_probabilities_are_read_as_llama_cpp_and_as_vllm_send_them() -> None:
    theirs = {"tokens": ["a", "b"], "top_logprobs": [{"a": -0.5, "c": -2.0}, {"d": -1.0, "b": -1.25, "e": -4.0}]}
    assert said_in(theirs) == [{"token": "a", "gap": 1.5}, {"token": "b", "gap": 0.25}] and said_in(None) == []


def test_a_run_without_one_complete_request_keeps_its_rows_and_exits_1(
    server: Server, texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.plays = always(serving_server.plain)  # for the probe; all other requests are refused
    monkeypatch.setattr(serving_server, "plain", lambda h, _: h.json(400, {"error": "exceeds the context"}))
    asked_for = ["--concurrency", "1", "--requests", "4", "--rounds", "1", "--prompt-tokens", "8"]
    monkeypatch.setattr("sys.argv", ["serving", server.url, "--prompts", str(texts), *asked_for])
    monkeypatch.setattr(quiet, "libraries", lambda: None)
    with pytest.raises(SystemExit) as e:
        cli.run(command.main)
    assert "error: none of 4 requests was complete; the first failed with: HTTP 400: error: exceeds the context" in str(e.value)
    assert len(str(e.value).splitlines()) == 1 and "closed-1" not in capsys.readouterr().out
    rows = artifacts.read_jsonl(Path("artifacts/serving/server.jsonl"))
    assert len(rows) == 6 and not any(r["ok"] for r in rows)


def test_an_event_of_a_named_kind_is_read_if_it_is_json_and_a_ping_is_passed_over() -> None:
    reply, chunk = Reply(), '{"choices": [{"text": "%s"}]}'
    for kind, data in (("ping", "still here"), ("completion", chunk % "a"), ("message", chunk % "b")):
        reply.take(Event(data, kind), 1.0)
    assert reply.text == "ab" and len(reply.t_chunks) == 2
    with pytest.raises(Fault, match="not a completion chunk"):
        reply.take(Event("still here"), 1.0)
