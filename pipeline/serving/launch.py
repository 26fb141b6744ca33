"""Start a server for a model folder, wait until it answers, and stop it whatever happens; nothing is left running.

It listens on 127.0.0.1 with a random API key, which goes to it through its environment: command lines are there for all to
read. That the key is taken, and no other, shows that the server that answers is the one that was started.
"""

from __future__ import annotations

import inspect
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil

from pipeline import envs
from pipeline.core import artifacts, cli, install, quota
from pipeline.core.errors import Crashed, ParamsError, QuantgateError, Unsupported
from pipeline.core.explain import did_you_mean
from pipeline.serving.client import ServerError

STARTUP_S = 600.0
STOP_S = 20.0
CONTEXT = 2048  # tokens a request may have, prompt and reply together, where no more are asked for
VLLM = "VLLM_PYTHON"


@dataclass(frozen=True)
class Launched:
    """A running server. facts: what it is, for the figures' side file; the key is in none of them. When it has been
    stopped, `peak_memory_bytes` and `cpu_s` are among them."""

    url: str
    key: str = field(repr=False)
    facts: dict[str, Any]
    log: Path


@dataclass(frozen=True)
class Command:
    """How a kind of server is started: its arguments, the variable in which it looks for its API key, and more variables."""

    arguments: list[str]
    key_variable: str
    variables: dict[str, str] = field(default_factory=dict)


# Keyword-only arguments of a kind: the engine options it has an equal for, under the engine's names and with its defaults.


def _llamacpp(
    model_dir: Path, port: int, threads: int, parallel: int, context: int, *, kv_type: str = "f16", gpu_layers: int = 0
) -> Command:
    file = model_dir / "model.gguf"
    if not file.exists():
        raise Unsupported(f"llama.cpp's server reads GGUF, and {model_dir} holds none; use quantizer 'gguf'")
    script = Path(__file__).with_name("_llamacpp.py")
    sizes = {"port": port, "threads": threads, "parallel": parallel, "context": context, "gpu-layers": gpu_layers}
    options = [f"--{k}={v}" for k, v in {**sizes, "kv-type": kv_type}.items()]
    return Command([str(envs.python("llamacpp-server")), str(script), str(file), *options], "QUANTGATE_SERVER_KEY")


def _vllm(model_dir: Path, port: int, threads: int, parallel: int, context: int) -> Command:
    """vLLM is gigabytes and has pins of its own: it is taken where it is installed, and never fetched."""
    python = _vllm_python()
    options = [str(model_dir), "--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port)]
    options += ["--max-num-seqs", str(parallel), "--max-model-len", str(context)]
    options += ["--no-enable-prefix-caching", "--enable-prompt-tokens-details"]  # the second lets it say that none was cached
    # By itself it takes all cores but one, however many threads were asked for, and reports its use over the net. That one is
    # its engine's, which waits busily: with threads on both of two cores, requests of a second took twenty, on a busy machine.
    threads = min(threads, max(1, quota.processors() - 1))
    own = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    own["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB; unset, it takes 92 % of all memory
    return Command([python, "-m", "vllm.entrypoints.cli.main", "serve", *options], "VLLM_API_KEY", own)


def _vllm_python() -> str:
    python = os.environ.get(VLLM)
    if not python:
        raise Unsupported(f"vLLM has an environment of its own; put the path of the Python that has it into {VLLM}")
    if shutil.which(python) is None:
        raise Unsupported(f"{VLLM} = {python!r} is no program; put the path of the Python that has vLLM into it")
    return python


KINDS = {"llamacpp": _llamacpp, "vllm": _vllm}
READS = {"llamacpp": "llamacpp", "vllm": "hf"}  # the engine whose models a kind takes


def check_engine(kind: str, engine: str) -> None:
    """Raise `ParamsError` if a kind of server does not read the models of an engine."""
    if engine != READS[kind]:
        fits = next((k for k, reads in READS.items() if reads == engine), None)
        way = f"launch: {fits}, or " if fits else ""
        raise ParamsError(
            f"launch: {kind} does not read models of engine {engine!r}, but those of {READS[kind]!r}; {way}give its server by url"
        )


def refuse_here(kind: str, options: dict[str, Any]) -> None:
    """Raise `Unsupported` for what is known of a kind before it is started: this machine lacks it, or it lacks an option."""
    _refuse(kind, options)
    if kind == "vllm":
        _vllm_python()


@contextmanager
def launched(
    kind: str,
    model_dir: Path,
    *,
    threads: int = 1,
    parallel: int = 1,
    context: int = CONTEXT,
    startup_s: float = STARTUP_S,
    options: dict[str, Any] | None = None,
) -> Iterator[Launched]:
    """A server of `kind` on the model in `model_dir`, `parallel` requests at once, each of up to `context` tokens.

    options: a variant's engine_options. Raises `ParamsError` for an unknown kind, `Unsupported` where it cannot run here or
    has no such option, `ServerError` if it does not come up.
    """
    if kind not in KINDS:
        raise ParamsError(f"server {kind!r} cannot be launched{did_you_mean(kind, list(KINDS))}")
    own = options or {}
    _refuse(kind, own)
    port = free_port()
    command = KINDS[kind](model_dir, port, threads, parallel, context, **own)
    threads = int(command.variables.get("OMP_NUM_THREADS", threads))
    with served(command, port, artifacts.LOGS / f"serve-{kind}-{model_dir.name}.log", startup_s) as server:
        server.facts.update(kind=kind, model_dir=str(model_dir), threads=threads, parallel=parallel, context=context)
        server.facts["engine_options"] = own
        yield server


def _refuse(kind: str, options: dict[str, Any]) -> None:
    """Raise `Unsupported` for engine options that a kind of server has no equal for: it would serve something else."""
    known = inspect.getfullargspec(KINDS[kind]).kwonlyargs
    if lost := {k: v for k, v in options.items() if k not in known}:
        told = ", ".join(f"{k}: {v}" for k, v in lost.items())
        raise Unsupported(
            f"engine_options {{{told}}} have no equal in a launched {kind} server (it takes {' and '.join(known) or 'none'}); "
            "give the variant a server by url, or take them out"
        )


@contextmanager
def served(command: Command, port: int, log: Path, startup_s: float) -> Iterator[Launched]:
    """Run a command until the block is left; yields when its server answers on `port` with our key and no other."""
    key, url = secrets.token_urlsafe(32), f"http://127.0.0.1:{port}/v1"
    log.parent.mkdir(parents=True, exist_ok=True)
    guard = Path(__file__).with_name("_guard.py")
    start = time.monotonic()
    log = log.absolute()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(guard), *command.arguments], stdin=subprocess.PIPE, stdout=out, stderr=out,
            env=install.clean() | command.variables | {command.key_variable: key},
        )  # fmt: skip
    try:
        _wait(process, url, key, log, start + startup_s)
        facts = {"startup_s": time.monotonic() - start, "build": _build(log, key), "log": str(log)}
        try:
            yield Launched(url, key, facts, log)
            if process.poll() is not None:
                raise _ended(process.returncode, "while it was asked", log, key)
        finally:
            facts.update(_cost(process.pid))
    finally:
        _stop(process)
        if key.encode() in (said := log.read_bytes()):  # some servers print all that they are given
            artifacts.write_text(log, said.replace(key.encode(), b"***").decode(errors="replace"))


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now; should another take it, our key is refused there and we say so."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], url: str, key: str, log: Path, deadline: float) -> None:
    with httpx2.Client(trust_env=False, timeout=5.0) as client:
        while not _answers(client, url, key):
            if process.poll() is not None:
                raise _ended(process.returncode, "before it answered", log, key)
            if time.monotonic() > deadline:
                raise ServerError(f"the server did not answer in time: {_last_line(log, key)} (see {log})")
            time.sleep(0.2)
        if _answers(client, url, f"not-{key}"):
            raise ServerError(f"{url} takes any API key: it is not the server that was started, or it has no lock; see {log}")


def _answers(client: httpx2.Client, url: str, key: str) -> bool:
    """Whether a model is ready there for this key."""
    try:
        found = client.post(f"{url}/completions", headers={"Authorization": f"Bearer {key}"}, json={
            "model": "model", "prompt": "a", "max_tokens": 1
        })  # fmt: skip
    except httpx2.HTTPError:
        return False
    return found.status_code == 200


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Close the guard's pipe, upon which it ends the server and all that the server started."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        cli.say("serving", f"the server did not stop within {STOP_S:g} s and was killed")
        process.kill()
        process.wait()
    if process.returncode < 0:  # killed, the guard ends nothing: the server dies with it by the kernel, what that started does not
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _cost(guard: int) -> dict[str, float | int | None]:
    """What the processes that the guard started have taken: the sum of their peak resident bytes, and processor seconds;
    both None where the system does not say, or where they have ended already."""
    try:
        family = psutil.Process(guard).children(recursive=True)
        lines = [line for p in family for line in Path(f"/proc/{p.pid}/status").read_text().splitlines()]
        spent = [p.cpu_times() for p in family]
    except (psutil.Error, OSError):
        return {"peak_memory_bytes": None, "cpu_s": None}
    peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    return {"peak_memory_bytes": sum(peaks) or None, "cpu_s": sum(t.user + t.system for t in spent) if family else None}


def _build(log: Path, key: str) -> str | None:
    """What the server said it is, where it does: in a line of its own, or as vLLM's banner does."""
    said = log.read_text(errors="replace").replace(key, "***")
    found = re.search(r"^build: (.*)$|█ +(version \d\S*)$", said, re.MULTILINE)
    return found and (found[1] or found[2])


def _ended(code: int, when: str, log: Path, key: str) -> QuantgateError:
    """The error for a server that ended by itself; its guard ends with 128 + the number of the signal that it died of."""
    if code < 0:
        return ServerError(f"the server was stopped: its guard was killed {when}; run the same command again")
    how = f"died of {signal.Signals(code - 128).name}" if code > 128 else f"ended with exit code {code}"
    return Crashed(f"the server {how} {when}: {_last_line(log, key)} (see {log})")


def _last_line(log: Path, key: str) -> str:
    lines = [line for line in log.read_text(errors="replace").replace(key, "***").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it printed nothing"
