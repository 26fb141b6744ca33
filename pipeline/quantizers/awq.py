"""awq: weights scaled by the importance of their activations, then rounded (Lin et al. 2023), on CPU and GPU.

By gptqmodel, or by the original AutoAWQ 0.2.9 in its own environment (its codes may differ: another search of clipping).
What bounds it: a grid search of scales, each with a forward pass of the layer over all calibration rows (32 rows of 256 tokens
on 2 cores: 20 s per layer), so `rows` takes only the first few."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pipeline.evalset.calibration import Calibration
from pipeline.quantizers import Facts, _gptqmodel, _original
from pipeline.quantizers._gptqmodel import GroupSize, refuse

__all__ = ["quantize", "refuse"]


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
    backend: Literal["gptqmodel", "autoawq"] = "gptqmodel",
) -> Facts:
    """Quantize every Linear of the decoder layers; embeddings and head stay in bfloat16."""
    given = calibration.token_rows()[:rows]
    if backend == "autoawq":
        facts = _original.autoawq(model_dir, out_dir, rows=given, bits=bits, group_size=group_size, keep=keep)
    else:
        facts = _gptqmodel.build(
            "awq", model_dir, out_dir, rows=given, batch_size=1, group_size=group_size, keep=keep,
            config=("AWQConfig", {"bits": bits, "group_size": group_size}),
            cpu_backend="AWQ_TORCH",  # its default kernel needs CUDA, but fails only after loading
        )  # fmt: skip
    return facts | {"calibration_rows": len(given)}
