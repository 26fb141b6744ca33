"""rtn: plain round-to-nearest without calibration: the lower bar that calibrated methods must beat (packed by gptqmodel)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pipeline.evalset.calibration import Calibration
from pipeline.quantizers import Facts, _gptqmodel
from pipeline.quantizers._gptqmodel import GroupSize, refuse

__all__ = ["quantize", "refuse"]


def quantize(
    model_dir: Path,
    out_dir: Path,
    *,
    calibration: Calibration,
    seed: int,
    bits: Literal[4, 8] = 4,
    group_size: GroupSize = 128,
    keep: list[str] = [],  # noqa: B006  # read only
) -> Facts:
    """Round every Linear of the decoder layers; embeddings and head stay in bfloat16. Same packing and kernel as gptq."""
    return _gptqmodel.build(
        "rtn", model_dir, out_dir, rows=None, batch_size=1, group_size=group_size, keep=keep,
        config=("RTNConfig", {"bits": bits, "group_size": group_size}),
    )  # fmt: skip
