"""A quantizer of the tests that dies while it writes, unless it is asked for the whole."""

import os
from pathlib import Path
from typing import Any

from pipeline.quantizers import cast

ENGINE = "dies"


def quantize(model_dir: Path, out_dir: Path, *, calibration: Any, seed: int, whole: bool) -> dict[str, Any]:
    if not whole:
        (out_dir / "model.safetensors").write_bytes(b"half")
        os.abort()
    return cast.quantize(model_dir, out_dir, calibration=calibration, seed=seed, dtype="bfloat16")
