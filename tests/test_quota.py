"""Threads and memory are what a container's quota leaves, in both versions of cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from pipeline.core import artifacts, quota

GB = 10**9


@pytest.mark.parametrize(
    "own, files, processors, memory",
    [  # of a machine of 8 processors and 16 GB
        ("", {}, 8, 16 * GB),
        ("0::/", {"cpu.max": "100000 100000", "memory.max": str(GB)}, 1, GB),
        ("0::/", {"cpu.max": "max 100000", "memory.max": "max"}, 8, 16 * GB),
        ("0::/", {"cpu.max": "250000 100000"}, 2, 16 * GB),
        ("0::/", {"cpu.max": "10000 100000"}, 1, 16 * GB),
        ("0::/a.slice/b", {"a.slice/cpu.max": "300000 100000", "a.slice/b/cpu.max": "max 100000"}, 3, 16 * GB),
        ("0::/docker/1f2e", {"cpu.max": "400000 100000"}, 4, 16 * GB),  # the path is the host's, the tree its own
        ("3:cpu,cpuacct:/\n2:memory:/x\n0::/", {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "50000"}, 3, 16 * GB),
        ("3:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8, 16 * GB),
        ("2:memory:/x", {"memory/x/memory.limit_in_bytes": f"{2 * GB}", "memory/memory.limit_in_bytes": f"{2**63}"}, 8, 2 * GB),
        ("0::/", {"cpu.max": "1600000 100000", "memory.max": str(64 * GB)}, 8, 16 * GB),
    ],
)  # fmt: skip
def test_a_quota_of_any_group_above_counts(
    own: str, files: dict[str, str], processors: int, memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"total": 16 * GB}))
    monkeypatch.setattr(quota, "TREES", tmp_path / "cgroup")
    monkeypatch.setattr(quota, "OWN", tmp_path / "own")
    artifacts.write_text(tmp_path / "own", own)
    for name, text in files.items():
        artifacts.write_text(tmp_path / "cgroup" / name, text + "\n")
    assert (quota.processors(), quota.memory_bytes()) == (processors, memory)
