"""Install the project into .venv: `python3 -m pipeline.core.install`, which `make` runs. Standard library only.

uv fetches the packages at the versions of constraints.txt. llama.cpp is compiled last, so that its failure leaves the rest
installed. The environments of other backends use these settings too."""

from __future__ import annotations

import ast
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from pipeline.core import quota

VENV = Path(".venv")
LOG = VENV / "install.log"
PINS = ["-c", "constraints.txt", "-c", "constraints-dev.txt"]
LESS = Path("envs/llamacpp.cmake")
AGAIN = "python3 -m pipeline.core.install"
EVERY_S = 10  # between lines of progress
TAIL = 10  # lines of the log to show after a failure
WRONG = re.compile(r"\berror:|\bfatal\b|FAILED:|cause:|hint:", re.IGNORECASE)

# Variables that would bring in another Python's packages or install elsewhere.
ELSEWHERE = {
    "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON",
    "UV_PYTHON", "UV_SYSTEM_PYTHON",
}  # fmt: skip
# pip's settings and their names in uv, which does not read pip's. Lists are separated by white space, find-links by commas.
FOR_UV = {
    "index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS", "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST", "constraint": "UV_CONSTRAINT", "cert": "SSL_CERT_FILE", "proxy": "ALL_PROXY",
}  # fmt: skip
# llama.cpp's switches for instruction sets, and the compiler's macros for them. Without AMX: compiled by GCC 12, its kernels
# die of SIGILL at their first product (llama.cpp pull request 26954).
SETS = {
    "SSE42": "SSE4_2", "AVX": "AVX", "F16C": "F16C", "FMA": "FMA", "BMI2": "BMI2", "AVX2": "AVX2", "AVX_VNNI": "AVXVNNI",
    "AVX512": "AVX512F AVX512CD AVX512VL AVX512DQ AVX512BW", "AVX512_VBMI": "AVX512VBMI", "AVX512_VNNI": "AVX512VNNI",
    "AVX512_BF16": "AVX512BF16",
}  # fmt: skip
ASK_LLAMACPP = "import llama_cpp; print(llama_cpp.llama_print_system_info().decode())"


def clean() -> dict[str, str]:
    """This process's variables without those that lead to another environment."""
    return {k: v for k, v in os.environ.items() if k not in ELSEWHERE} | {"PIP_USER": "0"}  # overrides pip's files


def for_uv(listed: str) -> dict[str, str]:
    """uv's variables for the settings that `pip config list` prints."""
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # all indexes, as pip does, not only the first with the package
    for source in ("global.", "install.", ":env:."):  # later ones override earlier ones
        for key, _, value in (line.partition("=") for line in listed.splitlines()):
            name = key.removeprefix(source)
            if name != key and name in FOR_UV:
                variables[FOR_UV[name]] = ("," if name == "find-links" else " ").join(str(ast.literal_eval(value)).split())
    return variables


def environment(python: str | Path) -> dict[str, str]:
    """Variables for installing: `clean` ones, and pip's settings for uv unless uv's own are set."""
    listed = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True, env=clean())
    return for_uv(listed.stdout) | clean()


def uv(folder: Path, python: str | Path) -> list[str]:
    """The command that installs into the environment of `python`, compiled to bytecode once and not by each process."""
    return [str(folder / "uv"), "pip", "install", "--compile-bytecode", "--python", str(python)]


def instruction_sets(macros: str) -> list[str]:
    """llama.cpp's names of the instruction sets in a compiler's macros; empty unless they are for x86-64."""
    defined = set(re.findall(r"^#define __(\w+?)__ ", macros, re.MULTILINE))
    return [name for name, needed in SETS.items() if defined.issuperset(needed.split())] if "x86_64" in defined else []


def native_macros(compiler: str) -> str:
    """Macros that a compiler defines for this processor: instruction sets that both of them support."""
    ask = [compiler, "-march=native", "-E", "-dM", "-x", "c++", os.devnull]
    return subprocess.run(ask, capture_output=True, text=True).stdout


def set_switches(sets: list[str]) -> list[str]:
    """CMake's arguments for exactly these sets; empty for none, where llama.cpp's defaults are best.
    Not -march=native: it would include AMX, and caches tell wheels apart by their settings."""
    return ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}={'ON' if name in sets else 'OFF'}" for name in SETS)] if sets else []


def built_for(python: str | Path) -> list[str] | None:
    """Instruction sets of the installed llama.cpp, asked in a process that it may kill; None if it does not run."""
    asked = subprocess.run([python, "-c", ASK_LLAMACPP], capture_output=True, text=True, env=clean())
    return None if asked.returncode else re.findall(r"(\w+) = 1\b", asked.stdout)


def as_asked(built: list[str] | None, sets: list[str]) -> bool:
    """Whether the installed llama.cpp is compiled for exactly these sets; it does not report SSE42."""
    reported = {s for s in built or () if s.startswith(("AVX", "AMX", "F16C", "FMA", "BMI2"))}
    return built is not None and (not sets or reported == set(sets) - {"SSE42"})


def say(text: str) -> None:
    print(f"{'install':<10} {text}", flush=True)


def follow(command: list[str], env: dict[str, str]) -> int:
    """Run a command with its output in LOG; report progress, and its last lines if it fails. Returns its exit code."""
    start = time.monotonic()
    with LOG.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
    while process.poll() is None:
        try:
            process.wait(EVERY_S)
        except subprocess.TimeoutExpired:
            lines = LOG.read_text("utf-8", "replace").splitlines() or [""]
            print(f"{'':<10} {time.monotonic() - start:4.0f} s  {lines[-1].strip()[:90]}", flush=True)
    if process.returncode:
        lines = [line.strip()[:200] for line in LOG.read_text("utf-8", "replace").splitlines()]
        print("\n".join([line for line in lines if WRONG.search(line)][-TAIL:] or lines[-TAIL:]))
    return process.returncode


def main() -> None:
    """Make .venv, fetch uv, install the packages, compile llama.cpp."""
    start, python = time.monotonic(), VENV / "bin" / "python"
    say(f"1/4  .venv with Python {platform.python_version()}")
    if subprocess.run([sys.executable, "-m", "venv", str(VENV)], env=clean()).returncode:
        sys.exit("error: .venv could not be made")
    env = environment(python)
    say("2/4  uv, which installs faster than pip")
    if follow([str(python), "-m", "pip", "install", "--quiet", "uv", *PINS], env):
        sys.exit(f"error: uv could not be installed (log: {LOG}); the same command tries again")
    say("3/4  everything but llama.cpp")
    if follow([*uv(VENV / "bin", python), "-e", ".[dev]", *PINS], env):
        sys.exit(f"error: packages could not be installed (log: {LOG}); the same command tries again")
    say(f"     installed, {time.monotonic() - start:.0f} s")
    compile_llamacpp(uv(VENV / "bin", python), env, python)
    say(f"done in {time.monotonic() - start:.0f} s")


def compile_llamacpp(command: list[str], env: dict[str, str], python: Path) -> None:
    """Compile llama.cpp for this processor, unless that is done. Without a compiler, say what will be missing."""
    compiler = shutil.which(env.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        say("4/4  llama.cpp is skipped: there is no C++ compiler. Its variants will be unsupported; all others work.")
        say(f"     To add it, install g++; then `{AGAIN}` and `dvc repro --force-downstream quantize@VARIANT`")
        return
    chosen, sets, built = env.get("CMAKE_ARGS", ""), instruction_sets(native_macros(compiler)), built_for(python)
    if built is not None and (chosen or as_asked(built, sets)):
        say(f"4/4  llama.cpp is here, compiled for {' '.join(built)}")
        return
    say(f"4/4  llama.cpp, compiled for {' '.join(sets) or 'this processor'} on {quota.processors()} cores: a few minutes")
    subprocess.run([*command[:2], "uninstall", "--python", str(python), "llama-cpp-python"], capture_output=True, env=env)
    arguments = [*set_switches(sets), "-DLLAVA_BUILD=OFF", *shlex.split(chosen)]  # no images are read; CMAKE_ARGS override ours
    less = f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={LESS.absolute()}"
    env = {"CMAKE_BUILD_PARALLEL_LEVEL": str(quota.processors())} | env | {"CMAKE_ARGS": shlex.join([less, *arguments])}
    # uv caches wheels by these settings (the path above differs between checkouts). Offline first: online it asks the index
    # whether the source has changed, and some indexes always say yes
    wanted = ["llama-cpp-python", *PINS, *(word for argument in arguments for word in ("-C", f"cmake.args={argument}"))]
    if subprocess.run([*command, "--offline", "--no-build-isolation", *wanted], capture_output=True, env=env).returncode == 0:
        say("     taken from uv's cache, where it was compiled in the same way")
    elif follow([*command, "-v", *wanted], env):
        sys.exit(
            f"error: llama.cpp could not be compiled (log: {LOG}); everything else is installed. The same command tries again, "
            "`touch .venv/installed` goes on without it: its variants will be unsupported"
        )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
