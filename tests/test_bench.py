"""The scripts of `make bench` are run rarely: here at least the longest goes through, and all are typed (make test)."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.filterwarnings("ignore")  # of figures of two runs
def test_the_simulations_go_through_at_a_tiny_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.bench import simulations

    simulations.main(2, tmp_path)
    said = capsys.readouterr().out
    assert "Coverage of 95 % intervals, 2 runs" in said and "Do the items asked for settle it?" in said
