"""What gpu.sh runs: each path is a variant through the pipeline's own stages, in a project of its own, until the time is up."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import harness
import pyarrow.parquet as pq
import torch
import typer

from pipeline.core import artifacts, cli, records, venvs
from pipeline.core.errors import Unsupported
from pipeline.core.params import Variant
from pipeline.core.records import Options, TimingRow
from pipeline.speed import rounds

BF16: Options = {"dtype": "bfloat16"}
FOUR: Options = {"bits": 4, "group_size": 64}
FP8: Options = {"scheme": "float8-weight-only"}


class Tried(NamedTuple):
    """variant: what is measured; card: whether it wants one; timed: whether its speed is, too."""

    variant: Variant
    card: bool = False
    timed: bool = False


def _vllm(quantizer: str, options: Options, **engine_options: bool | str) -> Variant:
    return Variant(quantizer=quantizer, engine="vllm", options=options, engine_options=engine_options)


PATHS = {  # in the order of what is wanted most, since time may run out
    "vllm-bf16": Tried(_vllm("cast", BF16), timed=True),
    "vllm-gptq": Tried(_vllm("gptq", FOUR), timed=True),
    "vllm-kv-fp8": Tried(_vllm("cast", BF16, kv="fp8"), timed=True),
    "vllm-no-graphs": Tried(_vllm("cast", BF16, graphs=False), card=True, timed=True),
    "vllm-float8": Tried(_vllm("torchao", FP8), card=True),
    "gptq": Tried(Variant(quantizer="gptq", options=FOUR)),
    "torchao-int4": Tried(Variant(quantizer="torchao", options={"scheme": "int4-weight-only"}), card=True),
    "torchao-float8": Tried(Variant(quantizer="torchao", options=FP8), card=True),
    "bnb-nf4": Tried(Variant(quantizer="bnb", options={"type": "nf4"})),
    "awq": Tried(Variant(quantizer="awq", options=FOUR)),
    "vllm-awq": Tried(_vllm("awq", FOUR)),
}


def why_not(tried: Tried) -> str:
    """Why a path is not run here, or nothing."""
    if tried.card and not torch.cuda.is_available():
        return "no card here"
    try:
        if tried.variant.engine == "vllm":
            venvs.vllm()
    except Unsupported as e:
        return str(e)
    return ""


def stage(work: Path, deadline: float, *words: str) -> str:
    """Run a stage; its error's last line, or nothing."""
    command = [sys.executable, "-m", f"pipeline.{words[0]}", *words[1:]]
    left = max(1.0, deadline - time.monotonic())
    try:
        ran = subprocess.run(command, cwd=work, env=harness.environment(), capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return f"{words[0]}: the time was up"
    return "" if ran.returncode == 0 else f"{words[0]}: {(ran.stderr.strip().splitlines() or ['no output'])[-1][:200]}"


def figures(work: Path, name: str, timed: bool) -> tuple[str, str]:
    """(ok or what it ended with, figures) of a path whose stages ran."""
    tokens = work / artifacts.tokens(name)
    meta = records.read(artifacts.meta_of(tokens), records.TokensMeta)
    if meta["status"] != "ok":
        return f"{meta['status']}: {meta['reason']}", ""
    kld = pq.read_table(tokens, columns=["kld"])["kld"].to_numpy()
    said = [f"KLD {kld.mean():.4g} nats (n = {len(kld)} tokens)"]
    if timed:
        answered = rounds.pairs(list(records.read_rows(work / artifacts.timings(name), TimingRow)))
        rates = [(len(r["t_tokens"]) - 1) / (r["t_tokens"][-1] - r["t_tokens"][0]) for r, _ in answered]
        said.append(
            f"decode {min(rates):.4g} to {max(rates):.4g} tok/s (n = {len(rates)} rounds)" if rates else "no round went well"
        )
    return "ok", "; ".join([*said, " ".join(f"{k} × {n}" for k, n in meta["kernels"].items())])


def try_path(work: Path, deadline: float, name: str, timed: bool) -> tuple[str, str]:
    for words in (("quantize", name), ("diverge", name), *([("benchmark", name)] if timed else [])):
        if wrong := stage(work, deadline, *words):
            return f"failed: {wrong}", ""
    return figures(work, name, timed)


def main(
    dry: Annotated[bool, typer.Option(help="Say what would run.")] = False,
    only: Annotated[str, typer.Option(help="Paths, with commas between them.")] = "",
    minutes: float = 12.0,
) -> None:
    """Try every path, and print a table of what happened."""
    deadline = time.monotonic() + 60 * minutes
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no card"
    print(f"{card}; torch {torch.__version__}\n\n| path | result | figure | seconds |\n|---|---|---|---|", flush=True)
    wanted = {n: t for n, t in PATHS.items() if not only or n in only.split(",")}
    runs = {n: t for n, t in wanted.items() if not why_not(t)}
    if runs and not dry:
        work = Path(tempfile.mkdtemp(prefix="quantgate-gpu-"))
        model = {"model": {"source": "path", "path": os.environ["MODEL"]}} if "MODEL" in os.environ else {}
        reference = Variant(quantizer="cast", options=BF16)
        variants = {"bf16": reference, **{n: t.variant for n, t in runs.items()}}
        shown = {n: v.model_dump() for n, v in variants.items()}
        data = harness.settings() | {"variants": shown, "tier": "smoke"} | model
        data["serving"], data["gate"]["required"] = {**data["serving"], "variants": {}}, list(runs)[:1]
        harness.project(work, data, Path("envs"), Path("artifacts/envs"))
        for words in (("check",), ("download",), ("calibrate",), ("quantize", "bf16"), ("reference",)):
            start = time.monotonic()
            if wrong := stage(work, deadline, *words):
                sys.exit(f"error: {wrong}")
            print(f"| {' '.join(words)} | ok | | {time.monotonic() - start:.0f} |", flush=True)
    for name, tried in wanted.items():
        start, why = time.monotonic(), why_not(tried)
        result, figure = (
            (f"skipped: {why}", "") if why else ("would run", "") if dry else try_path(work, deadline, name, tried.timed)
        )
        print(f"| {name} | {result} | {figure} | {time.monotonic() - start:.0f} |", flush=True)


if __name__ == "__main__":
    cli.run(main)
