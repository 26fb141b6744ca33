"""Fifty kills at seeded moments over all stages of a tiny project; what each leaves must be whole, and the next run must pass.

    python tests/bench/kills.py [--kills 50] [--seed 0] [--stage serve]

A kill: `dvc repro --force --single-item STAGE` is started and, at a moment drawn over the stage's own duration, gets Ctrl-C
(SIGINT to the whole group, as a terminal sends it), SIGTERM to dvc, or SIGKILL to dvc or to the stage. Then
- no process of it lives on, and every file under a final name is whole (JSON parses, tables read, manifests' hashes hold);
- the next `dvc repro` exits 0, runs that stage or what follows it and nothing before, and if it runs the stage leaves no
  temporary file; every other time without DVC's run cache, which else gives back what the stage made before it was killed;
- no MLflow run is RUNNING after the next `python -m pipeline.track`.
One variant is also served: by a stub in this process, at a URL. Exits 1 if any of it does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import harness
import psutil
import yaml
from conftest import make_model  # type: ignore[import-not-found]
from serving_server import serving  # type: ignore[import-not-found]

from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError

VARIANTS = {
    "bf16": {"quantizer": "cast", "engine": "hf", "options": {"dtype": "bfloat16"}},
    "int8": {"quantizer": "torchao", "engine": "hf", "options": {"scheme": "int8-weight-only"}},
}
SERVED = "int8"
TIER = {
    "tasks": {"facts": 3, "arithmetic_copy": 3, "prose_ppl": 3}, "documents": 3, "trajectories": 2, "stop": "never",
    "floor": {"tokens": 64, "stepwise": 8},
    "benchmark": {"prompt_tokens": 16, "output_tokens": 4, "warmups": 1, "rounds": 3},
}  # fmt: skip
SIGNALS = ((signal.SIGINT, "group"), (signal.SIGTERM, "dvc"), (signal.SIGKILL, "dvc"), (signal.SIGKILL, "stage"))
ENDS = {".html": b"</html>", ".svg": b"</svg>", ".png": b"IEND"}
GONE_S = 60  # for the processes of a killed run to end
RUN_S = 600


# --- the project -------------------------------------------------------------------------------------------------


@dataclass
class Project:
    """A tiny project in a folder of its own."""

    folder: Path
    stages: dict[str, list[str]] = field(default_factory=dict)  # {stage: its targets}, in the order of dvc.yaml
    seconds: dict[str, float] = field(default_factory=dict)  # how long each target took

    def start(self, *command: str) -> subprocess.Popen[str]:
        more = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        more |= {"MLFLOW_TRACKING_URI": f"sqlite:///{self.folder / 'mlflow.db'}"}
        return subprocess.Popen(
            command, cwd=self.folder, env=harness.environment(self.folder, **more), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True, errors="replace",
        )  # fmt: skip

    def run(self, *command: str) -> tuple[int, str]:
        process = self.start(*command)
        try:
            output, _ = process.communicate(timeout=RUN_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return 124, f"over {RUN_S} s"
        return process.returncode, output


def tiny(folder: Path, url: str) -> None:
    """Write a tiny model into a clone, and params to run it through every stage. url: the stub's, which serves a variant."""
    make_model(folder / "artifacts/source")
    data = harness.settings()
    data |= {"model": {"source": "path", "path": "artifacts/source"}, "variants": VARIANTS, "tier": "smoke"}
    data["tiers"] = {"smoke": data["tiers"]["smoke"] | TIER}
    data["calibration"] |= {"rows": 4, "tokens": 32}
    data["evaluate"]["batch_size"], data["compare"]["resamples"] = 4, 200
    data["diverge"]["window"], data["diverge"]["trajectories"]["tokens"] = 64, 6
    data["serving"]["variants"] = {SERVED: {"url": url}}
    harness.write_params(folder, data)


def build(folder: Path, url: str) -> Project:
    """A clone with a tiny model, run once; how long each stage took is what the moments are drawn from. url: the stub's."""
    harness.clone(folder)
    (folder / "dvc.lock").unlink()  # every stage runs
    tiny(folder, url)
    stages = yaml.safe_load((folder / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    each = {"${variants}": list(VARIANTS), "${serving.variants}": [SERVED]}
    project = Project(folder, {n: [f"{n}@{v}" for v in each[s["foreach"]]] if "foreach" in s else [n] for n, s in stages.items()})
    process, log, began = project.start("dvc", "repro"), [], {}
    assert process.stdout is not None
    for line in process.stdout:
        log.append(line)
        if target := target_of(line):
            began[target] = time.monotonic()
    if process.wait():
        raise SystemExit(f"error: the first dvc repro exited {process.returncode}:\n{''.join(log)[-3000:]}")
    moments = [*began.values(), time.monotonic()]
    project.seconds = {target: after - start for (target, start), after in zip(began.items(), moments[1:])}
    return project


def target_of(line: str) -> str | None:
    """The target in dvc's line `Running stage 'x':`."""
    return line.split("'")[1] if line.startswith("Running stage '") else None


# --- one kill ----------------------------------------------------------------------------------------------------


def kill(project: Project, target: str, sign: signal.Signals, whom: str, after: float) -> tuple[bool, list[str]]:
    """Run a stage, kill it so long after it began; returns (whether it was still running, what is wrong then)."""
    process = project.start("dvc", "repro", "--force", "--single-item", target)
    assert process.stdout is not None
    while (line := process.stdout.readline()) and target_of(line) is None:
        pass
    began = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=after)
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    running = process.poll() is None
    if running:
        send(process, sign, whom)
    else:  # faster than it was; the next moments are drawn over this
        project.seconds[target] = time.monotonic() - began
    alive = still_alive(process, family)
    process.stdout.close()
    return running, [f"{len(alive)} processes lived on: {alive}"] * bool(alive) + list(broken_files(project.folder))


def send(process: subprocess.Popen[str], sign: signal.Signals, whom: str) -> None:
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # it has just ended
        if whom == "group":
            os.killpg(process.pid, sign)
        elif whom == "dvc":
            process.send_signal(sign)
        else:
            for child in psutil.Process(process.pid).children(recursive=True):
                if any("pipeline." in part for part in child.cmdline()):
                    child.send_signal(sign)


def still_alive(process: subprocess.Popen[str], family: list[psutil.Process]) -> list[str]:
    """Names of what is still there after a minute; it is ended, so that the next kill has the project to itself."""
    try:
        process.wait(timeout=GONE_S)
    except subprocess.TimeoutExpired:
        family = [*family, psutil.Process(process.pid)]
    names = []
    for one in psutil.wait_procs(family, timeout=GONE_S)[1]:
        names.append(" ".join(one.cmdline())[:80])
        one.kill()
    return names


def broken_files(folder: Path) -> Iterator[str]:
    """Files under their final names that are not whole."""
    for path in (p for top in ("artifacts", "reports") for p in sorted((folder / top).rglob("*"))):
        if path.is_file() and not any(part.endswith(".tmp") for part in path.relative_to(folder).parts):
            try:
                check_whole(path)
            except (ValueError, ArtifactError) as e:
                yield f"{path.relative_to(folder)} is half-written: {str(e)[:200]}"


def check_whole(path: Path) -> None:
    """Raise `ValueError` or `ArtifactError` where a file is not whole."""
    if path.suffix == ".json":
        value = json.loads(path.read_text(encoding="utf-8"))
        if path.name == artifacts.MANIFEST and "files" in value:
            artifacts.verify_files(path.parent, value)
    elif path.suffix == ".jsonl":
        artifacts.read_jsonl(path)
    elif path.suffix == ".parquet":
        artifacts.read_columns(path)
    elif path.suffix in ENDS and ENDS[path.suffix] not in path.read_bytes()[-16:]:
        raise ValueError("no end")


def next_run(project: Project, target: str, cached: bool) -> tuple[list[str], list[str]]:
    """(what is wrong with the run after a kill, the stages it ran); not `cached`: DVC's run cache must not help."""
    code, output = project.run("dvc", "repro", *([] if cached else ["--no-run-cache"]))
    ran = [t for line in output.split("\n") if (t := target_of(line))]
    wrong = [f"the next dvc repro exited {code}: {output.strip()[-600:]}"] if code else []
    order = list(project.stages)
    early = [t for t in ran if order.index(t.split("@")[0]) < order.index(target.split("@")[0])]
    wrong += [f"the next dvc repro ran {early}, which come before {target}"] * bool(early)
    if unfinished_runs(project.folder):
        project.run(sys.executable, "-m", "pipeline.track")
    names = unfinished_runs(project.folder)
    return wrong + [f"MLflow runs are RUNNING: {names}"] * bool(names), ran


def unfinished_runs(folder: Path) -> list[str]:
    """Names of MLflow runs that are RUNNING."""
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db", timeout=30)) as db:
        return [n for (n,) in db.execute("select name from runs where status = 'RUNNING' and lifecycle_stage = 'active'")]


def temporary_files(folder: Path) -> set[str]:
    """What a killed stage was writing to; git and DVC pass over these names, and the stage's next run removes them."""
    return {str(p.relative_to(folder)) for top in ("artifacts", "reports") for p in (folder / top).rglob(".*.tmp")}


# --- all of them -------------------------------------------------------------------------------------------------


def plan(project: Project, seed: int, only: str | None) -> Iterator[tuple[str, signal.Signals, str, float]]:
    """(target, signal, whom, share of the stage's duration) of each kill, without end: stages in turns, signals in turns."""
    rng = random.Random(seed)
    names = [only] if only else list(project.stages)
    for k in itertools.count():
        target = rng.choice(project.stages[names[k % len(names)]])
        sign, whom = SIGNALS[(k % len(names) + k // len(names)) % len(SIGNALS)]
        yield target, sign, whom, rng.random()


def main(kills: int, seed: int, only: str | None, folder: Path, url: str) -> int:
    start = time.monotonic()
    project = build(folder, url)
    print(f"{len(project.seconds)} stages in {time.monotonic() - start:.0f} s; {kills} kills, seed {seed}", flush=True)
    breaches, late, landed = 0, 0, 0
    stages = set()
    for target, sign, whom, share in plan(project, seed, only):
        if landed == kills:
            break
        of = project.seconds[target]
        before = temporary_files(folder)
        running, wrong = kill(project, target, sign, whom, share * of)
        wrong_next, ran = next_run(project, target, cached=landed % 2 == 1)
        left = sorted(temporary_files(folder) - before) if target in ran else []
        wrong += wrong_next + [f"temporary files stay: {left}"] * bool(left)
        breaches, late, landed = breaches + bool(wrong), late + (not running), landed + running
        stages |= {target.split("@")[0]} if running else set()
        outcome = "; ".join(wrong) if wrong else f"whole; then dvc repro ran {', '.join(ran) or 'nothing'}"
        number = f"{landed:3}" if running else "  -"  # it had ended before the moment came: not a kill
        print(f"{number} {sign.name} to {whom:<5} {target:<15} after {share * of:4.1f} of {of:4.1f} s: {outcome}", flush=True)
    print(f"{landed} kills over {len(stages)} of {len(project.stages)} stages ({late} more came too late)")
    print(f"{breaches} with a breach, {time.monotonic() - start:.0f} s")
    return 1 if breaches else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stage", help="kill only this one")
    asked = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="quantgate-kills-")).resolve()
    try:
        with serving() as server:
            code = main(asked.kills, asked.seed, asked.stage, home, server.url)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    sys.exit(code)
