"""gptq: rounding that compensates, column by column, for earlier errors (Frantar et al. 2022).

By gptqmodel, or by the original AutoGPTQ 0.7.1 in its own environment (CUDA only; untested).
What bounds it: forward passes of the calibration rows through every layer, and so their batch size (16 rows of 256 tokens on 2
cores: 89 s one by one, 50 s in batches of 8)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pipeline.evalset.calibration import Calibration
from pipeline.quantizers import Facts, _gptqmodel, _original
from pipeline.quantizers._gptqmodel import GroupSize, refuse

DAMPING_STEP = 0.01  # added to the damping until a layer's Hessian can be factored; below 1 in all

__all__ = ["quantize", "refuse"]


def quantize(
    model_dir: Path,
    out_dir: Path,
    *,
    calibration: Calibration,
    seed: int,
    bits: Literal[2, 3, 4, 8] = 4,
    group_size: GroupSize = 128,
    act_order: bool = False,
    damping: Annotated[float, Field(gt=0, lt=1)] = 0.05,
    batch_size: Annotated[int, Field(ge=1)] = 8,
    keep: list[str] = [],  # noqa: B006  # read only
    backend: Literal["gptqmodel", "auto-gptq"] = "gptqmodel",
) -> Facts:
    """Quantize every Linear of the decoder layers; embeddings and head stay in bfloat16. damping: share of the mean diagonal added
    to the Hessian; if it is not positive definite then, more is added in steps, which the manifest lists by layer. A layer for
    which that fails, or with too little calibration data, is an error, not a silent round-to-nearest (gptqmodel's default).
    AutoGPTQ adds nothing and stops."""
    if backend == "auto-gptq":
        _original.refuse_without_cuda()
        return _original.autogptq(
            model_dir, out_dir, rows=calibration.token_rows(), bits=bits, group_size=group_size, keep=keep,
            act_order=act_order, damping=damping, batch_size=batch_size,
        )  # fmt: skip
    return _gptqmodel.build(
        "gptq", model_dir, out_dir, rows=calibration.token_rows(), batch_size=batch_size, group_size=group_size, keep=keep,
        config=("GPTQConfig", {
            "bits": bits, "group_size": group_size, "desc_act": act_order, "act_group_aware": not act_order,
            "damp_percent": damping, "damp_auto_increment": DAMPING_STEP, "fallback": None,
        }),
    )  # fmt: skip
