"""gguf: llama.cpp's own converter and quantizer; block formats that its kernels read directly, no calibration."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from pathlib import Path
from typing import Literal

from pipeline import artifacts, envs
from pipeline.calibration import Calibration
from pipeline.errors import ArtifactError, Unsupported
from pipeline.quantizers import Facts
from pipeline.quiet import output_to

ENGINE = "llamacpp"  # the one that reads what this writes
FILE = "model.gguf"
FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_M": 12, "Q4_K_S": 14,
              "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "BF16": 32}  # fmt: skip  # llama.h: enum llama_ftype


def quantize(
    model_dir: Path,
    out_dir: Path,
    *,
    calibration: Calibration,
    seed: int,
    type: Literal["BF16", "F16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_0", "Q5_1", "Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q3_K_M", "Q2_K"],
) -> Facts:
    """Convert to float32 GGUF in the converter's own environment, then let llama.cpp quantize that.

    K-quants need rows of 256: llama.cpp gives tensors with other rows another type, which shows in the manifest
    (`tensor_types`) and in the measured bits per weight.
    """
    try:
        import llama_cpp
    except ImportError as e:
        raise Unsupported(f"quantizer 'gguf' needs {e.name}; pip install llama-cpp-python -c constraints.txt") from None
    with tempfile.TemporaryDirectory(dir=out_dir.parent) as tmp:
        whole = Path(tmp) / "whole.gguf"
        _convert(model_dir, whole)
        asked = llama_cpp.llama_model_quantize_default_params()
        asked.ftype = FILE_TYPES[type]
        with output_to(artifacts.LOGS / "gguf.log"):
            failed = llama_cpp.llama_model_quantize(str(whole).encode(), str(out_dir / FILE).encode(), ctypes.byref(asked))
    if failed:
        raise ArtifactError(f"llama.cpp could not quantize to {type} (code {failed}); see {artifacts.LOGS / 'gguf.log'}")
    shutil.copyfile(model_dir / "config.json", out_dir / "config.json")
    return {"library": "llama-cpp-python", "converter": (envs.FILES / "gguf.txt").read_text(encoding="utf-8").split("\n")[2]}


def _convert(model_dir: Path, out: Path) -> None:
    log = artifacts.LOGS / "gguf-convert.log"
    arguments = ("-m", "convert_hf_to_gguf", str(model_dir.absolute()), "--outfile", str(out.absolute()), "--outtype", "f32")
    try:
        envs.run("gguf", *arguments, log=log)
    except RuntimeError as e:  # an architecture that llama.cpp does not know
        raise Unsupported(f"llama.cpp's converter does not take this model: {e}") from None
