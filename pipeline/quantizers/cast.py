"""cast: the same weights in another floating-point type; the reference, and the upper bound of what can be kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pipeline.calibration import Calibration
from pipeline.core import artifacts
from pipeline.core.droppings import data_files
from pipeline.core.errors import InvalidVariant
from pipeline.quantizers import Facts
from pipeline.quantizers._probe import first_overflow
from pipeline.quantizers._reproducible import ANY_MACHINE


def quantize(
    model_dir: Path,
    out_dir: Path,
    *,
    calibration: Calibration,
    seed: int,
    dtype: Literal["float32", "bfloat16", "float16"],
) -> Facts:
    """Cast every floating tensor, shard by shard, so that memory stays near one shard.

    Returns how many non-zero weights became zero (underflow). A weight past the type's range is an error.
    """
    import torch
    from safetensors.torch import load_file, save_file

    target = getattr(torch, dtype)
    underflow = 0
    for shard in data_files(model_dir, "*.safetensors"):
        tensors = {}
        for name, tensor in load_file(shard).items():
            if tensor.is_floating_point():
                narrow = tensor.to(target)
                if not torch.isfinite(narrow).all() and torch.isfinite(tensor).all():
                    raise InvalidVariant(f"{name} holds {tensor.abs().max():.3g}, past the range of {dtype}")
                underflow += int(((narrow == 0) & (tensor != 0)).sum())
                tensor = narrow
            tensors[name] = tensor
        save_file(tensors, out_dir / shard.name, metadata={"format": "pt"})
    for index in data_files(model_dir, "*.safetensors.index.json"):
        (out_dir / index.name).write_bytes(index.read_bytes())
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # the older name of the same key; two that disagree would be worse than none
    config["dtype"] = dtype
    (out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    facts: Facts = {"library": "torch", "reproducible": ANY_MACHINE, "underflowed_weights": underflow}
    if dtype == "float16":
        facts["range_probe_tokens"] = _probe_range(out_dir, calibration.token_rows()[0])
    return facts


def _probe_range(folder: Path, token_ids: list[int]) -> int:
    """Tokens read without a value past float16's range; raises `InvalidVariant` that names the first layer with one."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    trusted = artifacts.trusts_code(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", use_safetensors=True, trust_remote_code=trusted)
    layer = first_overflow(model.eval(), token_ids)
    if layer is not None:
        raise InvalidVariant(f"activations pass float16's range (65504), first in {layer}: bfloat16 has the range")
    return len(token_ids)
