"""Threads and memory are what a container's quota leaves; cards are what nvidia-smi names."""

import os
from pathlib import Path

import psutil
import pytest

from pipeline.core import artifacts, quota

GB = 10**9


def pretend(own: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in these groups of a machine with 16 GB, 12 of them free, where three processes were killed for memory."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"total": 16 * GB, "available": 12 * GB}))
    for name in ("TREE", "OWN", "VMSTAT"):
        monkeypatch.setattr(quota, name, tmp_path / name)
    artifacts.write_text(tmp_path / "OWN", own)
    artifacts.write_text(tmp_path / "VMSTAT", "pgfree 7\noom_kill 3\n")
    for name, text in files.items():
        artifacts.write_text(tmp_path / "TREE" / name, text + "\n")


@pytest.mark.parametrize("own, files, processors, memory", [  # of a machine of 8 processors and 16 GB
    ("", {}, 8, 16 * GB), ("0::/", {"cpu.max": "100000 100000", "memory.max": str(GB)}, 1, GB),
    ("0::/", {"cpu.max": "max 100000", "memory.max": "max"}, 8, 16 * GB), ("0::/", {"cpu.max": "250000 100000"}, 2, 16 * GB),
    ("0::/", {"cpu.max": "10000 100000"}, 1, 16 * GB),
    ("0::/a.slice/b", {"a.slice/cpu.max": "300000 100000", "a.slice/b/cpu.max": "max 100000"}, 3, 16 * GB),
    ("0::/docker/1f2e", {"cpu.max": "400000 100000"}, 4, 16 * GB),  # the path is the host's, the tree its own
    ("0::/", {"cpu.max": "1600000 100000", "memory.max": str(64 * GB)}, 8, 16 * GB),
])  # fmt: skip
def test_a_quota_of_any_group_above_counts(
    own: str, files: dict[str, str], processors: int, memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    pretend(own, files, tmp_path, monkeypatch)
    assert (quota.processors(), quota.memory_bytes()) == (processors, memory)


@pytest.mark.parametrize("own, files, free, kills", [
    ("", {}, 12 * GB, 3),
    ("0::/a", {"a/memory.max": f"{4 * GB}", "a/memory.current": f"{3 * GB}", "a/memory.stat": f"file 9\ninactive_file {2 * GB}",
               "a/memory.events": "oom 5\noom_kill 1"}, 3 * GB, 1),
    ("0::/a", {"a/memory.max": "max", "a/memory.current": f"{3 * GB}", "a/memory.events": "oom_kill 0"}, 12 * GB, 0),
])  # fmt: skip
def test_what_is_free_and_who_was_killed_is_this_group_s_and_not_the_machine_s(
    own: str, files: dict[str, str], free: int, kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(own, files, tmp_path, monkeypatch)
    assert (quota.free_bytes(), quota.oom_kills()) == (free, kills)


@pytest.mark.parametrize("visible, sizes", [(None, [81920, 40960]), ("1", [40960]), ("", []), ("7", [])])
def test_the_cards_are_those_that_are_left_visible(
    visible: str | None, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = """case "$*" in *"-i 1") echo 40960;; *-i*) echo "No devices were found"; exit 6;; *) echo 81920; echo 40960;; esac"""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answers}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert quota.card_bytes(visible) == [n << 20 for n in sizes]
    (tmp_path / "nvidia-smi").write_text("")  # no program
    assert quota.card_bytes(visible) == []
