"""The processors and the memory that this process may use: a container's quota (Linux cgroups, version 1 and 2) counts, and
not the machine that it stands on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TREES, OWN, VMSTAT = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/vmstat")


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

    return min([int(psutil.virtual_memory().total), *(most for most, _ in _memory())])


def free_bytes() -> int:
    """How much memory can be had now: what a group holds of files that nobody reads, it gives back."""
    import psutil

    return min([int(psutil.virtual_memory().available), *(most - used for most, used in _memory())])


def oom_kills() -> int:
    """How many processes the kernel killed for want of memory: in this group, or on the machine where no group says; else 0."""
    told = [group / name for group in _groups("memory") for name in ("memory.events", "memory.oom_control")]
    return next((n for file in (*told, VMSTAT) if (n := _facts(file).get("oom_kill")) is not None), 0)


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
    """A file of lines that each hold a name and a number; empty where there is none."""
    with suppress(OSError):
        words = (line.split() for line in file.read_text().splitlines())
        return {name: int(number) for name, number in words}
    return {}


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
