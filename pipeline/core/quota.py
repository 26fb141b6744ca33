"""The processors and memory that this process may use: a container's cgroup limits (version 1 and 2) count."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TREES, OWN, VMSTAT = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/vmstat")


def processors() -> int:
    """How many threads may compute at once, at least 1; fractions of a processor are rounded down."""
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
    """Memory that this process may use."""
    import psutil

    return min([int(psutil.virtual_memory().total), *(most for most, _ in _memory())])


def free_bytes() -> int:
    """Memory available now; a group's file cache counts as available."""
    import psutil

    return min([int(psutil.virtual_memory().available), *(most - used for most, used in _memory())])


def oom_kills() -> int:
    """How many processes the kernel killed for lack of memory, in this group or else on the machine."""
    counters = [group / name for group in _groups("memory") for name in ("memory.events", "memory.oom_control")]
    return next((n for file in (*counters, VMSTAT) if (n := _facts(file).get("oom_kill")) is not None), 0)


def _memory() -> Iterator[tuple[int, int]]:
    """(limit, use) of every group that has a limit."""
    for group in _groups("memory"):
        for limit, use in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with suppress(OSError, ValueError):
                most = int((group / limit).read_text())
                used = int((group / use).read_text()) if (group / use).exists() else 0
                facts = _facts(group / "memory.stat")
                yield most, used - facts.get("total_inactive_file", facts.get("inactive_file", 0))


def _facts(file: Path) -> dict[str, int]:
    """{name: number} of a file with one pair a line; empty if it is missing."""
    with suppress(OSError):
        words = (line.split() for line in file.read_text().splitlines())
        return {name: int(number) for name, number in words}
    return {}


def _groups(controller: str) -> Iterator[Path]:
    """This process's cgroups for a controller and all above, each of which may hold a limit. In a container the path may be
    the host's and the root its own group."""
    lines = OWN.read_text().splitlines() if OWN.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        tree = TREES / controller if controllers else TREES
        group = tree / path.lstrip("/")
        yield from (g for g in (group, *group.parents) if g.is_relative_to(tree))
