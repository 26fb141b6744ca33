"""How long the evaluate stage takes against lm-eval's own command line: same model, same items, same threads, one run.

    python tests/bench/evaluate.py [VARIANT [ROUNDS [MODELS_FOLDER]]]      (bf16, 3 rounds, artifacts/models)

Both are timed whole, from the start of a process to its end, in turns; a round's ratio is ours over theirs. Tasks that go
through the chat template are left out on both sides: lm-eval's command line applies it to all tasks of a run or to none.
Wall time says what one waits for and needs a quiet machine; processor time says what was computed.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from pipeline.core import params
from pipeline.evalset.tasks import is_chat, load_task, local_tasks, subset

ROOT = Path(__file__).resolve().parent.parent.parent


def timed(command: list[str], work: Path, threads: int) -> tuple[float, float]:
    """(wall seconds, processor seconds) of a command; its output is kept in command.log."""
    own = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(work / "cache"),
    }
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with (work / "command.log").open("wb") as log:
        subprocess.run(command, cwd=work, env=os.environ | own, stdout=log, stderr=log, check=True)
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(variant: str, rounds: int, models: Path, work: Path) -> None:
    settings = params.load(ROOT / "params.yaml")
    local = local_tasks()
    plain = {task: n for task, n in settings.amount.tasks.items() if task in local and not is_chat(load_task(task)[0])}
    items = {task: subset(len(load_task(task)[1]), n, settings.seed) for task, n in plain.items()}
    data = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    data["tiers"][settings.tier]["tasks"] = plain
    (work / "params.yaml").write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    (work / "evalsets").symlink_to(ROOT / "evalsets")
    (work / "artifacts").mkdir()
    (work / "artifacts/models").symlink_to(models.resolve())
    ours = [sys.executable, "-m", "pipeline.evaluate", variant]
    theirs = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={(models / variant).resolve()}"]
    theirs += ["--tasks", ",".join(items), "--samples", json.dumps(items), "--include_path", "evalsets/tasks", "--device", "cpu"]
    theirs += ["--batch_size", str(settings.evaluate.batch_size), "--log_samples", "--output_path", str(work / "samples")]
    walls, cpus = [], []
    for k in range(rounds):
        a, b = timed(ours, work, settings.thread_count), timed(theirs, work, settings.thread_count)
        walls.append(a[0] / b[0])
        cpus.append(a[1] / b[1])
        told = f"ours {a[0]:.1f} s ({a[1]:.1f} s of processors), lm-eval {b[0]:.1f} s ({b[1]:.1f} s)"
        print(f"round {k + 1}: {told}: {walls[-1]:.3f} ({cpus[-1]:.3f})", flush=True)
    mean, cpu_mean = (math.exp(sum(map(math.log, found)) / rounds) for found in (walls, cpus))
    total = sum(map(len, items.values()))
    print(
        f"{variant}, {total} items, {settings.thread_count} threads, {rounds} rounds: wall {mean:.3f} "
        f"[{min(walls):.3f}, {max(walls):.3f}], processors {cpu_mean:.3f} [{min(cpus):.3f}, {max(cpus):.3f}] of lm-eval's "
        "(geometric mean [least, largest])"
    )


if __name__ == "__main__":
    os.chdir(ROOT)
    given = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="quantgate-evaluate-") as folder:
        main(
            given[0] if given else "bf16",
            int(given[1]) if len(given) > 1 else 3,
            Path(given[2]) if len(given) > 2 else ROOT / "artifacts/models",
            Path(folder),
        )
