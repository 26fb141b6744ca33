"""Fan-out by Ray: how much faster, whether results are those of a serial run, what kills cost. Needs Ray: pip install -e '.[ray]'.

    python tests/bench/fan_out.py sleep [--workers 8] [--seconds 60]   16 stages that sleep, against the sum of their sleeps
    python tests/bench/fan_out.py kills [--workers 3] [--kills 20] [--seed 0]
    python tests/bench/fan_out.py pipeline [--workers 2,3] [--full]  every stage on a tiny model; --full: full.yaml at tier smoke

`kills`: at seeded moments a worker, and every seventh time the head, gets SIGKILL, until so many landed; dvc.lock must then be that
of a serial run, byte for byte, and no stage carried twice. Exits 1 where a claim does not hold; the folders then stay.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import kills as tiny_project
import psutil
import yaml
from serving_server import serving  # type: ignore[import-not-found]

from pipeline import fan_out
from pipeline.core import artifacts
from pipeline.fan_out import Cluster, Folder, Needs

DVC = [sys.executable, "-m", "dvc"]
DRIVE = [sys.executable, str(Path(__file__).resolve()), "drive", "--workers"]
QUALITY = ("check", "download", "calibrate", "quantize", "reference", "floor", "diverge", "evaluate")
TIMED = {"params": [{"reports/machine.yaml": ["machine"]}]}


def run(folder: Path, *command: str) -> str:
    """Run a command in a folder; returns what it printed."""
    code = folder if (folder / "pipeline").is_dir() else harness.ROOT
    done = subprocess.run(command, cwd=folder, env=harness.environment(code), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {command} in {folder}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def stub(folder: Path, stages: dict[str, Any]) -> Path:
    """A project of such stages in git."""
    for name, text in {".gitignore": "/artifacts/\n/out/\n", "in": "a\n", "reports/machine.yaml": "machine: one\n"}.items():
        artifacts.write_text(folder / name, text)
    artifacts.write_json(folder / "dvc.yaml", {"stages": stages})
    for words in ("init -q", "config user.name a", "config user.email a@b"):
        run(folder, "git", *words.split())
    run(folder, *DVC, "init", "-q")
    run(folder, "git", "add", "-A")
    run(folder, "git", "commit", "-qm", "x")
    return folder


def stage(name: str, seconds: float, *deps: str, **more: Any) -> dict[str, Any]:
    """Write a file that follows from the deps in two steps, and sleep between them."""
    cmd = f"mkdir -p out && cat {' '.join(deps)} > out/{name} && sleep {seconds} && echo {name} >> out/{name}"
    return {"cmd": cmd, "deps": list(deps), "outs": [f"out/{name}"]} | more


def layered(seconds: float) -> dict[str, Any]:
    """Eight variants: made, scored, two of them timed, and joined in what is not cached."""
    stages = {"a-base": stage("base", seconds, "in")}
    for v in range(8):
        stages[f"make{v}"] = stage(f"make{v}", seconds, "out/base")
        stages[f"score{v}"] = stage(f"score{v}", seconds, f"out/make{v}", "out/base")
    stages |= {f"time{v}": stage(f"time{v}", seconds, f"out/make{v}", **TIMED) for v in range(2)}
    joined = [f"out/score{v}" for v in range(8)] + ["out/time0", "out/time1"]
    stages["compare"] = stage("all", seconds, *joined, outs=[{"out/all": {"cache": False}}])
    return stages | {"gate": stage("gate", 0, "out/all")}


def drive(workers: int) -> int:
    """Fan out in this folder, whatever its stages are."""
    began = time.monotonic()
    cluster = Cluster(None, workers)
    print(f"Ray is up after {time.monotonic() - began:.0f} s", flush=True)
    began = time.monotonic()
    line = fan_out.fan_out(cluster, lambda name: Needs())
    print(f"took {time.monotonic() - began:.1f}")
    return 1 if line.are("failed") else 0


def sleep(top: Path, workers: int, seconds: float) -> list[str]:
    folder = stub(top / "a", {f"s{k:02}": stage(f"s{k:02}", seconds, "in") for k in range(16)})
    took, serial = float(run(folder, *DRIVE, str(workers)).split()[-1]), 16 * seconds
    print(f"{workers} workers: {serial:.0f} s of sleep in {took:.0f} s without Ray's start: {serial / took:.2f} times as fast")
    return ["less than 7/8 of it"] if serial / took < 7 / 8 * workers else []


def kills(top: Path, workers: int, count: int, seed: int) -> list[str]:
    rng, landed, rounds, wrong = random.Random(seed), 0, 0, list[str]()
    serial = stub(top / "serial", layered(2))
    run(serial, *DVC, "repro")
    while landed < count:
        folder, starts, ended = top / f"round{(rounds := rounds + 1)}", 0, False
        run(top, "git", "clone", "-q", str(serial), str(folder))
        with (top / f"{folder.name}.log").open("w+") as log:
            while not ended:
                starts += 1
                head = psutil.Popen([*DRIVE, str(workers)], cwd=folder, env=harness.environment(), stdout=log, stderr=log)
                while head.poll() is None and landed < count:
                    with contextlib.suppress(psutil.TimeoutExpired):
                        head.wait(timeout=rng.uniform(1, 6))
                    if victim := head if landed % 7 == 6 and head.poll() is None else busy(head, rng):
                        print(
                            f"{(landed := landed + 1):3} SIGKILL to {'the head' if victim is head else victim.name()}", flush=True
                        )
                        victim.kill()
                ended = head.wait() == 0 or starts > count
            log.seek(0)
            carried = [line.split()[1] for line in log if line.startswith("fan-out") and " done on " in line]
        equal = (folder / "dvc.lock").read_bytes() == (serial / "dvc.lock").read_bytes()
        double = sorted({name for name in carried if carried.count(name) > 1})
        again = "Running stage" in run(folder, *DVC, "repro")
        print(f"round {rounds}: {starts} starts, dvc.lock {'equal' if equal else 'DIFFERS'}, {len(carried)} carried", flush=True)
        wrong += [f"{folder}: dvc.lock differs"] * (not equal) + [f"{folder}: dvc repro runs stages"] * again
        wrong += [f"{folder}: carried twice: {double}"] * bool(double)
    return wrong


def busy(head: psutil.Popen, rng: random.Random) -> psutil.Process | None:
    """A worker of Ray's with a stage under it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = head.children(recursive=True) if head.poll() is None else []
        busy = [p for p in family if " ".join(p.cmdline()).startswith("ray::") and p.children()]
        return rng.choice(busy) if busy else None
    return None


def pipeline(top: Path, workers: list[int], full: bool) -> list[str]:
    """Serially (0), then by each number of workers, each without anything cached."""
    seconds, locks, wrong = dict[int, float](), dict[int, dict[str, Any]](), list[str]()
    with serving() as server:
        for n in (0, *workers):
            work = harness.clone(top / f"by{n}")
            (work / "dvc.lock").unlink()
            if full:
                every = yaml.safe_load((harness.ROOT / "tests/bench/full.yaml").read_text(encoding="utf-8"))
                each = {name: {"engine": "hf"} | variant for name, variant in every.items()}
                harness.write_params(work, harness.settings() | {"variants": each, "tier": "smoke"})
            else:
                tiny_project.tiny(work, server.url)
            began = time.monotonic()
            run(work, *([sys.executable, "-m", "pipeline.fan_out", "--at-once", str(n)] if n else [*DVC, "repro"]))
            runs = {p.stem: artifacts.read_json(p)["wall_s"] for p in (work / artifacts.RUNS).glob("*.json")}
            timing = sum(s for name, s in runs.items() if name.split("@")[0] in ("benchmark", "serve", "floor"))
            seconds[n] = time.monotonic() - began - timing
            locks[n] = Folder._parsed((work / "dvc.lock").read_text(encoding="utf-8"))["stages"]
            quality = [name for name in locks[0] if name.split("@")[0] in QUALITY]
            differ = [name for name in quality if locks[n].get(name) != locks[0][name]]
            print(
                f"{n} workers: {timing:.0f} s in stages that time, {seconds[n]:.0f} s else: {seconds[0] / seconds[n]:.2f} times",
                flush=True,
            )
            print(
                f"  {len(quality)} stages of quality, entries of dvc.lock unlike the serial run's: {differ or 'none'}", flush=True
            )
            wrong += [f"{n} workers: {differ} differ"] * bool(differ or list(locks[n]) != list(locks[0]))
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["sleep", "kills", "pipeline", "drive"])
    parser.add_argument("--workers", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--full", action="store_true")
    asked = parser.parse_args()
    if asked.what == "drive":
        sys.exit(drive(asked.workers[0]))
    home = Path(tempfile.mkdtemp(prefix="quantgate-fan-out-")).resolve()
    faults = {
        "sleep": lambda: sleep(home, (asked.workers or [8])[0], asked.seconds),
        "kills": lambda: kills(home, (asked.workers or [3])[0], asked.kills, asked.seed),
        "pipeline": lambda: pipeline(home, asked.workers or [2, 3], asked.full),
    }[asked.what]()
    print("\n".join([*faults, f"see {home}"] if faults else ["as it should be"]))
    sys.exit(1 if faults else 0)
