"""The processors, memory and cards that this process may use, within a container's limits (cgroup version 2)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TREE, OWN, VMSTAT = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/vmstat")


def processors() -> int:
    """Number of processors, rounded down, at least 1."""
    allowed = len(os.sched_getaffinity(0))
    for group in _groups():
        with suppress(OSError, ValueError):  # "max", or no such file
            quota, period = map(int, (group / "cpu.max").read_text().split())
            allowed = min(allowed, quota // period)
    return max(1, allowed)


def memory_bytes() -> int:
    """Memory that this process may use."""
    import psutil

    return min([int(psutil.virtual_memory().total), *(most for most, _ in _memory())])


def free_bytes() -> int:
    """Memory available now, including a group's inactive file cache."""
    import psutil

    return min([int(psutil.virtual_memory().available), *(most - used for most, used in _memory())])


def card_bytes(visible: str | None) -> list[int]:
    """Memory of each card according to nvidia-smi, empty without it. visible: as CUDA_VISIBLE_DEVICES; None: all."""
    tool = shutil.which("nvidia-smi")
    if not tool or visible == "":
        return []
    asked = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits", *(["-i", visible] if visible else [])]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # it fails without a driver, and hangs with a broken one
        return []
    return [int(mebibytes) << 20 for mebibytes in said.split() if mebibytes.isdigit()]


def oom_kills() -> int:
    """Number of processes killed for lack of memory, in this group or else on the machine."""
    counts = (_facts(file) for file in (*(group / "memory.events" for group in _groups()), VMSTAT))
    return next((facts["oom_kill"] for facts in counts if "oom_kill" in facts), 0)


def _memory() -> Iterator[tuple[int, int]]:
    for group in _groups():
        with suppress(OSError, ValueError):
            most = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text()) if (group / "memory.current").exists() else 0
            yield most, used - _facts(group / "memory.stat").get("inactive_file", 0)


def _facts(file: Path) -> dict[str, int]:
    with suppress(OSError):
        words = (line.split() for line in file.read_text().splitlines())
        return {name: int(number) for name, number in words}
    return {}


def _groups() -> Iterator[Path]:
    for line in OWN.read_text().splitlines() if OWN.exists() else []:
        if line.startswith("0::"):
            group = TREE / line.removeprefix("0::/")
            yield from (g for g in (group, *group.parents) if g.is_relative_to(TREE))
