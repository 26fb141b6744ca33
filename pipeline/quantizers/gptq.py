"""gptq: rounding that corrects, column by column, for the error already made (Frantar et al. 2022), by gptqmodel.

What bounds it: the calibration rows' forward passes through every layer; their batch size is what counts
(16 rows of 256 tokens on 2 cores: 89 s one by one, 50 s in batches of 8).
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any, Literal

from pipeline import artifacts, cli
from pipeline.calibration import Calibration
from pipeline.errors import Unsupported
from pipeline.quantizers import Facts
from pipeline.quiet import output_to
from pipeline.weights import linear_widths

LOG = artifacts.LOGS / "gptq.log"


def quantize(
    model_dir: Path,
    out_dir: Path,
    *,
    calibration: Calibration,
    seed: int,
    bits: Literal[2, 3, 4, 8] = 4,
    group_size: Literal[-1, 16, 32, 64, 96, 128, 192, 256, 512, 1024] = 128,
    batch_size: int = 8,
) -> Facts:
    """Quantize every Linear of the decoder layers; embeddings and head stay in bfloat16.

    A layer with too little calibration data is an error, not a silent round-to-nearest (gptqmodel's default).
    """
    refuse_odd_widths(model_dir, group_size)
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(max(2, os.cpu_count() or 2)))  # read at import; 1 stops the load
    rows = calibration.token_rows()
    with output_to(LOG) as terminal:
        try:
            from gptqmodel import GPTQModel, QuantizeConfig
        except ImportError as e:
            raise Unsupported(f"quantizer 'gptq' needs {e.name}; pip install gptqmodel -c constraints.txt") from None

        config = QuantizeConfig(bits=bits, group_size=group_size, fallback=None)
        model = GPTQModel.load(str(model_dir), config, trust_remote_code=artifacts.trusts_code(model_dir))
        layers = model.model.config.num_hidden_layers
        with cli.progress(layers, f"gptq int{bits}", "layer", terminal) as bar:
            model.layer_callback = _Progress(bar)
            model.quantize([{"input_ids": r, "attention_mask": [1] * len(r)} for r in rows], batch_size=batch_size)
        model.save(str(out_dir))
        _take_back_logs()
    _forget_this_run(out_dir)
    return {"library": "gptqmodel", "head": "bfloat16", **_losses(out_dir)}


class _Progress:
    def __init__(self, bar: Any) -> None:
        self.bar = bar

    def layer_complete(self, *, layer_idx: int, submodule_finalized: bool) -> None:
        self.bar.update(max(0, layer_idx + 1 - self.bar.n))  # it is told twice a layer, in threads


def refuse_odd_widths(model_dir: Path, group_size: int) -> None:
    """Raise before any calibration if a layer's width is not divisible by the group size."""
    widths = linear_widths(model_dir)
    if group_size == -1:  # one group a row
        return
    common = math.gcd(*widths.values())
    works = [g for g in (16, 32, 64, 96, 128, 192, 256, 512, 1024) if common % g == 0]
    for layer, width in widths.items():
        if width % group_size:
            raise Unsupported(
                f"group_size {group_size} does not divide the {width} inputs of {layer}; "
                f"sizes that work for every layer: {', '.join(map(str, works)) or 'none'}, or -1 (one group a row)"
            )


def _take_back_logs() -> None:
    """gptqmodel writes a log of its own into ./logs, whatever it is told; it belongs to the others."""
    for log in Path("logs").glob("gptq_log_*.log"):
        shutil.move(log, LOG.with_name(log.name))
    with contextlib.suppress(OSError):  # somebody else's folder, or not empty
        Path("logs").rmdir()


def _forget_this_run(out_dir: Path) -> None:
    """Take a temporary folder's name out of the written configs: equal inputs must give equal files."""
    for name in ("config.json", "quantize_config.json"):
        file = out_dir / name
        config = json.loads(file.read_text(encoding="utf-8"))
        config.get("quantization_config", config).get("meta", {}).pop("offload_to_disk_path", None)
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _losses(out_dir: Path) -> Facts:
    """Mean and worst layer loss and the damping used, from the library's own log, which moves to the logs."""
    log = out_dir / "quant_log.csv"
    with log.open(newline="") as f:
        rows = list(csv.DictReader(f))
    shutil.move(log, LOG.with_suffix(".csv"))
    losses = [float(r["loss"]) for r in rows]
    worst = max(rows, key=lambda r: float(r["loss"]))
    return {
        "modules": len(rows),
        "loss_mean": sum(losses) / len(losses),
        "loss_worst": {"module": f"layers.{worst['layer']}.{worst['module']}", "loss": float(worst["loss"])},
        "damping": sorted({float(r["damp"]) for r in rows}),
    }
