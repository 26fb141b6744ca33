"""The machine: its hardware, a process's memory, and the rates of reading, copying and multiplying: the best of a few repetitions
over data far larger than any cache, with the models' number of threads, in the run whose metrics use them."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from pipeline.core import artifacts, install, quota
from pipeline.core.records import GpuMemory, Machine, Rates

MACHINE = artifacts.REPORTS / "machine.yaml"
SETS = ("amx", "avx", "asimd", "bf16", "f16c", "fma", "i8mm", "sve")  # prefixes of instruction sets that matter
CAPS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")  # variables that limit which of them libraries use
OF_MACHINE = """\
# The machine that the timings of this folder are of, a param of the stages that time: no other machine's are restored as its.
# `make repro` and every stage that times write it; where it has changed, `dvc repro` times again, and quality stays as it is.
"""


def describe(threads: int) -> Machine:
    """The machine and software of a measurement."""
    import torch

    return {
        "cpu": _processor(), "cores": quota.processors(), "threads": threads, "memory_bytes": quota.memory_bytes(),
        "system": f"{platform.system()} {platform.machine()}", "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "llamacpp": " ".join(install.built_for(sys.executable) or ()) or None,  # what it was compiled for decides its speed
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }  # fmt: skip


def note() -> None:
    """Write this machine's class beside the timings, if they are another's."""
    if not of_timings()[0] or elsewhere():
        artifacts.write_text(MACHINE, of_this())


def of_this() -> str:
    """The content of `MACHINE` for this machine."""
    facts = _class()
    return OF_MACHINE + yaml.safe_dump({"machine": artifacts.digest(facts)[:8], **facts}, sort_keys=False)


def of_timings() -> tuple[str, str]:
    """(class, processor and GPU) of the machine of the timings in this folder; empty if unknown, as after a merge that left two."""
    then = None
    with contextlib.suppress(FileNotFoundError, yaml.YAMLError):
        then = yaml.safe_load(MACHINE.read_text(encoding="utf-8"))
    if not isinstance(then, dict) or "machine" not in then:
        return "", ""
    return str(then["machine"]), ", ".join(str(then[k]) for k in ("processor", "gpu") if then.get(k))


def elsewhere() -> str:
    """The machine of the timings in this folder if it is another one, else an empty text."""
    name, machine = of_timings()
    return f"{machine}, class {name}" if name and name != artifacts.digest(_class())[:8] else ""


def _class() -> dict[str, str | int | None]:
    """What speed depends on, from the system's files; loads nothing heavy."""
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    driver = Path("/proc/driver/nvidia/version")
    sets = {name for name in _value_in("/proc/cpuinfo", "flags", "Features").split() if name.startswith(SETS)}
    return {
        "processor": _processor(), "cores": quota.processors(),
        "gpu": " + ".join(model for file in gpus if (model := _value_in(file, "Model"))) or None,
        "driver": driver.read_text().splitlines()[0] if driver.exists() else None, "system": platform.machine(),
        "instruction_sets": " ".join(sorted(sets)), **{name: os.environ[name] for name in CAPS if name in os.environ},
    }  # fmt: skip


def _processor() -> str:
    return _value_in("/proc/cpuinfo", "model name") or platform.processor() or "unknown"


def _value_in(file: str | Path, *names: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path(file).read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    return ""


def memory_bandwidth(threads: int, size: int = 1 << 28, repeats: int = 5) -> float:
    """Bytes per second of a streaming read over `size` bytes (far more than any cache), best of `repeats`."""
    parts = np.array_split(np.ones(size // 8), threads)
    with ThreadPoolExecutor(threads) as pool:
        return size / _best(lambda: list(pool.map(np.sum, parts)), repeats)  # NumPy releases the interpreter


def copy_bandwidth(threads: int, size: int = 1 << 27, repeats: int = 3) -> float:
    """Bytes read and written per second by a streaming copy of `size` bytes, best of `repeats`."""
    parts, into = np.array_split(np.ones(size // 8), threads), np.array_split(np.ones(size // 8), threads)
    with ThreadPoolExecutor(threads) as pool:
        return 2 * size / _best(lambda: list(pool.map(np.copyto, into, parts)), repeats)


def matrix_rate(threads: int, dtype: str, device: str = "cpu", size: int = 2048, seconds: float = 0.25) -> float | None:
    """Operations per second, 2 size^3 per product, of two size x size matrices in torch, best within about `seconds`; int8 sums in
    32 bits. None if torch has no such product here."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kind = getattr(torch, dtype)
        a = torch.ones((size, size), dtype=kind, device=device)
        out = torch.empty_like(a, dtype=torch.int32 if dtype == "int8" else kind)
        multiply = torch._int_mm if dtype == "int8" else torch.mm

        def product() -> None:
            multiply(a, a, out=out)
            if device != "cpu":
                torch.cuda.synchronize()

        first = _best(product, 1)  # also the warm-up
        return 2 * size**3 / min(first, _best(product, max(1, min(9, int(seconds / first)))))
    except (AttributeError, RuntimeError):
        return None
    finally:
        torch.set_num_threads(before)


def rates(threads: int, device: str, dtypes: list[str]) -> Rates:
    """Bytes and operations per second of a model's device; None if unknown, as for a model that is partly on a GPU."""
    if device not in ("cpu", "cuda"):
        return {"device": device, "read": None, "copy": None, "matrix": dict.fromkeys(dtypes)}
    if device == "cuda":  # in its own process, so that its buffers do not count as in use
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(_cuda_rates, threads, dtypes).result()
    matrix = {dtype: matrix_rate(threads, dtype) for dtype in dict.fromkeys(dtypes)}
    return {"device": device, "read": memory_bandwidth(threads), "copy": copy_bandwidth(threads), "matrix": matrix}


def _cuda_rates(threads: int, dtypes: list[str]) -> Rates:
    import torch

    matrix = {dtype: matrix_rate(threads, dtype, "cuda") for dtype in dict.fromkeys(dtypes)}
    size = 1 << 30
    a = torch.ones(size // 4, device="cuda")
    b = torch.empty_like(a)

    def copied() -> None:
        b.copy_(a)
        torch.cuda.synchronize()

    rate = 2 * size / _best(copied, 5)
    return {"device": "cuda", "read": rate, "copy": rate, "matrix": matrix}


def _best(work: Callable[[], Any], repeats: int) -> float:
    spans = []
    for _ in range(repeats):
        start = time.monotonic()
        work()
        spans.append(time.monotonic() - start)
    return min(spans)


def cuda_memory(reset: bool = False) -> GpuMemory | None:
    """Peak GPU memory since the last reset; None in a process without a GPU in use."""
    torch = _torch_on_gpu()
    if torch is None:
        return None
    try:
        in_use = int(torch.cuda.device_memory_used())
    except (ImportError, AttributeError, RuntimeError):  # no pynvml, or an older torch
        in_use = None
    memory: GpuMemory = {
        "allocated": int(torch.cuda.max_memory_allocated()), "reserved": int(torch.cuda.max_memory_reserved()), "nvml": in_use,
    }  # fmt: skip
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return memory


def release_cuda() -> None:
    """Release GPU memory that torch kept from loading, and count peaks from here."""
    if torch := _torch_on_gpu():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _torch_on_gpu() -> Any:
    torch = sys.modules.get("torch")  # not imported: nothing is on a GPU
    return torch if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None


def peak_memory(reset: bool = False) -> int | None:
    """Peak resident bytes of this process and its children, such as vLLM's, since their start or the last reset; None if the system
    does not say."""
    peak = 0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(OSError):  # it has ended; or the reset is forbidden, and the peak includes loading
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak += sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
            if reset:
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")
    return peak or None


if __name__ == "__main__":
    note()
