"""cast: the same weights in another floating-point type; the reference, and the upper bound of quality."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pipeline.core import artifacts
from pipeline.core.droppings import data_files
from pipeline.core.errors import InvalidVariant
from pipeline.evalset.calibration import Calibration
from pipeline.model.streaming import Shapes, chunks, write
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
    """Cast every floating tensor, a part at a time; link a base that has the type already. Counts non-zero weights that became zero
    (underflow). A weight past the type's range is an error."""
    shapes = {name: (_type(tensor, dtype), tuple(tensor.shape)) for name, tensor in _tensors(model_dir)}
    facts: Facts = {"library": "torch", "reproducible": ANY_MACHINE, "underflowed_weights": 0}
    if all(shapes[name][0] == _type(tensor) for name, tensor in _tensors(model_dir)):
        for file in data_files(model_dir, "*.safetensors*"):
            artifacts.link_file(file, out_dir / file.name)
    else:
        write(out_dir, shapes, _cast(model_dir, shapes, facts), {"format": "pt"})
    config = artifacts.read_json(model_dir / "config.json")
    config.pop("torch_dtype", None)  # an older name of the same key, which might disagree
    config["dtype"] = dtype
    (out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if dtype == "float16":
        facts["range_probe_tokens"] = _probe_range(out_dir, calibration.token_rows()[0])
    return facts


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """(name, tensor), mapped from its file."""
    from safetensors import safe_open

    for shard in data_files(folder, "*.safetensors"):
        with safe_open(shard, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a dict
                yield name, tensors.get_tensor(name)


def _type(tensor: Any, floating: str | None = None) -> str:
    """A tensor's type, or the one it is cast to."""
    return floating if floating and tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")


def _cast(folder: Path, shapes: Shapes, facts: Facts) -> Iterator[tuple[str, Any]]:
    import torch

    for name, tensor in _tensors(folder):
        kind = shapes[name][0]
        for part in chunks(tensor):
            narrow = part.to(getattr(torch, kind))
            if tensor.is_floating_point():
                if not torch.isfinite(narrow).all() and torch.isfinite(part).all():
                    raise InvalidVariant(f"{name} holds {part.abs().max():.3g}, past the range of {kind}")
                facts["underflowed_weights"] += int(((narrow == 0) & (part != 0)).sum())
            yield name, narrow


def _probe_range(folder: Path, token_ids: list[int]) -> int:
    """Number of tokens read without a value past float16's range; else `InvalidVariant` with the first such layer."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    trusted = artifacts.trusts_code(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", use_safetensors=True, trust_remote_code=trusted)
    layer = first_overflow(model.eval(), token_ids)
    if layer is not None:
        raise InvalidVariant(f"activations pass float16's range (65504), first in {layer}: bfloat16 has the range")
    return len(token_ids)
