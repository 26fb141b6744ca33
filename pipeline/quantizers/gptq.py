"""gptq: rounding that corrects, column by column, for the error already made (Frantar et al. 2022), by gptqmodel.

What bounds it: the calibration rows' forward passes through every layer; their batch size is what counts
(16 rows of 256 tokens on 2 cores: 89 s one by one, 50 s in batches of 8).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pipeline.calibration import Calibration
from pipeline.quantizers import Facts, _gptqmodel
from pipeline.quantizers._gptqmodel import GroupSize


def quantize(
    model_dir: Path,
    out_dir: Path,
    *,
    calibration: Calibration,
    seed: int,
    bits: Literal[2, 3, 4, 8] = 4,
    group_size: GroupSize = 128,
    batch_size: int = 8,
) -> Facts:
    """Quantize every Linear of the decoder layers; embeddings and head stay in bfloat16.

    A layer with too little calibration data is an error, not a silent round-to-nearest (gptqmodel's default).
    """
    return _gptqmodel.build(
        "gptq", model_dir, out_dir, rows=calibration.token_rows, batch_size=batch_size, group_size=group_size,
        config=("QuantizeConfig", {"bits": bits, "group_size": group_size, "fallback": None}),
    )  # fmt: skip
