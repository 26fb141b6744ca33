"""The processors and the memory that this process may use: a container's quota (Linux cgroups, version 1 and 2) counts, and
not the machine that it stands on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TREES, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def processors() -> int:
    """How many threads may compute at once, at least 1; a part of a processor more is none."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups("cpu"):
        with suppress(OSError, ValueError):  # "max", or a version's file that is not there
            quota, period = map(int, (group / "cpu.max").read_text().split())
            allowed = min(allowed, quota // period)
        with suppress(OSError, ValueError):
            quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            allowed = min(allowed, quota // period) if quota > 0 else allowed  # -1: no limit
    return max(1, allowed)


def memory_bytes() -> int:
    """How much memory there is."""
    import psutil

    allowed = int(psutil.virtual_memory().total)
    for group in _groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):
                allowed = min(allowed, int((group / name).read_text()))
    return allowed


def _groups(controller: str) -> Iterator[Path]:
    """This process's cgroups for a controller and all above: each may hold a limit. Version 1 has a tree for each controller,
    version 2 one; a container may see its own group as the root of it, under a path that is only its host's."""
    lines = OWN.read_text().splitlines() if OWN.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        tree = TREES / controller if controllers else TREES
        group = tree / path.lstrip("/")
        yield from (g for g in (group, *group.parents) if g.is_relative_to(tree))
