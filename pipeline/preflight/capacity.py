"""Estimate what each stage takes of memory and disk, from headers and params, before any work.

Memory is what no file backs: the system may drop a mapped model. The constants are those that tests/bench/size.py measured.
"""

from __future__ import annotations

import math
import re
import shutil
from collections import Counter
from pathlib import Path

from pipeline import quantizers
from pipeline.core import artifacts, options, quota
from pipeline.core.params import Params, Variant
from pipeline.model.headers import count_weights, linear_shapes, read_headers, weights_of
from pipeline.preflight.model import base_folder

IMPORTS = 0.4e9  # Python and its libraries
# What a method's library holds at most, in parts of the model at 16 bits; the others work tensor by tensor.
COPIES = {"awq": 1.0, "bnb": 0.5, "gptq": 1.0, "onnx": 2.8, "rtn": 1.0}
LOADED = ("onnxruntime",)  # engines that read a variant into memory, and do not map it
SCALES = 0.5  # bits a packed weight, for scales and zero points


def notes(settings: Params) -> list[str]:
    """One line for the whole, and one for each stage or disk that is too small; empty if the model is not here yet."""
    folder = base_folder(settings)
    if folder is None:
        return []
    memory = {stage: size / 1e9 for stage, size in memory_by_stage(settings, folder).items()}
    most = max(memory, key=memory.__getitem__)
    have, weights = quota.memory_bytes() / 1e9, 2 * count_weights(folder) / 1e9  # at 16 bits
    need, free = disk_bytes(settings, folder) / 1e9, shutil.disk_usage(Path.cwd()).free / 1e9
    lines = [
        f"the model's {weights / 2:.2f} billion weights: about {need:.1f} GB more on disk ({free:.1f} GB free), "
        f"at most {memory[most]:.1f} GB of memory besides the mapped model, in {most} ({have:.1f} GB here)"
    ]
    if need > free:
        lines.append(f"the disk is too small: about {need:.1f} GB are needed and {free:.1f} GB are free")
    if weights > have:
        lines.append(f"its {weights:.1f} GB at 16 bits are more than the memory: each pass reads them from disk")
    small = [stage for stage, size in memory.items() if size > have]
    return lines + [f"{s} needs about {memory[s]:.1f} GB of memory and {have:.1f} GB are here: it will be killed" for s in small]


def memory_by_stage(settings: Params, folder: Path) -> dict[str, float]:
    """{stage: bytes of memory at most}"""
    whole = 2 * count_weights(folder)
    sizes: Counter[str] = Counter()  # weights by layer; "": of all that is in none
    for name, tensor in weights_of(folder).items():
        sizes[(re.match(r"(.*?\.)?\d+\.", name) or [""])[0]] += math.prod(tensor.shape)
    outside = sizes.pop("", 0)
    largest = max(sizes.values(), default=0)
    needed = {"floor": IMPORTS + 4 * (outside + largest)}
    for name, variant in settings.variants.items():
        needed[f"quantize@{name}"] = IMPORTS + COPIES.get(variant.quantizer, 0) * whole + 4 * largest
        if variant.engine in LOADED:
            needed[f"benchmark@{name}"] = IMPORTS + variant_bytes(variant, folder)
    return needed


def disk_bytes(settings: Params, folder: Path) -> float:
    """What base and variants will take that are not here yet, and the largest temporary file."""
    here = {name for name in settings.variants if (artifacts.model_dir(name) / artifacts.MANIFEST).exists()}
    new = sum(variant_bytes(v, folder) for name, v in settings.variants.items() if name not in here and not _is_link(v, folder))
    if not (artifacts.BASE / artifacts.MANIFEST).exists():
        new += sum(tensor.bytes for tensor in read_headers(folder).values())
    passing = {name for name, v in settings.variants.items() if v.quantizer == "gguf"} - here
    return new + (2 * count_weights(folder) if passing else 0)


def variant_bytes(variant: Variant, folder: Path) -> float:
    """Bytes of a variant's files: its matrices at its bits and their scales, the rest at 16 or, in ONNX, 32 bits."""
    asked = options.with_defaults(quantizers.find(variant.quantizer), variant.options, quantizers.GIVEN)
    bits = options.nominal_bits(asked) or 16
    packed = sum(outputs * inputs for outputs, inputs in linear_shapes(folder).values())
    rest = 4 if bits == 32 or variant.engine == "onnxruntime" else 2
    return packed * (bits + (SCALES if bits < 16 else 0)) / 8 + (count_weights(folder) - packed) * rest


def _is_link(variant: Variant, folder: Path) -> bool:
    """Whether a cast has nothing to cast."""
    wanted = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}.get(str(variant.options.get("dtype")))
    return variant.quantizer == "cast" and {tensor.dtype for tensor in read_headers(folder).values()} == {wanted}
