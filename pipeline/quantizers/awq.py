"""awq: weights scaled by what activations make important, then rounded (Lin et al. 2023), by gptqmodel, on CPU and GPU.

What bounds it: a grid search of scales, each try a forward pass of the layer over all calibration rows (32 rows of 256 tokens
on 2 cores: 20 s a layer), so `rows` takes only the first few.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pipeline.calibration import Calibration
from pipeline.quantizers import Facts, _gptqmodel
from pipeline.quantizers._gptqmodel import GroupSize


def quantize(
    model_dir: Path,
    out_dir: Path,
    *,
    calibration: Calibration,
    seed: int,
    bits: Literal[4] = 4,
    group_size: GroupSize = 128,
    rows: Annotated[int, Field(ge=1)] = 4,
    keep: list[str] = [],  # noqa: B006  # read only
) -> Facts:
    """Quantize every Linear of the decoder layers; embeddings and head stay in bfloat16."""
    facts = _gptqmodel.build(
        "awq", model_dir, out_dir, rows=calibration.token_rows()[:rows], batch_size=1, group_size=group_size, keep=keep,
        config=("AWQConfig", {"bits": bits, "group_size": group_size}),
        cpu_backend="AWQ_TORCH",  # its default kernel wants CUDA, and says so only after loading
    )  # fmt: skip
    return facts | {"calibration_rows": min(rows, calibration.facts["rows_used"] if calibration.facts else rows)}
