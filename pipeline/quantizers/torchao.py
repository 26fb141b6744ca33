"""torchao: scaled integer or float8 weights, no calibration; the matrix product runs in torch's own kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pipeline.calibration import Calibration
from pipeline.core import artifacts
from pipeline.core.errors import Unsupported
from pipeline.quantizers import Facts
from pipeline.quantizers._probe import probe
from pipeline.quantizers._reproducible import ANY_MACHINE, save
from pipeline.weights import any_linear, kept_layers, linear_widths, packed_bits, skeleton

BITS: dict[str, dict[str, int]] = {  # of a weight, and of a row's or a group's scale and zero point, as torchao saves them
    "int8-weight-only": {"weight": 8, "row": 32 + 8},
    "int8-dynamic": {"weight": 8, "row": 32 + 8},
    "int4-weight-only": {"weight": 4, "group": 32, "group_size": 128},  # untried: needs CUDA
    "float8-weight-only": {"weight": 8, "row": 32},  # untried: needs CUDA
    "float8-dynamic": {"weight": 8, "row": 32},  # untried: needs CUDA
}
PACKS = any_linear
FLOAT8_SINCE = (8, 9)  # CUDA compute capability of the first cards with float8 products


def quantize(
    model_dir: Path,
    out_dir: Path,
    *,
    calibration: Calibration,
    seed: int,
    scheme: Literal["int8-weight-only", "int8-dynamic", "int4-weight-only", "float8-weight-only", "float8-dynamic"],
    keep: list[str] = [],  # noqa: B006  # read only; the default is shown by name in errors and manifests
) -> Facts:
    """Quantize every Linear but the output head; embeddings stay in bfloat16.

    int8-dynamic: activations too are rounded to int8, row by row, as they come (W8A8). What this machine has no kernel for
    is `Unsupported`, with the reason.
    """
    try:
        import torch
        from torchao import quantization as methods
        from transformers import AutoModelForCausalLM, TorchAoConfig
        from transformers.utils import logging
    except ImportError as e:
        raise Unsupported(f"quantizer 'torchao' needs {e.name}; pip install torchao -c constraints.txt") from None
    _refuse_without_kernel(torch, scheme)
    configs: dict[str, Any] = {
        "int8-weight-only": methods.Int8WeightOnlyConfig,
        "int8-dynamic": methods.Int8DynamicActivationInt8WeightConfig,
        "int4-weight-only": methods.Int4WeightOnlyConfig,
        "float8-weight-only": methods.Float8WeightOnlyConfig,
        "float8-dynamic": methods.Float8DynamicActivationFloat8WeightConfig,
    }
    kept, own = kept_layers(model_dir, keep), skeleton(model_dir)
    left = [own.head, *(n for n, m in own.matrices.items() if not PACKS(m))] if own else ["lm_head"]
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype=torch.bfloat16,
        device_map="cuda" if torch.cuda.is_available() else None,
        quantization_config=TorchAoConfig(configs[scheme](), modules_to_not_convert=[*kept, *left]),
        use_safetensors=True,
        trust_remote_code=artifacts.trusts_code(model_dir),
    )
    save(model, out_dir)
    return {
        "library": "torchao", "head": "bfloat16", "kept": kept, "modules": len(linear_widths(model_dir, PACKS).keys() - kept),
        "expected_bits": packed_bits(model_dir, kept, packs=PACKS, **BITS[scheme]), "probe": probe(model),
        "reproducible": ANY_MACHINE,
    }  # fmt: skip


def _refuse_without_kernel(torch: Any, scheme: str) -> None:
    cuda = torch.cuda.is_available()
    if scheme == "int4-weight-only" and not cuda:
        raise Unsupported("torchao's int4 needs a CUDA device: it has no packed kernel for this CPU")
    if scheme.startswith("float8") and not (cuda and torch.cuda.get_device_capability() >= FLOAT8_SINCE):
        raise Unsupported("float8 products need a CUDA device of compute capability 8.9 or later")
