"""Memory and disk of every stage for a random Llama of 1.17 billion weights in three shards (2.34 GB, called S), smoke tier.

    python tests/bench/size.py FOLDER [STAGE ...]      after `make repro`: the model gets the base's tokenizer; FOLDER: 25 GB free

A row a stage, run by DVC in a clone of this commit: seconds, what its processes held at most that no file backs (sampled, and
summed over them), and what artifacts and DVC's cache held on disk, at most and at its end, every inode once. The goal: 1.3
times the largest of one layer in float32 and one shard.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
HIDDEN, WIDTH, LAYERS, VOCABULARY, HEADS, KV = 2048, 5632, 22, 49152, 32, 4
SHARDS = 3
GOAL = 1.3
STAGES = ("check", "download", "calibrate", "quantize", "reference", "floor", "diverge", "evaluate", "benchmark")


EACH = ("quantize", "diverge", "evaluate", "benchmark")


def shapes() -> dict[str, tuple[int, ...]]:
    """{tensor: its shape}"""
    kv = HIDDEN // HEADS * KV
    parts: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (WIDTH, HIDDEN), "mlp.up_proj": (WIDTH, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDTH), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
    }  # fmt: skip
    layers = {f"model.layers.{k}.{part}.weight": shape for k in range(LAYERS) for part, shape in parts.items()}
    embeddings = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    return embeddings | layers | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def make(folder: Path, tokenizer: Path) -> None:
    """The model, in bfloat16, with another folder's tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    folder.mkdir(parents=True)
    LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV, max_position_embeddings=2048, architectures=["LlamaForCausalLM"], dtype="bfloat16",
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    ).save_pretrained(folder)  # fmt: skip
    for file in tokenizer.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "chat_template")):
            shutil.copyfile(file, folder / file.name)
    names, where = list(shapes()), {}
    generator = torch.Generator().manual_seed(0)
    each = -(-len(names) // SHARDS)
    for k in range(SHARDS):
        file_name = f"model-{k + 1:05}-of-{SHARDS:05}.safetensors"
        part = {}
        for name in names[k * each : (k + 1) * each]:
            shape = shapes()[name]
            part[name] = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
            part[name] = part[name].bfloat16()
            where[name] = file_name
        save_file(part, folder / file_name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(f.stat().st_size for f in folder.glob("*.safetensors"))}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def own_bytes(process: psutil.Process) -> int:
    """What the descendants of a process hold that no file backs."""
    total = 0
    for child in process.children(recursive=True):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))
    return total


def disk_bytes(work: Path) -> int:
    """What artifacts and DVC's cache take on disk, every inode once; not the environments of other backends."""
    found = {}
    for place, _, files in (step for top in ("artifacts", ".dvc") for step in os.walk(work / top)):
        for file in (Path(place, name) for name in files if "/envs/" not in place):
            with contextlib.suppress(OSError):
                status = file.lstat()
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def measured(command: list[str], work: Path, env: dict[str, str]) -> dict[str, float]:
    started, memory, disk = time.monotonic(), 0, 0
    with (work.parent / "size.log").open("ab") as log:
        run = psutil.Popen(command, cwd=work, env=env, stdout=log, stderr=log)
        k = 0
        while run.poll() is None:
            memory = max(memory, own_bytes(run))
            if k % 20 == 0:
                disk = max(disk, disk_bytes(work))
            k += 1
            time.sleep(0.05)
    return {"code": run.returncode, "s": time.monotonic() - started, "memory": memory, "disk": disk, "left": disk_bytes(work)}


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("folder", type=Path)
    asked.add_argument("stages", nargs="*", default=list(STAGES))
    asked.add_argument("--tokenizer", type=Path, default=ROOT / "artifacts/base")
    options = asked.parse_args()
    model, work = options.folder.absolute() / "model", options.folder.absolute() / "work"
    if not model.exists():
        make(model, options.tokenizer)
    if not work.exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(work)], check=True)
    path = work / "params.yaml"
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    data |= {"model": {"source": "path", "path": str(model)}, "tier": "smoke", "threads": 2}
    data["serving"]["variants"], data["calibration"]["rows"], data["calibration"]["tokens"] = {}, 4, 128
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    own = Path(sys.executable).parent
    env = os.environ | {"PATH": f"{own}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(work), "OMP_NUM_THREADS": "2"}
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    layer = 4 * sum(a * (b[0] if b else 1) for name, (a, *b) in shapes().items() if ".layers.0." in name)
    shard = max(file.stat().st_size for file in model.glob("*.safetensors"))
    goal = GOAL * max(layer, shard)
    print(f"S {size / 1e9:.2f} GB; a layer in float32 {layer / 1e9:.2f}, a shard {shard / 1e9:.2f}, goal {goal / 1e9:.2f} GB")
    print("| stage | s | own GB | of the goal | disk at most, S | at the end, S |\n|---|---|---|---|---|---|", flush=True)
    for stage in options.stages:
        keys = [f"@{v}" for v in data["variants"]] if stage in EACH else [""]
        for key in keys:
            done = measured([str(own / "dvc"), "repro", "--single-item", stage + key], work, env)
            told = f"{done['s']:.0f} | {done['memory'] / 1e9:.2f} | {done['memory'] / goal:.2f}"
            disk = f"{done['disk'] / size:.2f} | {done['left'] / size:.2f}"
            print(f"| {stage}{key} | {told} | {disk} |" + (" failed" if done["code"] else ""), flush=True)


if __name__ == "__main__":
    main()
