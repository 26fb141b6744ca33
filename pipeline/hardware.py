"""The machine: what it is, how much memory a process takes, how fast memory can be read."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil


def describe(threads: int) -> dict[str, Any]:
    """What the figures were measured on."""
    facts: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "gpu": None,
    }
    try:
        import torch
    except ImportError:
        return facts
    facts["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def memory_bandwidth(threads: int, size: int = 1 << 28, repeats: int = 5) -> float:
    """Bytes a second of a streaming read over `size` bytes (well past any cache), best of `repeats`."""
    from concurrent.futures import ThreadPoolExecutor

    parts = np.array_split(np.ones(size // 8), threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            start = time.monotonic()
            list(pool.map(np.sum, parts))  # NumPy frees the interpreter while it reads
            best = max(best, size / (time.monotonic() - start))
    return best


def peak_memory(reset: bool = False) -> int | None:
    """Peak resident bytes of this process since its start or the last reset; None where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
        peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None
    if reset:
        with contextlib.suppress(OSError):  # some containers forbid it: the peak then includes the loading
            Path("/proc/self/clear_refs").write_text("5")
    return peak
