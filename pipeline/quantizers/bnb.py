"""bnb: bitsandbytes' int8 (outlier columns stay at 16 bits) and NF4 (codes spaced for normal weights); no calibration."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pipeline.core import artifacts
from pipeline.core.errors import Unsupported, needs
from pipeline.evalset.calibration import Calibration
from pipeline.model.config import text_config
from pipeline.model.headers import kept_layers, linear_shapes, linear_widths, packed_bits, plain_linear, skeleton
from pipeline.quantizers import Facts
from pipeline.quantizers._probe import probe
from pipeline.quantizers._reproducible import ANY_MACHINE, SAME_MACHINE, save

PACKS = plain_linear
LOADED_AS = "bitsandbytes"


def quantize(
    model_dir: Path,
    out_dir: Path,
    *,
    calibration: Calibration,
    seed: int,
    type: Literal["int8", "nf4", "fp4"],
    double_quant: bool = False,
    keep: list[str] = [],  # noqa: B006
) -> Facts:
    """Quantize every Linear but the output head; embeddings stay in bfloat16. int8: Dettmers et al. 2022 (LLM.int8()); nf4 and
    double_quant (the scales are quantized too): Dettmers et al. 2023 (QLoRA)."""
    with needs("quantizer 'bnb'", "pip install bitsandbytes -c constraints.txt"):
        import bitsandbytes  # noqa: F401  # transformers' own message names another command
        import torch
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig
        from transformers.utils import logging
    kept, own = kept_layers(model_dir, keep), skeleton(model_dir)
    head = own.head if own else "lm_head"
    how: dict[str, Any] = {"load_in_8bit": True}
    if type != "int8":
        how = {
            "load_in_4bit": True, "bnb_4bit_quant_type": type, "bnb_4bit_compute_dtype": torch.bfloat16,
            "bnb_4bit_use_double_quant": double_quant,
        }  # fmt: skip
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype=torch.bfloat16,
        device_map="cuda" if torch.cuda.is_available() else "cpu",
        quantization_config=BitsAndBytesConfig(**how, llm_int8_skip_modules=[*kept, head]),
        use_safetensors=True,
        trust_remote_code=artifacts.trusts_code(model_dir),
    )
    save(model, out_dir)
    return {
        "library": "bitsandbytes", "head": "bfloat16", "kept": kept, "modules": len(linear_widths(model_dir, PACKS).keys() - kept),
        "expected_bits": packed_bits(model_dir, kept, packs=PACKS, **_bits(type, double_quant)), "probe": probe(model),
        "reproducible": SAME_MACHINE if double_quant else ANY_MACHINE,  # double_quant: a mean of scales, and a code book of sums
    }  # fmt: skip


def refuse(model_dir: Path, options: dict[str, Any]) -> None:
    """See `pipeline.quantizers`: on a CPU, int8 takes activations of three dimensions, but latent attention has some of four; with
    AVX-512 BF16, 4-bit products have blocks of 32 outputs and 64 inputs."""
    latent = options["type"] == "int8" and text_config(model_dir).get("kv_lora_rank")
    shapes = linear_shapes(model_dir, PACKS).items() if options["type"] != "int8" else ()
    odd = [(name, shape) for name, shape in shapes if shape[0] % 32 or shape[1] % 64]
    if not (latent or odd) or find_spec("bitsandbytes") is None:
        return
    import torch
    from bitsandbytes.functional import has_avx512bf16

    if torch.cuda.is_available():
        return
    if latent:
        raise Unsupported("bitsandbytes' int8 has no latent attention on a CPU: it takes no activations of four dimensions")
    if has_avx512bf16():
        name, (outputs, inputs) = odd[0]
        raise Unsupported(
            f"this CPU's 4-bit product takes multiples of 32 outputs and 64 inputs, and {name} has {outputs} and {inputs}"
        )


def _bits(type: str, double_quant: bool) -> dict[str, int]:
    """Bits of a weight, of a row's or a block's scale, and of the rest of a matrix (the 16 codes and a description)."""
    if type == "int8":
        return {"weight": 8, "row": 32}
    if double_quant:  # scales in 8 bits, and one of 32 for 256 of them
        return {"weight": 4, "group": 8, "group_size": 64, "each": 8 * (64 + 1024 + 150)}
    return {"weight": 4, "group": 32, "group_size": 64, "each": 8 * (64 + 90)}
