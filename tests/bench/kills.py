"""Fifty kills at seeded moments over all stages of a tiny project; what each leaves must be whole, and the next run must pass.

python tests/bench/kills.py [--kills 50] [--seed 0] [--stage serve] [--keep FOLDER]    (a FOLDER with a project of before is
used again)

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
from typing import IO, Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from conftest import make_model  # type: ignore[import-not-found]  # noqa: E402
from serving_server import serving  # type: ignore[import-not-found]  # noqa: E402

from pipeline.core import artifacts  # noqa: E402
from pipeline.core.errors import ArtifactError  # noqa: E402

BIN = Path(sys.executable).parent
VARIANTS = {
    "bf16": {"quantizer": "cast", "engine": "hf", "options": {"dtype": "bfloat16"}},
    "int8": {"quantizer": "torchao", "engine": "hf", "options": {"scheme": "int8-weight-only"}},
}
SMALL = {  # paths into params.yaml; those that are not there are passed over
    "calibration.rows": 4, "calibration.tokens": 32, "evaluate.batch_size": 4, "diverge.window": 64,
    "diverge.trajectories.tokens": 6, "diverge.floor.tokens": 64, "diverge.floor.stepwise": 8,
    "benchmark.prompt_tokens": 16, "benchmark.output_tokens": 4, "compare.resamples": 200,
    "tiers.smoke.tasks": {"facts": 3, "arithmetic_copy": 3, "prose_ppl": 3}, "tiers.smoke.documents": 3,
    "tiers.smoke.trajectories": 2, "tiers.smoke.floor.tokens": 64, "tiers.smoke.floor.stepwise": 8,
    "tiers.smoke.benchmark.prompt_tokens": 16, "tiers.smoke.benchmark.output_tokens": 4, "tiers.smoke.benchmark.contexts": [],
    "tiers.smoke.benchmark.batches": [],
}  # fmt: skip
SERVED = "int8"
SIGNALS = ((signal.SIGINT, "group"), (signal.SIGTERM, "dvc"), (signal.SIGKILL, "dvc"), (signal.SIGKILL, "stage"))
START_S = 2.0  # of an interpreter and its imports, at least
GONE_S = 60  # for the processes of a killed run to end
RUN_S = 600


@dataclass
class House:
    """A tiny project in a folder of its own."""

    folder: Path
    stages: dict[str, list[str]] = field(default_factory=dict)  # {stage: its targets}, in the order of dvc.yaml
    seconds: dict[str, float] = field(default_factory=dict)  # how long each target took

    def env(self) -> dict[str, str]:
        return os.environ | {
            "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "MLFLOW_TRACKING_URI": f"sqlite:///{self.folder / 'mlflow.db'}", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=self.folder, env=self.env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, errors="replace",
        )  # fmt: skip

    def run(self, *command: str) -> tuple[int, str]:
        process = self.start(*command)
        try:
            output, _ = process.communicate(timeout=RUN_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return 124, f"over {RUN_S} s"
        return process.returncode, output

    def must(self, *command: str) -> str:
        code, output = self.run(*command)
        if code:
            raise SystemExit(f"error: {' '.join(command)} exited {code} before any kill:\n{output[-3000:]}")
        return output


def build(folder: Path, url: str) -> House:
    """The project, committed, and run once; how long each stage took is what the moments are drawn from. url: the stub's."""
    if (folder / "dvc.lock").exists():
        return _again(folder, url)
    for name in ("pipeline", "evalsets", "envs", "gate"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", "params.yaml", "constraints.txt", ".gitignore", ".dvcignore"):
        shutil.copy(ROOT / name, folder / name)
    make_model(folder / "artifacts" / "source")
    _shrink(folder / "params.yaml")
    _serve(folder / "params.yaml", url)
    house = House(folder)
    for command in (("git", "init", "-q"), ("dvc", "init", "-q"), ("git", "add", "-A")):
        house.must(*command)
    house.must("git", "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-qm", "start")
    house.stages = _targets(folder)
    _first_run(house)
    return house


def _targets(folder: Path) -> dict[str, list[str]]:
    stages = yaml.safe_load((folder / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    each = {"${variants}": list(VARIANTS), "${serving.variants}": [SERVED]}
    return {n: [f"{n}@{v}" for v in each[s["foreach"]]] if "foreach" in s else [n] for n, s in stages.items()}


def _again(folder: Path, url: str) -> House:
    """A project that is there already; its stages wrote down how long their work took, which leaves out their start."""
    house = House(folder, _targets(folder))
    _serve(folder / "params.yaml", url)  # another port than before
    house.must("dvc", "repro")
    for target in [t for own in house.stages.values() for t in own]:
        path = folder / artifacts.RUNS / f"{target}.json"
        house.seconds[target] = START_S + (json.loads(path.read_text("utf-8"))["wall_s"] if path.exists() else 0.0)
    return house


def _shrink(path: Path) -> None:
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    data |= {"model": {"source": "path", "path": "artifacts/source"}, "variants": VARIANTS, "tier": "smoke"}
    for name, value in SMALL.items():
        *parents, key = name.split(".")
        at: Any = data
        for parent in parents:
            at = at.get(parent, {}) if isinstance(at, dict) else {}
        if key in at:
            at[key] = value
    data["tiers"] = {"smoke": data["tiers"]["smoke"]}
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")


def _serve(path: Path, url: str) -> None:
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    data["serving"]["variants"] = {SERVED: {"url": url}}
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")


def _first_run(house: House) -> None:
    process, log, began = house.start("dvc", "repro"), [], {}
    assert process.stdout is not None
    for line in process.stdout:
        log.append(line)
        if target := _named(line):
            began[target] = time.monotonic()
    if process.wait():
        raise SystemExit(f"error: the first dvc repro exited {process.returncode}:\n{''.join(log)[-3000:]}")
    moments = [*began.values(), time.monotonic()]
    house.seconds = {target: after - start for (target, start), after in zip(began.items(), moments[1:])}


def _named(line: str) -> str | None:
    """The target in dvc's line `Running stage 'x':`."""
    return line.split("'")[1] if line.startswith("Running stage '") else None


# --- one kill ----------------------------------------------------------------------------------------------------


def kill(house: House, target: str, sign: signal.Signals, whom: str, after: float) -> tuple[bool, list[str]]:
    """Run a stage, kill it so long after it began; returns (whether it was still running, what is wrong then)."""
    process = house.start("dvc", "repro", "--force", "--single-item", target)
    assert process.stdout is not None
    while (line := process.stdout.readline()) and _named(line) is None:
        pass
    began = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=after)
    pids, running = _family(process.pid), process.poll() is None
    if running:
        _send(process, sign, whom)
    else:  # faster than it was; the next moments are drawn over this
        house.seconds[target] = time.monotonic() - began
    left = _wait_gone(process, pids)
    process.stdout.close()
    return running, [f"{len(left)} processes lived on: {left}"] * bool(left) + list(broken_files(house.folder))


def _send(process: subprocess.Popen[str], sign: signal.Signals, whom: str) -> None:
    try:
        if whom == "group":
            os.killpg(process.pid, sign)
        elif whom == "dvc":
            process.send_signal(sign)
        else:
            for child in psutil.Process(process.pid).children(recursive=True):
                if any("pipeline." in part for part in child.cmdline()):
                    child.send_signal(sign)
    except (psutil.NoSuchProcess, ProcessLookupError):
        pass  # it had just ended


def _family(pid: int) -> list[psutil.Process]:
    try:
        return [*psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _wait_gone(process: subprocess.Popen[str], family: list[psutil.Process]) -> list[str]:
    """Names of what is still there after a minute; it is ended, so that the next kill has the house to itself."""
    try:
        process.wait(timeout=GONE_S)
    except subprocess.TimeoutExpired:
        family = [*family, psutil.Process(process.pid)]
    _, alive = psutil.wait_procs(family, timeout=GONE_S)
    names = []
    for one in alive:
        names.append(" ".join(one.cmdline())[:80])
        one.kill()
    return names


def broken_files(folder: Path) -> Iterator[str]:
    """Files under their final names that are not whole."""
    for top in ("artifacts", "reports"):
        for path in sorted((folder / top).rglob("*")):
            hidden = any(part.endswith(".tmp") for part in path.relative_to(folder).parts)
            if path.is_file() and not hidden and (why := _broken(path)):
                yield f"{path.relative_to(folder)} is half-written: {why}"


def _broken(path: Path) -> str | None:
    try:
        if path.name == artifacts.MANIFEST and "files" in json.loads(path.read_text(encoding="utf-8")):
            artifacts.verify_files(path.parent, artifacts.read_manifest(path.parent))
        elif path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".jsonl":
            artifacts.read_jsonl(path)
        elif path.suffix == ".parquet":
            artifacts.read_columns(path)
        elif path.suffix in (".html", ".svg"):
            return None if path.read_text(encoding="utf-8").rstrip().endswith(f"</{path.suffix[1:]}>") else "no end"
        elif path.suffix == ".png":
            return None if path.read_bytes()[-8:-4] == b"IEND" else "no end"
    except (ValueError, ArtifactError) as e:
        return str(e)[:200]
    return None


def next_run(house: House, target: str, cached: bool) -> tuple[list[str], list[str]]:
    """(what is wrong with the run after a kill, the stages it ran); not `cached`: DVC's run cache must not help."""
    code, output = house.run("dvc", "repro", *([] if cached else ["--no-run-cache"]))
    ran = [t for line in output.split("\n") if (t := _named(line))]
    wrong = [f"the next dvc repro exited {code}: {output.strip()[-600:]}"] if code else []
    order = list(house.stages)
    early = [t for t in ran if order.index(t.split("@")[0]) < order.index(target.split("@")[0])]
    wrong += [f"the next dvc repro ran {early}, which come before {target}"] * bool(early)
    return wrong + _still_running(house), ran


def temporary_files(folder: Path) -> set[str]:
    """What a killed stage was writing to; git and DVC pass over these names, and the stage's next run removes them."""
    return {str(p.relative_to(folder)) for top in ("artifacts", "reports") for p in (folder / top).rglob(".*.tmp")}


def _still_running(house: House) -> list[str]:
    """MLflow runs that are RUNNING; if there are any, after one more `track`."""
    for last in (False, True):
        with sqlite3.connect(house.folder / "mlflow.db", timeout=30) as db:
            names = [n for (n,) in db.execute("select name from runs where status = 'RUNNING' and lifecycle_stage = 'active'")]
        db.close()
        if not names or last:
            break
        house.run(sys.executable, "-m", "pipeline.track")
    return [f"MLflow runs are RUNNING: {names}"] * bool(names)


# --- all of them -------------------------------------------------------------------------------------------------


def plan(house: House, seed: int, only: str | None = None) -> Iterator[tuple[str, signal.Signals, str, float]]:
    """(target, signal, whom, share of the stage's duration) of each kill, without end: stages in turns, signals in turns."""
    rng = random.Random(seed)
    names = [only] if only else list(house.stages)
    for k in itertools.count():
        target = rng.choice(house.stages[names[k % len(names)]])
        sign, whom = SIGNALS[(k % len(names) + k // len(names)) % len(SIGNALS)]
        yield target, sign, whom, rng.random()


def main(kills: int, seed: int, folder: Path, only: str | None = None, out: IO[str] = sys.stdout) -> int:
    with serving() as server:
        return _all(kills, seed, folder, only, server.url, out)


def _all(kills: int, seed: int, folder: Path, only: str | None, url: str, out: IO[str]) -> int:
    start = time.monotonic()
    house = build(folder, url)
    took = time.monotonic() - start
    print(f"a tiny project in {folder}: {len(house.seconds)} stages in {took:.0f} s; {kills} kills, seed {seed}",
          file=out, flush=True)  # fmt: skip
    breaches, late, landed, hit = 0, 0, 0, set()
    for target, sign, whom, share in plan(house, seed, only):
        if landed == kills:
            break
        of = house.seconds[target]
        before = temporary_files(house.folder)
        running, wrong = kill(house, target, sign, whom, share * of)
        more, ran = next_run(house, target, cached=landed % 2 == 1)
        left = sorted(temporary_files(house.folder) - before) if target in ran else []
        wrong += more + [f"temporary files stay: {left}"] * bool(left)
        breaches, late, landed = breaches + bool(wrong), late + (not running), landed + running
        hit |= {target.split("@")[0]} if running else set()
        told = "; ".join(wrong) if wrong else f"whole; then dvc repro ran {', '.join(ran) or 'nothing'}"
        number = f"{landed:3}" if running else "  -"  # it had ended before the moment came: not a kill
        print(f"{number} {sign.name} to {whom:<5} {target:<15} after {share * of:4.1f} of {of:4.1f} s: {told}",
              file=out, flush=True)  # fmt: skip
    print(f"{landed} kills over {len(hit)} of {len(house.stages)} stages ({late} more came too late), {breaches} with a breach, "
          f"{time.monotonic() - start:.0f} s", file=out, flush=True)  # fmt: skip
    return 1 if breaches else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stage", help="kill only this one")
    parser.add_argument("--keep", type=Path, help="folder for the project; left there")
    asked = parser.parse_args()
    place = asked.keep or Path(tempfile.mkdtemp(prefix="quantgate-kills-"))
    place.mkdir(parents=True, exist_ok=True)
    code = main(asked.kills, asked.seed, place.resolve(), asked.stage)
    if not asked.keep:
        shutil.rmtree(place, ignore_errors=True)
    sys.exit(code)
