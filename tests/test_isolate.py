"""A library that dies costs only the work that called it; a person's signal or a full disk stops the stage."""

import atexit
import ctypes
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from pipeline.core import isolate, quota
from pipeline.core.errors import ArtifactError, Crashed, Unsupported


def add(a: int, b: int) -> int:
    return a + b


def die(number: int) -> None:
    os.write(2, b"ggml: tile configuration\n")
    os.kill(os.getpid(), number)


def die_at_exit(number: int) -> str:
    atexit.register(die, number)
    return "all was written"


def library(name: str, function: str, *args: int) -> None:
    ctypes.CDLL(name)[function](*args)


def fail(kind: type[Exception], *args: object) -> None:
    raise kind(*args)


@pytest.mark.parametrize("number", [signal.SIGILL, signal.SIGBUS, signal.SIGFPE, pytest.param(40, id="a real-time signal")])
def test_a_fatal_signal_is_a_crash_with_its_name_the_last_words_and_python_s_stack_in_the_log(number: int) -> None:
    name = getattr(number, "name", "signal 40")
    with pytest.raises(Crashed, match=rf"diverge x: .* {name}.* ggml: tile configuration; see artifacts/logs/diverge-x.log"):
        isolate.in_own_process(die, number, what="diverge x")
    assert number == 40 or "in die" in Path("artifacts/logs/diverge-x.log").read_text()


@pytest.mark.parametrize("work, args, words", [
    (die_at_exit, (signal.SIGSEGV,), "SIGSEGV"), (library, ("libstdc++.so.6", "_ZSt9terminatev"), "SIGABRT"),
    (library, (None, "exit", 0), r"exit\(0\)"), (library, (None, "exit", 1), r"exit\(1\)"),
    (fail, (RuntimeError, "tensors differ"), "diverge x: RuntimeError: tensors differ; see"),
    (fail, (MemoryError,), "ran out of memory"), (fail, (RuntimeError, "CUDA out of memory. Tried 2 GiB"), "ran out of memory"),
])  # fmt: skip
def test_a_library_that_ends_the_process_and_an_exception_nobody_expected_are_crashes(
    work: Callable[..., object], args: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(Crashed, match=words):
        isolate.in_own_process(work, *args, what="diverge x")
    assert work is not fail or "in fail" in Path("artifacts/logs/diverge-x.log").read_text()


def test_the_kernel_s_memory_killer_is_a_crash_and_a_person_s_kill_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter((3, 4, 4))
    monkeypatch.setattr(quota, "oom_kills", lambda: next(counts))
    with pytest.raises(Crashed, match="SIGKILL: the machine ran out of memory"):
        isolate.in_own_process(die, signal.SIGKILL, what="diverge x")
    monkeypatch.undo()
    for number in (signal.SIGKILL, signal.SIGTERM):  # a job in the background ignores SIGINT
        with pytest.raises(ArtifactError, match=r"stopped by SIG\w+; nothing was recorded"):
            isolate.in_own_process(die, number, what="diverge x")


@pytest.mark.parametrize("error", [
    OSError(errno.ENOSPC, "No space left on device"), RuntimeError("I/O error: No space left on device (os error 28)"),
], ids=["of the system", "of a library"])  # fmt: skip
def test_a_full_disk_fails_the_stage_whoever_wrote(error: Exception) -> None:
    with pytest.raises(ArtifactError, match="make room"):
        isolate.in_own_process(fail, type(error), *error.args, what="diverge x")


@pytest.mark.parametrize("code, error, said", [
    ("import errno, os; raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))", ArtifactError, "No space left on device"),
    ("import os; os.kill(os.getpid(), 15)", ArtifactError, "stopped by SIGTERM; nothing was recorded"),
    ("import os; os.kill(os.getpid(), 11)", Crashed, "SIGSEGV"), ("raise MemoryError", Crashed, "ran out of memory"),
    ("raise SystemExit('no such model')", RuntimeError, "no such model"),
])  # fmt: skip
def test_another_program_is_treated_alike_and_its_last_line_is_the_reason(code: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        isolate.tool([sys.executable, "-c", code], what="x", log=Path("log"), env=dict(os.environ))


def test_values_and_refusals_come_through() -> None:
    assert isolate.in_own_process(add, 1, b=2, what="x") == 3
    with pytest.raises(Unsupported, match="no GPU"):
        isolate.in_own_process(fail, Unsupported, "no GPU", what="x")


def test_the_child_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """kill -9 of a stage leaves no process behind that writes on."""
    script = tmp_path / "stage.py"
    script.write_text(
        "import os, time\nfrom pathlib import Path\nfrom pipeline.core import isolate\n"
        "def work():\n    Path('pid').write_text(str(os.getpid()))\n    time.sleep(60)\n"
        "if __name__ == '__main__':\n    isolate.in_own_process(work, what='x')\n"
    )
    deadline = time.monotonic() + 60
    with subprocess.Popen([sys.executable, str(script)], env=os.environ | {"PYTHONPATH": str(ROOT)}) as parent:
        while not (Path("pid").exists() and Path("pid").read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        parent.kill()
    child = int(Path("pid").read_text())
    while Path(f"/proc/{child}").exists() and "zombie" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
