"""Memory and disk of every stage for a random Llama of 1.17 billion weights in three shards (2.34 GB, called S), smoke tier.

    python tests/bench/size.py FOLDER [STAGE ...]      after `make repro`: the model gets the base's tokenizer; FOLDER: 25 GB free

A row a stage, run by DVC in a clone of this commit: seconds, what its processes held at most that no file backs (sampled, and
summed over them), and what artifacts and DVC's cache held on disk, at most and at its end, every inode once. The goal: 1.3
times the largest of one layer in float32 and one shard.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import harness
import psutil

HIDDEN, WIDTH, LAYERS, VOCABULARY, HEADS, KV = 2048, 5632, 22, 49152, 32, 4
LAYER = HIDDEN * (2 * HIDDEN + 2 * HIDDEN // HEADS * KV + 3 * WIDTH + 2)  # weights: q, o, k, v, the MLP's three, two norms
SHARD = "900MB"
GOAL = 1.3
STAGES = ("check", "download", "calibrate", "quantize", "reference", "floor", "diverge", "evaluate", "benchmark")
EACH = ("quantize", "diverge", "evaluate", "benchmark")  # run for each variant


def make(folder: Path) -> None:
    """The model, in bfloat16."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size=SHARD)
    AutoTokenizer.from_pretrained(harness.ROOT / "artifacts/base").save_pretrained(folder)


def unbacked_bytes(process: psutil.Process) -> int:
    """What the descendants of a process hold that no file backs."""
    total = 0
    for child in process.children(recursive=True):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))
    return total


def disk_bytes(work: Path) -> int:
    """What artifacts and DVC's cache take on disk, every inode once; not the environments of other backends."""
    sizes = {}
    for folder, _, files in (step for top in ("artifacts", ".dvc") for step in os.walk(work / top)):
        for file in (Path(folder, name) for name in files if "/envs/" not in folder):
            with contextlib.suppress(OSError):
                status = file.lstat()
                sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


class Cost(NamedTuple):
    """disk: at most; left: at the end. memory, disk, left in bytes."""

    code: int
    seconds: float
    memory: int
    disk: int
    left: int


def measured(target: str, work: Path) -> Cost:
    started, memory, disk, k = time.monotonic(), 0, 0, 0
    command = [str(harness.BIN / "dvc"), "repro", "--single-item", target]
    with (work.parent / "size.log").open("ab") as log:
        run = psutil.Popen(command, cwd=work, env=harness.environment(work, OMP_NUM_THREADS="2"), stdout=log, stderr=log)
        while run.poll() is None:
            memory = max(memory, unbacked_bytes(run))
            if k % 20 == 0:  # walking the disk takes longer
                disk = max(disk, disk_bytes(work))
            k += 1
            time.sleep(0.05)
    return Cost(run.returncode, time.monotonic() - started, memory, disk, disk_bytes(work))


def main(folder: Path, stages: list[str]) -> None:
    model = folder / "model"
    if not model.exists():
        make(model)
    work = harness.clone(folder / "work")
    data = harness.settings()
    data |= {"model": {"source": "path", "path": str(model)}, "tier": "smoke", "threads": 2}
    data["serving"]["variants"], data["calibration"]["rows"], data["calibration"]["tokens"] = {}, 4, 128
    harness.write_params(work, data)
    sizes = [file.stat().st_size for file in model.glob("*.safetensors")]
    size, goal = sum(sizes), GOAL * max(4 * LAYER, *sizes)
    print(f"S {size / 1e9:.2f} GB; a layer in float32 {4 * LAYER / 1e9:.2f}, a shard {max(sizes) / 1e9:.2f} GB")
    print(harness.head("stage", "s", "own GB", f"of the goal, {goal / 1e9:.2f} GB", "disk at most, S", "at the end, S"), flush=True)
    for target in (f"{s}@{v}" if v else s for s in stages for v in (data["variants"] if s in EACH else [""])):
        cost = measured(target, work)
        shares = [f"{n:.2f}" for n in (cost.memory / 1e9, cost.memory / goal, cost.disk / size, cost.left / size)]
        print(harness.row(target, f"{cost.seconds:.0f}", *shares) + " failed" * bool(cost.code), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:] or list(STAGES))
