"""Run one stage in a copy of the project, on this machine or on one that Ray sent it to.

A copy holds the project's files as they are, uncommitted edits included, and the outputs that the stage reads, from DVC's cache.
It is used once: what a killed stage left there, or still writes, reaches nobody."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from pipeline.core import artifacts, git, isolate
from pipeline.core.errors import ArtifactError

LOCK = Path("dvc.lock")
COPIES = Path(".dvc/tmp/fan-out")  # on the cache's disk, so that files are linked; `artifacts.from_project` knows this place
ENVS = Path("artifacts/envs")  # built once for all copies
BESIDE = ("artifacts/runs", "artifacts/logs")  # what a stage writes beside its outputs
WRITTEN_S = 10  # DVC has written an entry of its run cache by then
REPRO = ("dvc", "repro", "--single-item")


class Job(NamedTuple):
    """A stage to run. project: the head's folder; inputs: stages whose outputs it reads; lock: dvc.lock; files: what DVC does not
    cache of its inputs; uncached: its own outputs of that kind; cache: DVC's, on a shared disk (None: its default remote carries);
    threads: OMP_NUM_THREADS of the head, which Ray sets otherwise."""

    stage: str
    project: str
    inputs: list[str]
    lock: str
    files: dict[str, bytes]
    uncached: list[str]
    cache: str | None
    threads: str | None


class Ran(NamedTuple):
    """How a job ended. code: 0, or of the command that failed; lock: the copy's dvc.lock; files: what DVC did not cache."""

    code: int
    lock: str
    files: dict[str, bytes]
    log: bytes
    host: str
    seconds: float


def pack(outputs: Iterable[str]) -> bytes:
    """The project's files, as git sees them in this folder, as a tar archive; without stages' `outputs` and dvc.lock."""
    listed = git.ask("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed is None:
        raise ArtifactError("copies of the project are made from what git lists, and this folder is not in git: git init")
    made = {LOCK, *map(Path, outputs)}
    names = [n for n in os.fsdecode(listed).split("\0") if n and os.path.lexists(n) and not made & {Path(n), *Path(n).parents}]
    command = ["tar", "-c", "--null", "-T", "-"]
    return subprocess.run(command, input=os.fsencode("\0".join(names)), capture_output=True, check=True).stdout


def run(job: Job, tree: bytes) -> Ran:
    """Run a stage in a fresh copy made from `tree` and `job`. A process killed meanwhile takes the stage with it."""
    from configobj import ConfigObj

    began, host = time.monotonic(), socket.gethostname()
    top = Path(job.project) if job.cache else Path.home() / ".cache/quantgate"  # of this machine, where no disk is shared
    here = top / COPIES
    here.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix=f"{job.stage}.{host}.", dir=here))
    log = home / "artifacts/logs" / f"{job.stage}.log"
    try:
        subprocess.run(["tar", "-x"], input=tree, cwd=home, check=True)
        for name, content in job.files.items():
            write(home / name, content)
        write(home / LOCK, job.lock.encode())
        config = ConfigObj(str(home / ".dvc/config.local"), encoding="utf-8")  # DVC's own writer knows ASCII only
        config.setdefault("core", {})["no_scm"] = True
        config.setdefault("cache", {})["dir"] = job.cache or str(top / "cache")
        config.write()
        (top / ENVS).mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        (home / ENVS).symlink_to(top / ENVS)
        print(f"{job.stage} runs on {host}, log: {log}", flush=True)
        steps = [["dvc", "checkout", "--force", *job.inputs], [*REPRO, job.stage]]
        if job.cache is None:
            steps = [["dvc", "pull", *job.inputs], [*REPRO, job.stage], ["dvc", "push", "--run-cache", job.stage]]
        code = next((code for step in steps[not job.inputs :] if (code := dvc(step, home, log, job))), 0)
        paths = [*BESIDE, *job.uncached] if code == 0 else BESIDE
        files = {str(f.relative_to(home)): f.read_bytes() for path in paths for f in below(home / path) if f != log}
        lock = (home / LOCK).read_text(encoding="utf-8")
        return Ran(code, lock, files, log.read_bytes(), host, time.monotonic() - began)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def dvc(words: list[str], home: Path, log: Path, job: Job) -> int:
    """Run a command of DVC's in a copy, its output at the end of `log`; returns its exit code."""
    secrets = ("RAY_AUTH", "OMP_NUM_THREADS")
    env = {k: v for k, v in os.environ.items() if not k.startswith(secrets)} | {"DVC_ROOT": job.project}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env |= {} if job.threads is None else {"OMP_NUM_THREADS": job.threads}
    with log.open("ab") as out:
        command, last = [sys.executable, "-m", *words], isolate.end_with_parent
        done = subprocess.run(command, cwd=home, env=env, stdout=out, stderr=subprocess.STDOUT, preexec_fn=last)
    return done.returncode


def sweep(runs: Path) -> None:
    """Remove entries of DVC's run cache without a record, as a full disk leaves them: DVC fails at one on every later run."""
    for run in runs.glob("*/*"):
        if all(file.suffix == ".tmp" for file in run.iterdir()) and time.time() - run.stat().st_mtime > WRITTEN_S:
            shutil.rmtree(run, ignore_errors=True)


def below(path: Path) -> Iterator[Path]:
    """A file, or the files below a folder."""
    yield from (p for p in (path, *path.rglob("*")) if p.is_file())


def write(path: Path, content: bytes) -> None:
    with artifacts.atomic_file(path) as tmp:
        tmp.write_bytes(content)


if __name__ == "__main__":
    sweep(Path(sys.argv[1]))
