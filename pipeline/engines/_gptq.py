"""Load checkpoints that transformers cannot read as they are by gptqmodel's own loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.core import artifacts
from pipeline.core.errors import needs
from pipeline.core.quiet import before_gptqmodel


def is_its_own(model_dir: Path) -> bool:
    """Whether only gptqmodel's loader reads a checkpoint: it has unpacked layers, which transformers would take for packed ones, or
    it packs parts of a module that transformers' class has in one piece (quantizers/_gptqmodel.py)."""
    config = artifacts.read_json(model_dir / "config.json")
    packing = config.get("quantization_config") or {}
    return bool(packing.get("dynamic") or (packing.get("meta") or {}).get("split"))


def load(model_dir: Path, device: str, trusted: bool) -> Any:
    with needs("this model", "pip install gptqmodel -c constraints.txt"):
        before_gptqmodel()
        from gptqmodel import GPTQModel
    return GPTQModel.load(str(model_dir), device=device, trust_remote_code=trusted).model
