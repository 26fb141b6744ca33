"""The scripts of `make bench` are run rarely: here at least the longest goes through, and all are typed (make test)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_the_simulations_go_through_at_a_tiny_size(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "tests/bench/simulations.py", "2", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Coverage of 95 % intervals, 2 runs" in done.stdout and "Do the items asked for settle it?" in done.stdout


def test_the_ui_that_pictures_are_taken_of_is_ended_with_all_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlflow ui is a process that starts others; here a stand-in, whose child says its number."""
    monkeypatch.syspath_prepend(str(ROOT / "tests/bench"))
    import pictures

    child = "import time; time.sleep(600)"
    parent = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]); print(p.pid, flush=True); p.wait()"
    ui = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, start_new_session=True)
    with ui:
        assert ui.stdout
        started = psutil.Process(int(ui.stdout.readline()))
        pictures.stop(ui)
    assert ui.returncode is not None
    psutil.wait_procs([started], timeout=30)
    assert not started.is_running() or started.status() == psutil.STATUS_ZOMBIE
