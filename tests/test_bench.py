"""The scripts of `make bench` are run rarely: here at least the longest goes through, and all are typed (make test)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_simulations_go_through_at_a_tiny_size(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "tests/bench/simulations.py", "2", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Coverage of 95 % intervals, 2 runs" in done.stdout and "Do the items asked for settle it?" in done.stdout
