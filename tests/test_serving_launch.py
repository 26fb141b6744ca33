"""A launched server listens on this machine only, accepts one key only, and is gone afterwards, however the run ends."""

import contextlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from pipeline.core import venvs
from pipeline.core.errors import Crashed, Unsupported
from pipeline.engines import llamacpp as llamacpp_engine
from pipeline.serving import _llamacpp, client, launch, logprobs, measure
from pipeline.serving.client import Endpoint, Request, ServerError
from pipeline.serving.launch import Command, Launched
from tests.serving_server import through
from tests.test_engines import write_gguf

ROOT = Path(__file__).resolve().parent.parent
# A server that forks a helper in another session and writes both pids. deaf: ignore SIGTERM; open: accept any key.
SCRIPT = """
import os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
if {deaf}: signal.signal(signal.SIGTERM, signal.SIG_IGN)
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open("pids", "w").write(f"{{os.getpid()}} {{helper.pid}}")
print("build: toy 1.0, key", os.environ["TOY_KEY"], flush=True)
class H(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        right = {open} or self.headers["Authorization"] == "Bearer " + os.environ["TOY_KEY"]
        self.send_response(200 if right else 401); self.send_header("Content-Length", "0"); self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), H).serve_forever()
"""
PLAIN = SCRIPT.format(deaf=False, open=False)
Toy = Callable[..., contextlib.AbstractContextManager[Launched]]
LOG = Path("artifacts/logs/serve-toy-.log")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    """Launch a script in place of a server."""

    def start(body: str, *, startup_s: float = 60.0, **variables: str) -> Any:
        Path("toy.py").write_text(body)
        monkeypatch.setitem(
            launch.KINDS, "toy", lambda _, port, *__: Command([sys.executable, "toy.py", str(port)], "TOY_KEY", variables)
        )
        return launch.launched("toy", Path(), startup_s=startup_s, context=3210, threads=9)

    return start


def family() -> list[int]:
    return [int(p) for p in Path("pids").read_text().split()]


def gone(pids: list[int], within_s: float = 30) -> bool:
    """Whether all of them end; a zombie counts as ended."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids):
            return True
        time.sleep(0.05)
    return False


def killed_once(run: subprocess.Popen[bytes], sign: Path, number: signal.Signals) -> list[int]:
    """Send a process a signal once the file `sign` exists, and wait for its end; returns the pids of its children."""
    try:
        while not sign.exists() and run.poll() is None:
            time.sleep(0.05)
        return [p.pid for p in psutil.Process(run.pid).children()]
    finally:
        run.send_signal(number)
        run.wait()


@pytest.mark.parametrize("deaf", [False, True])
def test_a_server_and_its_helpers_end_with_the_block_by_an_error_too_and_show_nobody_their_key(toy: Toy, deaf: bool) -> None:
    leaving = pytest.raises(KeyboardInterrupt) if deaf else contextlib.nullcontext()
    with leaving, toy(SCRIPT.format(deaf=deaf, open=False)) as server:
        pids = family()
        assert all(psutil.pid_exists(p) for p in pids) and server.facts["startup_s"] > 0
        assert str(server.facts["build"]).startswith("toy 1.0") and server.key not in json.dumps(server.facts)
        alive = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
        lines = [" ".join(p.cmdline()) for p in alive]
        assert len(lines) >= 3 and not any(server.key in line for line in lines)
        if deaf:
            raise KeyboardInterrupt
    assert gone(pids, 1.0), "nothing is left when the block has been left"
    facts: Any = server.facts
    if sys.platform == "linux":  # two Python processes of some megabytes each
        assert 2 * 2**20 < facts["peak_memory_bytes"] < 2**30 and facts["cpu_s"] > 0
    assert server.key not in LOG.read_text() and "key ***" in LOG.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="the guard finds lost grandchildren with Linux's prctl")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_killed_leaves_no_server(number: signal.Signals) -> None:
    Path("toy.py").write_text(PLAIN)
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom pipeline.core import cli\nfrom pipeline.serving import launch\n"
        "launch.KINDS['toy'] = lambda _, port, *__: launch.Command([sys.executable, 'toy.py', str(port)], 'TOY_KEY')\n"
        "def main() -> None:\n"
        "    with launch.launched('toy', Path()):\n        Path('up').touch()\n        time.sleep(600)\n"
        "cli.run(main)\n"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background, also by a child
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    try:
        run = subprocess.Popen([sys.executable, "-c", program], env=env, stderr=subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGINT, before)
    guards = killed_once(run, Path("up"), number)
    assert len(guards) == 1 and gone([*guards, *family()])


def await_end(process: psutil.Process) -> None:
    """Wait until it is a zombie: its parent still has to read the exit code."""
    deadline = time.monotonic() + 20
    while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.parametrize("number, error, words", [
    (signal.SIGKILL, ServerError, "its guard was killed"), (signal.SIGSEGV, Crashed, "died of SIGSEGV while serving"),
])  # fmt: skip
def test_a_guard_or_server_that_is_killed_is_an_error_with_its_name_and_leaves_no_helper(
    toy: Toy, number: signal.Signals, error: type[Exception], words: str
) -> None:
    body = PLAIN.replace("start_new_session=True", "start_new_session=False")
    with pytest.raises(error, match=words), toy(body):
        pids = family()
        guard = psutil.Process(pids[0]).parent()
        (guard if number == signal.SIGKILL else psutil.Process(pids[0])).send_signal(number)
        await_end(guard)
    assert gone(pids)


@pytest.mark.parametrize("body, error, words", [
    ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", Crashed, "died of SIGILL before it was ready"),
    ("import os; print('loading'); raise SystemExit('no such model ' + os.environ['TOY_KEY'])", Crashed,
     r"ended with exit code 1 before it was ready: no such model \*\*\*"),
    ("import os, time; open('pids', 'w').write(str(os.getpid())); time.sleep(600)", ServerError,
     "did not answer in time: no output"),
    (SCRIPT.format(deaf=False, open=True), ServerError, "accepts any API key"),
])  # fmt: skip
def test_a_server_that_does_not_come_up_is_stopped_and_says_why(toy: Toy, body: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words), toy(body, startup_s=1.5 if "in time" in words else 60.0):
        raise AssertionError
    assert not Path("pids").exists() or gone(family(), 1.0)


def test_vllm_has_the_threads_and_memory_it_may_and_tells_nobody_its_key_or_that_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.VLLM, sys.executable)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    commands = [launch.KINDS["vllm"](Path("model"), 8123, n, 4, 3210) for n in (1, 3, 4)]
    arguments, variables = " ".join(commands[0].arguments), commands[0].variables
    assert "--api-key" not in arguments and commands[0].key_variable == "VLLM_API_KEY" and "127.0.0.1" in arguments
    assert [c.variables["OMP_NUM_THREADS"] for c in commands] == ["1", "3", "3"], "one core is its engine's, which waits busily"
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "nobind" and variables["VLLM_NO_USAGE_STATS"] == "1"
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "4", "unset, it would take all of the machine's memory"
    assert "--max-model-len 3210 " in arguments
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    assert launch.KINDS["vllm"](Path("model"), 8123, 3, 4, 3210).variables["VLLM_CPU_KVCACHE_SPACE"] == "40"


def test_variables_reach_the_server_and_its_facts_and_its_version_is_read_from_a_banner_as_vllm_prints_it(toy: Toy) -> None:
    banner = "(pid=7) INFO [api.py:1]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0"
    body = PLAIN.replace('"build: toy 1.0, key", os.environ["TOY_KEY"]', "os.environ['BANNER']")
    with toy(body, OMP_NUM_THREADS="2", BANNER=banner, PYTHONIOENCODING="utf-8") as server:
        assert server.facts["context"] == 3210 and server.facts["threads"] == 2, "those that it was given"
        assert server.facts["build"] == "version 0.32.0"


def test_engine_options_reach_a_server_as_the_engine_means_them_and_the_rest_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(venvs, "python", lambda _: Path("python"))
    (tmp_path / "model.gguf").touch()
    arguments = launch.KINDS["llamacpp"](tmp_path, 8123, 1, 4, 3210, kv="q8_0", gpu_layers=7).arguments
    assert {"--kv=q8_0", "--gpu-layers=7", "--context=3210"} <= set(arguments)
    words = r"a launched llamacpp server does not have engine_options \{batch: 2\} \(it has kv"
    with pytest.raises(Unsupported, match=words), launch.launched("llamacpp", tmp_path, options={"kv": "q8_0", "batch": 2}):
        raise AssertionError
    engine, server = inspect.signature(llamacpp_engine.load).parameters, inspect.signature(launch.KINDS["llamacpp"]).parameters
    options = {n: p.default for n, p in engine.items() if n not in ("model_dir", "threads", "speculate")}
    assert {n: p.default for n, p in server.items() if p.kind is p.KEYWORD_ONLY} == options
    assert _llamacpp.KV_TYPES == llamacpp_engine.CACHE_TYPES


def share_environments() -> None:
    """Environments are built once for the checkout, not for every run of the tests."""
    shutil.copytree(ROOT / "envs", "envs")
    if (ROOT / "artifacts/envs").exists():
        Path("artifacts").mkdir(exist_ok=True)
        Path("artifacts/envs").symlink_to(ROOT / "artifacts/envs")


@pytest.fixture(scope="module")
def llamacpp(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    home = tmp_path_factory.mktemp("llamacpp")
    model = home / "model"
    shutil.copytree(tiny, model)
    write_gguf(model, model / "model.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        share_environments()
        try:
            with launch.launched("llamacpp", model, threads=1, parallel=4) as server:
                yield server
        except Unsupported as e:
            pytest.skip(f"llama.cpp's server: {e}")


def at(server: Launched, **more: Any) -> Endpoint:
    return Endpoint(server.url, "model", key=server.key, **more)


def test_llama_cpp_s_server_is_probed_gives_rows_of_forced_length_and_refuses_another_key(llamacpp: Launched) -> None:
    _, can = through(at(llamacpp), measure.probe)
    assert can["model"] == "model" and can["stream_usage"]["value"] is True
    assert "AVX" in str(llamacpp.facts["build"]) or "NEON" in str(llamacpp.facts["build"])
    row: Any = through(at(llamacpp), lambda c, e: client.ask(c, e, Request([5, 17, 44, 9, 200], 12, forced=True))).row
    assert row["ok"], row["error"]
    assert (row["prompt_tokens"], row["output_tokens"], row["counted_by"], row["finish"]) == (5, 12, "usage", "length")
    assert row["t_submit"] < row["t_first"] <= row["t_chunks"][-1] <= row["t_done"] and row["cached_tokens"] == 0
    chat = through(at(llamacpp, chat=True), lambda c, e: client.ask(c, e, Request("one two", 3, forced=True)))
    assert chat.row["ok"] or chat.row["fault"] == "http", chat.row["error"]  # a GGUF without a template may refuse chats
    row = through(replace(at(llamacpp), key="guess"), lambda c, e: client.ask(c, e, Request("a", 1))).row
    assert row["status"] == 401 and "guess" not in row["error"]
    assert llamacpp.key not in Path(llamacpp.facts["log"]).read_text(errors="replace")


def test_llama_cpp_s_server_scores_given_tokens_as_transformers_does(llamacpp: Launched, tiny: Path) -> None:
    from pipeline import engines

    words = logprobs.Words(tiny)
    ids = words.encoded(measure.TEXT)
    name, top, lacks = through(at(llamacpp), lambda c, e: logprobs.find_way(c, e, words, measure.TEXT))
    assert name == "logit_bias, a token at a time" and "echo" in " ".join(lacks)
    logps, places = through(at(llamacpp), lambda c, e: logprobs.WAYS[name](c, e, words, ids, 1, top))
    logits = np.asarray(engines.load("hf", tiny, threads=1).logits(ids), float)[:-1]
    expected = logits[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(logits).sum(-1))
    assert logps == pytest.approx(expected, abs=0.05) and len(logps) == len(ids) - 1, "keys and values are kept in 16 bits there"
    assert top == 20 and all(len(place) == 20 for place in places)
    same = [max(place, key=lambda i: place[i]) == str(best) for place, best in zip(places, logits.argmax(-1))]
    assert np.mean(same) > 0.9, "and names the likeliest in each place"
