"""Separate environments for backends whose pins clash with ours: envs/<name>.txt, built on first use under artifacts/envs/ by the
file's hash. The file may say `# on top of ours` (first line) and `# with NAME=VALUE` (a variable for its build)."""

from __future__ import annotations

import hashlib
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
LAYERED = "# on top of ours"  # first line of a file whose packages take precedence over ours
WITH = re.compile(r"^# with (\w+)=(\S+)$", re.MULTILINE)  # a variable that a package's build reads
READY = ".ready"  # written last: an environment without it was not finished
NEVER = "has no wheels with a matching"  # uv of a package that is not made for this system or Python


def python(name: str) -> Path:
    """The interpreter of an environment, built on first use.
    Raises `Unsupported` if a package does not exist for this machine, and `ArtifactError` for faults that may pass: no network,
    a full disk, a mirror without the package."""
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
    base = sysconfig.get_path("purelib") if text.decode().startswith(LAYERED) else ""  # it points there
    return (HOME / f"{name}-{hashlib.sha256(text + sys.version.encode() + base.encode()).hexdigest()[:12]}").resolve()


def _build(name: str, wanted: Path, home: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    log = artifacts.LOGS / f"env-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    cli.say("env", f"building {name} from {wanted} (once; log: {log})")
    text = wanted.read_text(encoding="utf-8")
    layered = text.startswith(LAYERED)
    fetch = [*install.uv(Path(sys.prefix) / "bin", home / "bin/python"), "--requirement", str(wanted.absolute())]
    steps = [sys.executable, "-m", "venv", "--without-pip", str(home)], [*fetch, *(["--no-deps"] if layered else [])]
    variables = install.environment(sys.executable) | dict(WITH.findall(text))
    with log.open("w") as out:
        for step in steps:
            if subprocess.run(step, stdout=out, stderr=subprocess.STDOUT, env=variables).returncode:
                raise _failed(name, log)
    if layered:  # a .pth file's folders come after the environment's own: what it installed wins
        site = next((home / "lib").glob("python*/site-packages"))
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
    """Run `python <arguments>` in an environment, as `isolate.tool` does."""
    isolate.tool([str(python(name)), *arguments], what=name, log=log, env=install.clean())
