"""Start a server for a model folder, wait until it answers, and stop it whatever happens.

It listens on 127.0.0.1 with a random API key from its environment. If it accepts that key and no other, it is the one started.
"""

from __future__ import annotations

import inspect
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psutil

from pipeline.core import artifacts, install, quota, venvs
from pipeline.core.errors import Crashed, ParamsError, QuantgateError, Unsupported
from pipeline.core.explain import did_you_mean
from pipeline.core.records import Launch, Options
from pipeline.serving.client import ServerError

STARTUP_S = 600.0
STOP_S = 20.0
CONTEXT = 2048  # tokens of a request, prompt and reply together
VLLM = venvs.VLLM


@dataclass(frozen=True)
class Launched:
    """A running server. facts: what it is, without the key; `peak_memory_bytes` and `cpu_s` are added at its end."""

    url: str
    key: str = field(repr=False)
    facts: Launch


@dataclass(frozen=True)
class Command:
    """How to start a server: arguments, the environment variable from which it reads its API key, further variables."""

    arguments: list[str]
    key_variable: str
    variables: dict[str, str] = field(default_factory=dict)


# Keyword-only arguments are the engine options that a kind of server supports, with the engine's names and defaults.
def _llamacpp(
    model_dir: Path, port: int, threads: int, parallel: int, context: int, *, kv: str = "f16", gpu_layers: int = 0
) -> Command:
    file = model_dir / "model.gguf"
    if not file.exists():
        raise Unsupported(f"llama.cpp's server reads GGUF, and {model_dir} holds none; use quantizer 'gguf'")
    script = Path(__file__).with_name("_llamacpp.py")
    sizes = {"port": port, "threads": threads, "parallel": parallel, "context": context, "gpu-layers": gpu_layers}
    options = [f"--{k}={v}" for k, v in {**sizes, "kv": kv}.items()]
    return Command([str(venvs.python("llamacpp-server")), str(script), str(file), *options], "QUANTGATE_SERVER_KEY")


def _vllm(
    model_dir: Path, port: int, threads: int, parallel: int, context: int, *, kv: str = "auto", tensor_parallel: int = 1
) -> Command:
    options = [str(model_dir), "--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port)]
    options += ["--kv-cache-dtype", kv, "--tensor-parallel-size", str(tensor_parallel)]
    options += ["--max-num-seqs", str(parallel), "--max-model-len", str(context)]
    options += ["--no-enable-prefix-caching", "--enable-prompt-tokens-details"]  # the second makes it report cached tokens
    # Its engine waits busily and needs a core: with threads on both of two cores, requests of one second took twenty.
    threads = min(threads, max(1, quota.processors() - 1))
    variables = {
        "OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "4"),  # GiB; by default it takes 92 % of all memory
    }  # fmt: skip
    return Command([venvs.vllm(), "-m", "vllm.entrypoints.cli.main", "serve", *options], "VLLM_API_KEY", variables)


KINDS: dict[str, Callable[..., Command]] = {"llamacpp": _llamacpp, "vllm": _vllm}
READS = {"llamacpp": "llamacpp", "vllm": "hf"}  # the engine whose models a kind reads
# Fields of a request that may use the prefix cache, and of one that may not; the server's arguments that turn this cache on.
REUSE: dict[str, tuple[Options, Options, list[str]]] = {
    "llamacpp": ({"cache_prompt": True}, {"cache_prompt": False}, []),
    "vllm": ({}, {"cache_salt": "alone"}, ["--enable-prefix-caching"]),
}


def check_engine(kind: str, engine: str) -> None:
    """Raise `ParamsError` if a kind of server cannot read an engine's models."""
    if engine not in (READS[kind], kind):
        other = next((f"launch: {k}, or " for k, reads in READS.items() if reads == engine), "")
        raise ParamsError(f"launch: {kind} reads models of engine {READS[kind]!r}, not {engine!r}; use {other}its server's url")


def check_supported(kind: str, options: Options) -> None:
    """Raise `Unsupported` if this machine lacks the kind of server, or the server an option: it would serve something else."""
    known = inspect.getfullargspec(KINDS[kind]).kwonlyargs
    if missing := ", ".join(f"{k}: {v}" for k, v in options.items() if k not in known):
        raise Unsupported(
            f"a launched {kind} server does not have engine_options {{{missing}}} (it has {' and '.join(known) or 'none'}); "
            "give the variant a server by url, or remove them"
        )
    if kind == "vllm":
        venvs.vllm()


@contextmanager
def launched(
    kind: str, model_dir: Path, *, threads: int = 1, parallel: int = 1, context: int = CONTEXT, startup_s: float = STARTUP_S,
    options: Options | None = None, reuse: bool = False,
) -> Iterator[Launched]:  # fmt: skip
    """Start a server on the model in `model_dir` for `parallel` requests at once, each of up to `context` tokens. The block starts
    once it accepts our key and no other. options: the variant's engine_options; reuse: keep prefixes. Raises `ParamsError` for an
    unknown kind, `Unsupported` if it cannot run here or lacks an option, `ServerError` or `Crashed` if it does not come up."""
    if kind not in KINDS:
        raise ParamsError(f"server {kind!r} cannot be launched{did_you_mean(kind, list(KINDS))}")
    options = options or {}
    check_supported(kind, options)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])  # if another process takes it first, our key fails there and `_wait` notices
    key = secrets.token_urlsafe(32)
    command, kept = KINDS[kind](model_dir, port, threads, parallel, context, **options), REUSE[kind][2] if reuse else []
    log, url = (artifacts.LOGS / f"serve-{kind}-{model_dir.name}.log").absolute(), f"http://127.0.0.1:{port}/v1"
    log.parent.mkdir(parents=True, exist_ok=True)
    guard, start = Path(__file__).with_name("_guard.py"), time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(guard), *command.arguments, *kept], stdin=subprocess.PIPE, stdout=out, stderr=out,
            env=install.clean() | command.variables | {command.key_variable: key},
        )  # fmt: skip
    try:
        _wait(process, url, key, log, start + startup_s)
        facts: Launch = {
            "startup_s": time.monotonic() - start, "build": _build(log, key), "log": str(log), "kind": kind,
            "model_dir": str(model_dir), "threads": int(command.variables.get("OMP_NUM_THREADS", threads)), "parallel": parallel,
            "context": context, "engine_options": options,
        }  # fmt: skip
        try:
            yield Launched(url, key, facts)
            if process.poll() is not None:
                raise _ended(process.returncode, "while serving requests", log, key)
        finally:
            facts["peak_memory_bytes"], facts["cpu_s"] = _cost(process.pid)
    finally:
        _stop(process)
        artifacts.write_text(log, _printed(log, key))  # some servers print their environment


def _wait(process: subprocess.Popen[bytes], url: str, key: str, log: Path, deadline: float) -> None:
    with httpx2.Client(trust_env=False, timeout=5.0) as client:
        while not _answers(client, url, key):
            if process.poll() is not None:
                raise _ended(process.returncode, "before it was ready", log, key)
            if time.monotonic() > deadline:
                raise ServerError(f"the server did not answer in time: {_last_line(log, key)} (see {log})")
            time.sleep(0.2)
        if _answers(client, url, f"not-{key}"):
            raise ServerError(f"{url} accepts any API key: it is another server than the one started, or checks none; see {log}")


def _answers(client: httpx2.Client, url: str, key: str) -> bool:
    """Whether the server answers a request with this key."""
    body = {"model": "model", "prompt": "a", "max_tokens": 1}
    try:
        return client.post(f"{url}/completions", headers={"Authorization": f"Bearer {key}"}, json=body).status_code == 200
    except httpx2.HTTPError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Close the guard's pipe: it then ends the server and its descendants."""
    assert process.stdin is not None
    process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    process.kill()  # does nothing if it has ended
    process.wait()
    if process.returncode < 0:  # the guard was killed: the kernel has ended the server, and this ends the server's children
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _cost(guard: int) -> tuple[int | None, float | None]:
    """(sum of peak resident bytes, CPU seconds) of the guard's descendants; None if unknown or if they have ended."""
    try:
        family = psutil.Process(guard).children(recursive=True)
        lines = [line for p in family for line in Path(f"/proc/{p.pid}/status").read_text().splitlines()]
        spent = [p.cpu_times() for p in family]
    except (psutil.Error, OSError):
        return None, None
    peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    return sum(peaks) or None, sum(t.user + t.system for t in spent) if family else None


def _printed(log: Path, key: str) -> str:
    return log.read_text(encoding="utf-8", errors="replace").replace(key, "***")


def _build(log: Path, key: str) -> str | None:
    """The build that the server printed: a line `build: ...`, or vLLM's banner."""
    match = re.search(r"^build: (.*)$|█ +(version \d\S*)$", _printed(log, key), re.MULTILINE)
    return match and (match[1] or match[2])


def _ended(code: int, when: str, log: Path, key: str) -> QuantgateError:
    """The error for a server that ended by itself. code: its guard's exit code, 128 + the signal that killed the server."""
    if code < 0:
        return ServerError(f"the server was stopped: its guard was killed {when}; run the command again")
    how = f"died of {signal.Signals(code - 128).name}" if code > 128 else f"ended with exit code {code}"
    return Crashed(f"the server {how} {when}: {_last_line(log, key)} (see {log})")


def _last_line(log: Path, key: str) -> str:
    lines = [line for line in _printed(log, key).splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "no output"
