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
from importlib import metadata
from pathlib import Path

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


# --- building ----------------------------------------------------------------------------------------------------


def build(threads: int) -> Path:
    """The folder with PROGRAMS and their libraries, built if it is not here yet. Raises `Unsupported` with the log's name."""
    version = metadata.version("llama-cpp-python")
    flags = (*FLAGS, *install.set_switches(install.instruction_sets(install.native_macros("c++"))))
    made_of = [version, *flags, *PROGRAMS, hardware.describe(threads)["cpu"], platform.platform()]
    home, log = HOME / f"llamacpp-{artifacts.digest(made_of)[:12]}", artifacts.LOGS / "llamacpp-tools.log"
    if home.exists():
        return home
    for folder in (HOME, log.parent):
        folder.mkdir(parents=True, exist_ok=True)
    cli.say("tools", f"building {', '.join(PROGRAMS)} of llama-cpp-python {version} (once; log: {log})")
    with tempfile.TemporaryDirectory(dir=HOME) as tmp, log.open("w") as out, artifacts.atomic_dir(home) as done:
        work = Path(tmp).absolute()
        binaries, made = work / "env/bin", work / "build"
        pip: list[str | Path] = [binaries / "python", "-m", "pip", "--quiet"]

        def step(*command: str | Path) -> None:
            if code := subprocess.run(command, stdout=out, stderr=out).returncode:
                raise Unsupported(f"{Path(command[0]).name} failed (code {code}); see {log}")

        step(sys.executable, "-m", "venv", work / "env")
        step(*pip, "install", *BUILDERS)
        step(*pip, "download", "--no-deps", "--no-binary", ":all:", f"llama-cpp-python=={version}", "--dest", work)
        with tarfile.open(next(work.glob("llama_cpp_python-*.tar.gz"))) as archive:
            members = [m for m in archive.getmembers() if "/vendor/llama.cpp/" in m.name]  # the rest is Python's
            archive.extractall(work, members, filter="data")
        source = next(work.glob("llama_cpp_python-*/vendor/llama.cpp"))
        ninja = binaries / "ninja"
        step(binaries / "cmake", "-S", source, "-B", made, "-G", "Ninja", *flags, f"-DCMAKE_MAKE_PROGRAM={ninja}")
        step(ninja, "-C", made, "-j", str(threads), *PROGRAMS)
        shutil.copytree(made / "bin", done, symlinks=True, dirs_exist_ok=True)
    return home


# --- running, and reading what they say --------------------------------------------------------------------------


def run(home: Path, program: str, *arguments: str) -> str:
    """What a program prints (stdout). Raises `Unsupported` with its last words if it fails."""
    done = subprocess.run([home / program, *arguments], capture_output=True)
    if done.returncode:
        raise Unsupported(f"{program} failed (code {done.returncode}): {done.stderr.decode(errors='replace')[-500:].strip()}")
    return done.stdout.decode(errors="replace")


# our metric: llama-perplexity's label, and what turns its number into ours
LABELS = {
    "ppl": ("Mean PPL(Q)", 1.0), "ppl_reference": ("Mean PPL(base)", 1.0), "ppl_log_ratio": ("Mean ln(PPL(Q)/PPL(base))", 1.0),
    "ppl_ratio": ("Mean PPL(Q)/PPL(base)", 1.0), "kld_mean": ("Mean KLD", 1.0), "kld_median": ("Median KLD", 1.0),
    "kld_p90": ("90.0% KLD", 1.0), "kld_p95": ("95.0% KLD", 1.0), "kld_p99": ("99.0% KLD", 1.0), "kld_p999": ("99.9% KLD", 1.0),
    "kld_max": ("Maximum KLD", 1.0), "delta_p_mean": ("Mean Δp", 0.01), "delta_p_rms": ("RMS Δp", 0.01),
    "top1_agreement": ("Same top p", 0.01),
}  # fmt: skip


def parse_divergence(text: str) -> dict[str, tuple[float, float | None]]:
    """{our metric: (value, standard error or None)} from the statistics that `llama-perplexity --kl-divergence` prints.

    Raises `Unsupported` if a line is missing: another version may word it otherwise, and a missing figure agrees with nothing.
    """
    printed = {}
    for line in text.split("\n"):
        if match := re.match(r"\s*(\S.*?)\s*:\s*(-?[\d.]+)(?:\s*±\s*([\d.]+))?\s*%?\s*$", line):
            printed[re.sub(r"\s+", " ", match[1])] = (float(match[2]), float(match[3]) if match[3] else None)
    missing = [label for label, _ in LABELS.values() if label not in printed]
    if missing:
        raise Unsupported(f"llama-perplexity printed no {missing[0]!r}; its output ends in: {text[-300:].strip()!r}")
    metrics = {}
    for name, (label, scale) in LABELS.items():
        value, error = printed[label]
        metrics[name] = value * scale, None if error is None else error * scale
    return metrics


def base_tokens(path: Path) -> list[int]:
    """The token ids in the file that `--kl-divergence-base` wrote, whole windows one after the other."""
    with path.open("rb") as f:
        if f.read(8) != b"_logits_":
            raise Unsupported(f"{path} does not begin as llama-perplexity's log-probabilities do")
        n_ctx, _, chunks = struct.unpack("<Iii", f.read(12))
        return list(struct.unpack(f"<{n_ctx * chunks}i", f.read(4 * n_ctx * chunks)))
