"""Run work in its own process: native code can die in ways that Python cannot catch. `Crashed` then costs one variant only."""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import multiprocessing as mp
import os
import signal
import subprocess
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from pipeline.core import artifacts, quiet, quota
from pipeline.core.errors import ArtifactError, Crashed, QuantgateError

T = TypeVar("T")
PR_SET_PDEATHSIG = 1  # linux/prctl.h
BY_A_PERSON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL}
# Errors of the disk may pass: the stage fails, records nothing, and says what to do.
ROOM, WRITABLE = "make room", "make that writable for you, or work in a copy"
OF_THE_DISK = {
    errno.ENOSPC: ROOM, errno.EDQUOT: ROOM, errno.EROFS: WRITABLE, errno.EACCES: WRITABLE, errno.EIO: "check the disk",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
}  # fmt: skip
MEMORY = "the machine ran out of memory; free some, or measure a smaller model or batch"
CARD = "the card ran out of memory; lower the batch sizes, or in engine 'hf' set engine_options: {device_map: auto}"
ADVICE: dict[int, str] = {
    signal.SIGILL: "the library was built for another processor; build it here: rm -rf .venv, then `make repro`",
    signal.SIGBUS: "a file that it had open was truncated, or the disk is full",
}
TAIL = 3  # lines of a log to quote in a reason
GRACE_S = 30  # for a child to end after SIGTERM


def in_own_process(work: Callable[..., T], *args: Any, what: str, **named: Any) -> T:
    """Run `work` in a fresh process and return its result. Raises its `QuantgateError`, or `Crashed` if it died or raised anything
    else, or `ArtifactError` after a person's signal or an error of the disk. what: "stage variant", which names the log."""
    log, before = log_of(what), quota.oom_kills()
    context = mp.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(sender, log, work, args, named), name=what)
    child.start()
    sender.close()
    outcome: tuple[bool, Any] | None = None  # whether it raised, and what
    try:
        with suppress(EOFError, ConnectionResetError):
            outcome = receiver.recv()
        child.join()
    except KeyboardInterrupt:
        child.terminate()
        child.join(GRACE_S)
        child.kill()
        raise
    if outcome is None or child.exitcode:
        raise how_it_ended(what, child.exitcode or 0, log, before)
    raised, value = outcome
    if raised:
        raise value
    return value  # type: ignore[no-any-return]


isolated = in_own_process  # the name that stages use: tests replace it by a plain call


def how_it_ended(what: str, code: int, log: Path, oom_kills_before: int) -> QuantgateError:
    """The error for a process that ended with `code` (negative: a signal's number) and no result."""
    tail = f"; its last words: {words}" if (words := last_lines(log, TAIL)) else ""
    if code >= 0:
        return Crashed(f"{what}: a library ended the process by exit({code}){tail}; see {log}")
    number = -code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"  # real-time ones have no name
    out_of_memory = number == signal.SIGKILL and quota.oom_kills() > oom_kills_before
    if number in BY_A_PERSON and not out_of_memory:
        return ArtifactError(f"{what} was stopped by {name}; nothing was recorded; the same command continues from there")
    advice = MEMORY if out_of_memory else ADVICE.get(number, "a fault of the library or of the model's files")
    return Crashed(f"{what}: the process died of {name}: {advice}{tail}; see {log}")


def tool(command: list[str], *, what: str, log: Path, env: dict[str, str]) -> None:
    """Run another program, its output into `log`. Raises `RuntimeError` with its last line if it exits with an error, and the
    errors of `in_own_process` if it died, was stopped, or had no memory or disk."""
    log.parent.mkdir(parents=True, exist_ok=True)
    before = quota.oom_kills()
    with log.open("w") as out:
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=env).returncode
    if code < 0:
        raise how_it_ended(what, code, log, before)
    if code:
        last = last_lines(log, 1) or "no output"
        if last.startswith("MemoryError"):
            raise Crashed(f"{what}: {MEMORY}; see {log}")
        failed = RuntimeError(f"{what}: {last} (see {log})")
        raise disk_error(failed) or failed


def log_of(what: str) -> Path:
    return artifacts.LOGS / f"{what.replace(' ', '-')}.log"


def enter(log: Path) -> None:
    """Call first in a child process: it will end with its parent, and write output and the stack at a fatal signal to `log`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end_with_parent()
    log.parent.mkdir(parents=True, exist_ok=True)
    quiet.kept_terminal = os.fdopen(os.dup(2), "w", errors="replace")  # for progress bars
    with log.open("wb") as f:
        os.dup2(f.fileno(), 1)
        os.dup2(f.fileno(), 2)
    faulthandler.enable()


def end_with_parent() -> None:
    """Have this process get SIGTERM when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _child(pipe: Connection, log: Path, work: Callable[..., Any], args: tuple[Any, ...], named: dict[str, object]) -> None:
    from pipeline.core import cli

    quiet.libraries()
    enter(log)
    try:
        outcome = (False, work(*args, **named))
    except QuantgateError as e:
        outcome = (True, e)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # so that the parent sees the signal
    except BaseException as e:
        traceback.print_exc()
        outcome = (True, disk_error(e) or Crashed(f"{mp.current_process().name}: {brief(e)}; see {log}"))
    pipe.send(outcome)
    cli.leave()


def disk_error(e: BaseException) -> ArtifactError | None:
    """The error to raise for an error of the disk; libraries in other languages keep only the system's message."""
    remedy = next((r for n, r in OF_THE_DISK.items() if getattr(e, "errno", None) == n or os.strerror(n) in str(e)), None)
    return ArtifactError(f"a file could not be used ({brief(e)}); {remedy}, then run the same command again") if remedy else None


def brief(e: BaseException) -> str:
    """An error's type and first line, with advice if out of memory."""
    first = next((line.strip() for line in str(e).splitlines() if line.strip()), "no message")
    of_memory = isinstance(e, MemoryError) or "out of memory" in first.lower()
    hint = f" ({CARD if 'CUDA' in first else MEMORY})" if of_memory else ""
    return f"{type(e).__name__}: {first[:300]}{hint}"


def last_lines(log: Path, count: int) -> str:
    """The last lines before Python's stack dump, without this machine's paths."""
    text = log.read_text(encoding="utf-8", errors="replace").partition("Fatal Python error")[0] if log.exists() else ""
    text = text.replace(f"{Path.cwd()}/", "").replace(f"{Path.home()}/", "~/")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-count:])[-300:]
