"""onnx: ONNX Runtime GenAI's model builder; its own graph, fused attention, packed int4 or int8 products, no calibration."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pipeline import artifacts
from pipeline.calibration import Calibration
from pipeline.errors import Unsupported
from pipeline.quantizers import Facts

ENGINE = "onnxruntime"  # the one that reads what this writes
LOG = artifacts.LOGS / "onnx.log"


def quantize(
    model_dir: Path,
    out_dir: Path,
    *,
    calibration: Calibration,
    seed: int,
    precision: Literal["fp32", "int8", "int4"],
    block_size: Annotated[int, Field(ge=16)] = 32,
) -> Facts:
    """Build a graph for the CPU. block_size: weights that share a scale (int4 and int8)."""
    for needed in ("onnxruntime_genai", "onnx_ir"):
        if find_spec(needed) is None:
            raise Unsupported(f"quantizer 'onnx' needs {needed}; pip install onnxruntime-genai onnx-ir -c constraints.txt")
    options = [f"int4_block_size={block_size}"] if precision != "fp32" else []
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache, LOG.open("w") as log:
        done = subprocess.run(
            [
                sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", str(model_dir), "-i", str(model_dir),
                "-o", str(out_dir), "-p", precision, "-e", "cpu", "-c", cache, "--extra_options", "hf_token=false", *options,
            ],
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    if done.returncode:
        last = [line for line in LOG.read_text(errors="replace").splitlines() if line.strip()][-1:]
        raise Unsupported(f"ONNX Runtime's builder does not take this model at {precision}: {' '.join(last)} (see {LOG})")
    shutil.copyfile(model_dir / "config.json", out_dir / "config.json")
    return {"library": "onnxruntime-genai"}
