"""llama.cpp's own programs: built from the source archive of the very llama-cpp-python that is installed; and their output.

The archive carries llama.cpp, so that the programs and the engine are one version, compiled for the same instruction
sets. cmake and ninja come from pip, into an environment of their own. Built once under artifacts/tools/<hash>, some minutes a core.
"""

from __future__ import annotations

import platform
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock

from pipeline.core import artifacts, cli, install
from pipeline.core.errors import Unsupported
from pipeline.speed import hardware

HOME = artifacts.ARTIFACTS / "tools"
PROGRAMS = ("llama-perplexity", "llama-bench")
BUILDERS = ("cmake==4.4.5", "ninja==1.13.2")
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON",  # as the wheel is built
    "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_APP=OFF", "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON", "-DCMAKE_INSTALL_RPATH=$ORIGIN",
)  # fmt: skip
TOLD_EVERY_S = 20


# --- building ----------------------------------------------------------------------------------------------------


def build(threads: int) -> Path:
    """The folder with PROGRAMS and their libraries, built if it is not here yet. Raises `Unsupported` with the log's name."""
    version = metadata.version("llama-cpp-python")
    flags = (*FLAGS, *install.set_switches(install.instruction_sets(install.native_macros("c++"))))
    made_of = [version, *flags, *PROGRAMS, hardware.describe(threads)["cpu"], platform.platform()]
    home = HOME / f"llamacpp-{artifacts.digest(made_of)[:12]}"
    HOME.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{home}.lock"):
        if not home.exists():
            _build(version, home, threads, flags)
    return home


def _build(version: str, home: Path, threads: int, flags: tuple[str, ...]) -> None:
    log = artifacts.LOGS / "llamacpp-tools.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    cli.say("tools", f"building {', '.join(PROGRAMS)} of llama-cpp-python {version} (once; log: {log})")
    with tempfile.TemporaryDirectory(dir=HOME) as tmp, log.open("w") as out, artifacts.atomic_dir(home) as done:
        work = Path(tmp).absolute()
        binaries = work / "env" / "bin"
        _step([sys.executable, "-m", "venv", str(work / "env")], out)
        _step([str(binaries / "pip"), "install", "--quiet", *BUILDERS], out)
        wanted = ["--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={version}"]
        _step([str(binaries / "pip"), "download", "--quiet", *wanted, "--dest", str(work)], out)
        source = _unpack(next(work.glob("llama_cpp_python-*.tar.gz")), work)
        programs = [str(binaries / "cmake"), "-S", str(source), "-B", str(work / "build"), "-G", "Ninja", *flags]
        _step([*programs, f"-DCMAKE_MAKE_PROGRAM={binaries / 'ninja'}"], out)
        _step([str(binaries / "ninja"), "-C", str(work / "build"), "-j", str(threads), *PROGRAMS], out, told=True)
        shutil.copytree(work / "build" / "bin", done, symlinks=True, dirs_exist_ok=True)
    cli.say("tools", f"built into {home}")


def _unpack(archive: Path, into: Path) -> Path:
    """Only llama.cpp's tree; the archive's other files are Python's."""
    with tarfile.open(archive) as tar:
        tar.extractall(into, [m for m in tar.getmembers() if "/vendor/llama.cpp/" in m.name], filter="data")
    return next(into.glob("llama_cpp_python-*/vendor/llama.cpp"))


def _step(command: list[str], out: Any, told: bool = False) -> None:
    """Run a command, its output into the log; told: every now and then its last line on the terminal too."""
    last = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                out.write(line)
                out.flush()
                if told and time.monotonic() - last > TOLD_EVERY_S:
                    last = time.monotonic()
                    cli.say("tools", f"{line.split(' ')[0]} {line.strip().rsplit('/', 1)[-1]}")  # [count/all] file
        except BaseException:
            process.terminate()  # whoever stops this stops the compiler too
            raise
    if process.returncode:
        raise Unsupported(f"{Path(command[0]).name} failed (code {process.returncode}); see {out.name}")


# --- running -----------------------------------------------------------------------------------------------------


def run(home: Path, program: str, *arguments: str) -> str:
    """What a program prints (stdout). Raises `Unsupported` with its last words if it fails."""
    done = subprocess.run([home / program, *arguments], capture_output=True)
    if done.returncode:
        raise Unsupported(f"{program} failed (code {done.returncode}): {done.stderr.decode(errors='replace')[-500:].strip()}")
    return done.stdout.decode(errors="replace")


# --- reading what they say ---------------------------------------------------------------------------------------

# our figure: llama-perplexity's label, and what turns its number into ours
LABELS = {
    "ppl": ("Mean PPL(Q)", 1.0), "ppl_reference": ("Mean PPL(base)", 1.0), "ppl_log_ratio": ("Mean ln(PPL(Q)/PPL(base))", 1.0),
    "ppl_ratio": ("Mean PPL(Q)/PPL(base)", 1.0), "kld_mean": ("Mean KLD", 1.0), "kld_median": ("Median KLD", 1.0),
    "kld_p90": ("90.0% KLD", 1.0), "kld_p95": ("95.0% KLD", 1.0), "kld_p99": ("99.0% KLD", 1.0), "kld_p999": ("99.9% KLD", 1.0),
    "kld_max": ("Maximum KLD", 1.0), "delta_p_mean": ("Mean Δp", 0.01), "delta_p_rms": ("RMS Δp", 0.01),
    "top1_agreement": ("Same top p", 0.01),
}  # fmt: skip


def parse_divergence(text: str) -> dict[str, tuple[float, float | None]]:
    """{our figure: (value, standard error or None)} from the statistics that `llama-perplexity --kl-divergence` prints.

    Raises `Unsupported` if a line is missing: another version may word it otherwise, and a missing figure agrees with nothing.
    """
    said = {}
    for line in text.split("\n"):
        if found := re.match(r"\s*(\S.*?)\s*:\s*(-?[\d.]+)(?:\s*±\s*([\d.]+))?\s*%?\s*$", line):
            said[re.sub(r"\s+", " ", found[1])] = (float(found[2]), float(found[3]) if found[3] else None)
    missing = [label for label, _ in LABELS.values() if label not in said]
    if missing:
        raise Unsupported(f"llama-perplexity printed no {missing[0]!r}; its output ends in: {text[-300:].strip()!r}")
    return {
        name: (said[label][0] * scale, None if said[label][1] is None else said[label][1] * scale)  # type: ignore[operator]
        for name, (label, scale) in LABELS.items()
    }


def base_tokens(path: Path) -> list[int]:
    """The token ids in the file that `--kl-divergence-base` wrote, whole windows one after the other."""
    with path.open("rb") as f:
        if f.read(8) != b"_logits_":
            raise Unsupported(f"{path} does not begin as llama-perplexity's log-probabilities do")
        n_ctx, _, chunks = struct.unpack("<Iii", f.read(12))
        return list(struct.unpack(f"<{n_ctx * chunks}i", f.read(4 * n_ctx * chunks)))
