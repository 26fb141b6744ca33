"""Separate environments for backends whose pins clash with ours: envs/<name>.txt, built on first use under artifacts/envs/ by the
file's hash. Its comments may be `# on top of ours` (first line), `# with NAME=VALUE` (a variable for the build), `# without NAME`
(uninstalled again) and `# also NAME VERSION` (another name under which a package looks itself up).
`python -m pipeline.core.venvs NAME` builds one."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from filelock import FileLock

from pipeline.core import artifacts, cli, install, isolate
from pipeline.core.errors import ArtifactError, Unsupported

FILES = Path("envs")
HOME = artifacts.ARTIFACTS / "envs"
LAYERED = "# on top of ours"  # its packages take precedence over ours
WITH = re.compile(r"^# with (\w+)=(\S+)$", re.MULTILINE)
WITHOUT = re.compile(r"^# without (\S+)$", re.MULTILINE)
ALSO = re.compile(r"^# also (\S+) (\S+)$", re.MULTILINE)
VLLM = "VLLM_PYTHON"
READY = ".ready"  # written last, into a complete environment
NEVER = "has no wheels with a matching"  # uv's words if a package is not made for this system or Python


def python(name: str) -> Path:
    """The interpreter of an environment, built on first use. Raises `Unsupported` if a package does not exist for this machine, and
    `ArtifactError` for faults that may pass: no network, a full disk, a mirror without the package."""
    home = folder(name)
    HOME.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{home}.lock"):
        if not (home / READY).exists():
            _build(name, FILES / f"{name}.txt", home)
    return home / "bin" / "python"


def is_here(name: str) -> bool:
    return (FILES / f"{name}.txt").exists() and (folder(name) / READY).exists()


def folder(name: str) -> Path:
    text = (FILES / f"{name}.txt").read_bytes()
    base = sysconfig.get_path("purelib") if text.decode().startswith(LAYERED) else ""  # our packages, to which it refers
    return (HOME / f"{name}-{hashlib.sha256(text + sys.version.encode() + base.encode()).hexdigest()[:12]}").resolve()


def vllm() -> str:
    """The interpreter that has vLLM, which at gigabytes is never built on first use."""
    named = os.environ.get(VLLM)
    if named is None and is_here("vllm"):
        return str(folder("vllm") / "bin/python")
    if shutil.which(named or "") is None:
        wrong = f" ({named!r} is not a program)" if named else ""
        build = "build it with `python -m pipeline.core.venvs vllm` (CPU, 3.3 GB)"
        raise Unsupported(f"vLLM needs its own environment: {build}, or set {VLLM} to a Python that has vLLM{wrong}")
    return str(named)


def _build(name: str, wanted: Path, home: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    log = artifacts.LOGS / f"env-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    cli.say("env", f"building {name} from {wanted} (once; log: {log})")
    text = wanted.read_text(encoding="utf-8")
    layered = text.startswith(LAYERED)
    fetch = [*install.uv(Path(sys.prefix) / "bin", home / "bin/python"), "--requirement", str(wanted.absolute())]
    steps = [[sys.executable, "-m", "venv", "--without-pip", str(home)], [*fetch, *(["--no-deps"] if layered else [])]]
    if less := WITHOUT.findall(text):
        steps.append([*fetch[:2], "uninstall", "--python", str(home / "bin/python"), *less])
    variables = install.environment(sys.executable) | dict(WITH.findall(text))
    with log.open("w") as out:
        for step in steps:
            if subprocess.run(step, stdout=out, stderr=subprocess.STDOUT, env=variables).returncode:
                raise _failed(name, log)
    site = next((home / "lib").glob("python*/site-packages"))
    for other, version in ALSO.findall(text):
        info = site / f"{other}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {other}\nVersion: {version}\n", encoding="utf-8")
    if layered:  # folders of a .pth file come after the environment's own, whose packages so win
        (site / "zz-ours.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    (home / READY).touch()


def _failed(name: str, log: Path) -> ArtifactError | Unsupported:
    text = log.read_text(errors="replace")
    if NEVER in text:
        return Unsupported(f"environment {name!r} cannot be built here: a package {NEVER} system or Python (see {log})")
    errors = [line.strip() for line in text.splitlines() if line.strip().lower().startswith(("error:", "cause:"))]
    why = " ".join(dict.fromkeys([errors[0], errors[-1]])) if errors else isolate.last_lines(log, 1) or "no output"
    return ArtifactError(f"environment {name!r} could not be built: {why} (see {log}); try again")


def run(name: str, *arguments: str, log: Path) -> None:
    """Run `python <arguments>` in an environment by `isolate.tool`."""
    isolate.tool([str(python(name)), *arguments], what=name, log=log, env=install.clean())


def main(name: str) -> None:
    """Build the environment of envs/NAME.txt and print the path of its Python."""
    cli.say("env", str(python(name)))


if __name__ == "__main__":
    cli.run(main)
