"""How long the evaluate stage takes against lm-eval's own command line: same model, same items, same threads, one run.

    python tests/bench/evaluate.py [VARIANT] [--rounds N]

Both are timed whole, from the start of a process to its end, in turns; a round's ratio is ours over lm-eval's. Tasks that go
through the chat template are left out on both sides: lm-eval's command line applies it to all tasks of a run or to none.
Wall time says what one waits for and needs a quiet machine; processor time says what was computed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import harness
import typer
from scipy import stats

from pipeline.core import artifacts, cli, params
from pipeline.evalset.tasks import is_chat, load_task, local_tasks, subset


def main(variant: Annotated[str, typer.Argument()] = "bf16", rounds: int = 3) -> None:
    """Time the evaluate stage and lm-eval's own command line in turns."""
    os.chdir(harness.ROOT)
    settings, local = params.load(), local_tasks()
    plain = {task: n for task, n in settings.amount.tasks.items() if task in local and not is_chat(load_task(task)[0])}
    items = {task: subset(len(load_task(task)[1]), n, settings.seed) for task, n in plain.items()}
    data = harness.settings()
    data["tiers"][settings.tier]["tasks"] = plain
    with tempfile.TemporaryDirectory(prefix="quantgate-evaluate-") as folder:
        work = Path(folder)
        harness.project(work, data, artifacts.model_dir(""))
        model, threads = (work / artifacts.model_dir(variant)).resolve(), settings.thread_count
        commands = {
            "ours": ["pipeline.evaluate", variant],
            "lm-eval": [
                "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={model}", "--tasks", ",".join(items),
                "--samples", json.dumps(items), "--include_path", "evalsets/tasks", "--device", "cpu",
                "--batch_size", str(settings.evaluate.batch_size), "--log_samples", "--output_path", str(work / "samples"),
            ],
        }  # fmt: skip
        offline = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(work / "cache")}
        env = harness.environment(**offline)

        def timed(who: str, _: int) -> harness.Seconds:
            command = [sys.executable, "-m", *commands[who]]
            spent = harness.seconds(lambda: subprocess.run(command, cwd=work, env=env, check=True, capture_output=True))
            print(f"{who}: {spent.wall:.1f} s, {spent.cpu:.1f} s of processors", flush=True)
            return spent

        times = harness.in_turns({who: partial(timed, who) for who in commands}, rounds, warmups=0)
    total = sum(map(len, items.values()))
    print(f"{variant}, {total} items, {threads} threads, {rounds} rounds; of lm-eval's (geometric mean [least, largest]):")
    for clock in harness.Seconds._fields:
        ratios = [getattr(a, clock) / getattr(b, clock) for a, b in zip(times["ours"], times["lm-eval"])]
        print(f"{clock} {stats.gmean(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]")


if __name__ == "__main__":
    cli.run(main)
