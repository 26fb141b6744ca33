"""A batch sends each request once, through refusals, kills and a second run; failures are results too."""

import asyncio
import functools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer

from pipeline.core.errors import ArtifactError, DataError, ParamsError
from pipeline.serving.client import Answer, Endpoint
from tests.serving_server import KEY, Handler, Server, plain, through
from tools import batch
from tools.batch import Gate, Pace

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "Pace", functools.partial(Pace, first_wait_s=0.01))  # what the command line takes


def requests_file(*lines: dict[str, Any]) -> Path:
    path = Path("requests.jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def results(path: str = "results.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


A = {"key": "a", "prompt": "plain", "max_tokens": 1}


def run(server: Server, path: Path, **options: Any) -> int:
    try:
        batch.main(server.url, path, Path("results.jsonl"), timeout=20.0, **options)
    except typer.Exit as e:
        return e.exit_code
    return 0


def test_every_request_has_one_line_and_a_second_run_asks_nothing(server: Server) -> None:
    path = requests_file(*({"key": f"k{k}", "prompt": f"plain {k}", "max_tokens": 2} for k in range(9)))
    assert run(server, path, concurrency=3) == 0 and run(server, path) == 0
    assert len(server.asked) == 9 and server.most <= 3
    assert sorted(r["key"] for r in results()) == [f"k{k}" for k in range(9)]
    assert all(r["ok"] and r["text"] == " 0 1" and r["tries"] == 1 and r["output_tokens"] == 2 for r in results())


def test_requests_say_what_they_want_and_carry_a_key_of_their_own(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "plain"}], "temperature": 0.7, "max_tokens": 1}
    run(server, requests_file({"prompt": "plain x", "max_tokens": 3}, chat))
    (path_a, a, headers_a), (path_b, b, headers_b) = sorted(server.asked, key=lambda r: r[0], reverse=True)
    assert path_a == "/v1/completions" and a["max_tokens"] == 3 and path_b == "/v1/chat/completions" and b["temperature"] == 0.7
    assert headers_a["Idempotency-Key"] != headers_b["Idempotency-Key"]


def test_what_was_not_taken_is_sent_again_and_under_the_same_key(server: Server) -> None:
    def busy(h: Handler, body: dict[str, Any]) -> None:
        tried = sum(b["prompt"] == body["prompt"] for _, b, _ in server.asked)
        h.json(429, {"error": "slow down"}, Retry_After="0") if tried < 3 else plain(h, body)

    server.plays = {"busy": busy, "full": lambda h, _: h.json(503, {}, Retry_After="0")}
    assert run(server, requests_file(A | {"prompt": "busy"})) == 0
    assert results()[0]["tries"] == 3 and len({h["Idempotency-Key"] for _, _, h in server.asked}) == 1
    assert run(server, requests_file(A | {"key": "b", "prompt": "full"}), tries=4) == 1, "it gives up in the end"
    assert Counter(b["prompt"] for _, b, _ in server.asked) == {"busy": 3, "full": 4}


@pytest.mark.parametrize("play", ["cut", "reset", "in_band", "ended", "no_stream", "not_json", "broken"])
def test_what_may_have_been_computed_is_never_sent_twice(server: Server, play: str) -> None:
    server.plays = {"broken": lambda h, _: h.json(500, {"error": "trace"})}
    path = requests_file({"key": "a", "prompt": play}, {"key": "b", "prompt": "plain", "max_tokens": 1})
    assert run(server, path, tries=5) == 1 and run(server, path, tries=5) == 1
    assert Counter(b["prompt"] for _, b, _ in server.asked) == {play: 1, "plain": 1}
    (row,) = (r for r in results() if r["key"] == "a")
    assert not row["ok"] and row["text"] is None and row["error"] and row["fault"]


def test_failed_ones_are_asked_again_when_that_is_wanted(server: Server) -> None:
    path = requests_file({"key": "a", "prompt": "cut"})
    run(server, path)
    server.plays = {"cut": plain}
    assert run(server, path, retry_failed=True) == 0
    assert [r["ok"] for r in results()][-1] is True


@pytest.mark.parametrize("request_, model, words", [
    (A | {"prompt": "plain other"}, "m", "'a' has another request"), (A | {"key": "b"}, "other", "has results of 'm', not 'other'"),
])  # fmt: skip
@pytest.mark.parametrize("cut", ["", '{"key": "b", "req'])
def test_a_key_with_another_request_and_another_model_are_refused_and_the_file_stays_as_it_was(
    server: Server, request_: dict[str, Any], model: str, words: str, cut: str
) -> None:
    run(server, requests_file(A))
    with Path("results.jsonl").open("a") as f:
        f.write(cut if model == "m" else "")
    before, server.models = Path("results.jsonl").read_bytes(), [model]
    with pytest.raises(ArtifactError, match=words):
        run(server, requests_file(request_))
    assert Path("results.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["requests.jsonl", "./requests.jsonl", "link.jsonl"])
def test_results_are_never_written_into_the_requests(server: Server, name: str) -> None:
    path = requests_file({"key": "a", "prompt": "plain"}, {"key": "b", "prompt": "plain"})
    path.write_bytes(path.read_bytes().rstrip(b"\n"))  # as some editors save it: no newline after the last request
    Path("link.jsonl").symlink_to(path)
    before = path.read_bytes()
    with pytest.raises(ParamsError, match="has the requests; choose another file"):
        batch.main(server.url, path, Path(name))
    assert path.read_bytes() == before and server.asked == [] and not Path(f"{name}.lock").exists()


GOOD = '{"key": "z", "request": "d", "model": "m", "ok": true}\n'


@pytest.mark.parametrize("content, fault", [
    (GOOD + '{"key": "a", "prompt": "b"}\nlast words', "2 is not a result .request: field required"),
    (GOOD + '{"key": "a", "request": "d", "model": "m", "ok": "yes"}\n', "2 is not a result .ok: input should be a valid boolean"),
    ("[1]\nlast words", "1 is not a result .input should be"), (GOOD + "\nnot JSON\nlast words", "3 is not a result .invalid json"),
    (b"\xff\xfe\nlast words", "1 is not a result .invalid json"), ("my only line of notes", "1 is not a result that was cut off"),
    (GOOD + '{"key": "a", "prompt": "b"}', "2 is not a result .request: field required"),
])  # fmt: skip
def test_a_file_of_other_things_is_named_with_its_line_and_left_as_it_was(server: Server, content: str | bytes, fault: str) -> None:
    before = content if isinstance(content, bytes) else content.encode()
    Path("results.jsonl").write_bytes(before)
    with pytest.raises(ArtifactError, match=f"results.jsonl:{fault}"):
        run(server, requests_file(A))
    assert Path("results.jsonl").read_bytes() == before and server.asked == []


def test_two_batches_do_not_write_one_file(server: Server) -> None:
    with batch.appending(Path("results.jsonl")), pytest.raises(ArtifactError, match="another batch is writing"):
        run(server, requests_file(A))


@pytest.mark.parametrize("text, words", [
    ("{", "requests.jsonl:1: not JSON"), ('{"key": "a"}', "either prompt or messages"), ("[1]", "either prompt or messages"),
    ('{"prompt": "a", "messages": []}', "either prompt or messages"), ('{"prompt": "a", "n": 4}', "cannot set stream"),
    ('{"key": 1, "prompt": "a"}\n\n{"key": "1", "prompt": "b"}', "requests.jsonl:3: key '1' occurs twice"),
    ("\n", "has no requests"), (r'{"key": "\ud83d", "prompt": "a"}', "requests.jsonl:1: not JSON .*surrogates"),
    ('{"prompt": "a", "max_tokens": 0}', "max_tokens"), ('{"prompt": "a", "max_tokens": "9"}', "max_tokens"),
])  # fmt: skip
def test_a_faulty_request_is_named_with_its_line_before_anything_is_asked(text: str, words: str) -> None:
    Path("requests.jsonl").write_text(text)
    with pytest.raises(DataError, match=words):
        batch.read(Path("requests.jsonl"), 8)
    Path("requests.jsonl").write_bytes(b'{"prompt": "a"}\r\n{"prompt": "\xff"}')
    with pytest.raises(DataError, match=r"requests.jsonl:2: is not UTF-8"):
        batch.read(Path("requests.jsonl"), 8)


def test_the_key_is_read_from_the_variable_that_is_named_and_is_in_no_file(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_KEY", f"{KEY}\n")
    server.locked = True
    server.plays = {"tell": lambda h, _: h.json(400, {"error": {"message": f"no: {h.headers['Authorization']}"}})}
    assert run(server, requests_file({"key": "a", "prompt": "tell"}, A | {"key": "b"}), key_env="OTHER_KEY") == 1
    assert {r["key"]: r["ok"] for r in results()} == {"a": False, "b": True}
    assert "Bearer ***" in Path("results.jsonl").read_text()
    assert not any(KEY in f.read_text() for f in Path().rglob("*") if f.is_file())


def test_the_rate_is_kept_by_spacing() -> None:
    now, passed = [0.0], list[float]()

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    async def go() -> None:
        gate = Gate(4.0, lambda: now[0], sleep)
        for _ in range(5):
            await gate.passed()
            passed.append(now[0])

    asyncio.run(go())
    assert passed == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])


def test_waits_double_up_to_a_limit_unless_the_server_says_how_long() -> None:
    pace, rng = Pace(first_wait_s=1.0, longest_wait_s=10.0), random.Random(0)
    row: Any = {}
    for tried, full in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (5, 10.0), (60, 10.0)):
        assert full / 2 <= batch.wait_s(pace, tried, Answer(row, "", ""), rng) <= full
    assert batch.wait_s(pace, 1, Answer(row, "", "", retry_after=7.0), rng) == 7.0
    asked_for = [batch.wait_s(pace, 3, Answer(row, "", "", retry_after=0.0), rng) for _ in range(9)]
    assert all(2.0 <= wait <= 4.0 for wait in asked_for) and len(set(asked_for)) > 1, "at once is never at once for all"


@pytest.mark.parametrize("value, waits", [
    (b"1.5", 1.5), *((v, None) for v in (b"\xb2", b"soon", b"", b"nan", b"-3", b"1e400", b"\xd9\xa3")),
    (b"Wed, 21 Oct 2015 07:28:00 GMT", None), (b"Wed, 99 Oct 2015 07:28:00 GMT", None),
])  # fmt: skip
def test_what_a_server_asks_to_wait_is_kept_and_nonsense_is_a_wait_of_our_own(
    server: Server, value: bytes, waits: float | None
) -> None:
    assert waited(server, value) == [pytest.approx(waits or 0.75 * 0.5, rel=1e-9 if waits else 0.4)]
    assert results()[0]["ok"] and results()[0]["tries"] == 2


def test_a_wait_too_long_is_a_failure_and_no_early_try(server: Server) -> None:
    (wait,) = waited(server, b"40")
    assert wait == 40
    for far in (b"61", b"999999999999"):
        assert waited(server, far) == [] and results()[-1]["tries"] == 1
        assert not results()[-1]["ok"] and "more than 60" in results()[-1]["error"] and "HTTP 429" in results()[-1]["error"]


def sent(url: str, prompt: str, pace: Pace) -> list[float]:
    """The waits of one request."""
    waits, endpoint = list[float](), Endpoint(url, "m")

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    items = batch.read(requests_file({"prompt": prompt}), 1)
    with batch.appending(Path("results.jsonl")) as out:
        through(endpoint, lambda client, _: batch.run(client, endpoint, items, pace, out, sleep=sleep))
    return waits


def waited(server: Server, retry_after: bytes) -> list[float]:
    """The waits of a request that is refused once with this Retry-After."""

    def refuse(h: Handler, body: dict[str, Any]) -> None:
        if len(server.asked) > 1:
            plain(h, body)
            return
        h.send_response(429)
        h._headers_buffer.append(b"Retry-After: " + retry_after + b"\r\n")  # type: ignore[attr-defined]
        h.send_header("Content-Length", "0")
        h.end_headers()

    server.plays = {"refuse": refuse}
    server.asked.clear()
    return sent(server.url, "refuse", Pace())


def test_nobody_there_is_tried_again_because_nothing_arrived() -> None:
    assert len(sent("http://127.0.0.1:9/v1", "x", Pace(tries=4))) == 3
    assert results()[0]["tries"] == 4 and results()[0]["fault"] == "connect"


def test_a_line_that_was_being_written_when_the_run_died_is_asked_again(server: Server) -> None:
    path = requests_file(*({"key": f"k{k}", "prompt": f"plain ü{k}", "max_tokens": 1} for k in range(3)))
    run(server, path, concurrency=1)
    whole = Path("results.jsonl").read_bytes()
    last = len(whole) - whole[:-1].rfind(b"\n") - 1
    for lost in (1, 9, last - 20, last - 1):  # only its newline, up to all but its first byte
        Path("results.jsonl").write_bytes(whole[:-lost])
        server.asked.clear()
        assert run(server, path) == 0
        assert len(server.asked) == 1 and sorted(r["key"] for r in results()) == ["k0", "k1", "k2"]


def test_a_killed_batch_goes_on_and_asks_nothing_answered_twice(server: Server) -> None:
    freed = threading.Event()

    def slow(h: Handler, body: dict[str, Any]) -> None:
        if len(server.asked) > 6:
            freed.wait(30)  # the rest is in flight at the kill
        plain(h, body)

    server.plays = {"slow": slow}
    path = requests_file(*({"key": f"k{k}", "prompt": f"slow {k}", "max_tokens": 1} for k in range(12)))
    command = [sys.executable, "-m", "tools.batch", server.url, str(path), "results.jsonl", "--concurrency", "2"]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    try:
        while len(server.asked) < 8 and process.poll() is None:
            time.sleep(0.02)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    done = {r["key"] for r in results()}
    assert 4 <= len(done) < 12
    freed.set()
    server.plays = {}
    assert run(server, path) == 0
    keys: dict[str, list[str]] = {}
    for _, b, h in server.asked:
        keys.setdefault(b["prompt"].replace("slow ", "k"), []).append(h["Idempotency-Key"])
    assert set(keys) == {f"k{k}" for k in range(12)} and all(len(keys[k]) == 1 for k in done)
    assert all(len(set(same)) == 1 for same in keys.values()), "one that was in flight comes back under its own key"
    assert sorted(r["key"] for r in results()) == sorted(keys)
