"""torchao: integer weights with one scale a row, no calibration; the matrix product runs in torch's own kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pipeline import artifacts
from pipeline.calibration import Calibration
from pipeline.errors import Unsupported
from pipeline.quantizers import Facts


def quantize(
    model_dir: Path,
    out_dir: Path,
    *,
    calibration: Calibration,
    seed: int,
    scheme: Literal["int8-weight-only"],
) -> Facts:
    """Quantize every Linear but the output head; embeddings stay in bfloat16."""
    try:
        import torch
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import AutoModelForCausalLM, TorchAoConfig
        from transformers.utils import logging
    except ImportError as e:
        raise Unsupported(f"quantizer 'torchao' needs {e.name}; pip install torchao -c constraints.txt") from None
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype=torch.bfloat16,
        quantization_config=TorchAoConfig(Int8WeightOnlyConfig()),
        use_safetensors=True,
        trust_remote_code=artifacts.trusts_code(model_dir),
    )
    model.save_pretrained(out_dir)
    return {"library": "torchao", "head": "bfloat16"}
