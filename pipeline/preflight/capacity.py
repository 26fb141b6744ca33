"""What a run will take of memory and disk, by stage: from headers and params, against what is here, before any work.

Estimates: memory is what no file backs (a mapped model may leave it again), by what tests/bench/size.py measured.
"""

from __future__ import annotations

import math
import os
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
# What a method's library holds at most, in parts of the model at 16 bits; all others go tensor by tensor.
COPIES = {"awq": 1.0, "bnb": 0.5, "gptq": 1.0, "onnx": 2.8, "rtn": 1.0}
LOADED = ("onnxruntime",)  # engines that read a variant into memory, and do not map it
SCALES = 0.5  # bits a packed weight, for scales and zero points
WIDTH = ("dtype", "scheme", "bits", "type", "precision")  # options whose first number is a weight's bits


def told(settings: Params) -> list[str]:
    """One line of the whole, and one for each stage or disk that is too small, in words; empty if the model is not here yet."""
    folder = base_folder(settings)
    if folder is None:
        return []
    memory = memory_by_stage(settings, folder)
    most = max(memory, key=memory.__getitem__)
    have, weights = quota.memory_bytes(), 2 * count_weights(folder)
    need, free = disk_bytes(settings, folder), shutil.disk_usage(Path.cwd()).free
    lines = [
        f"the model's {weights / 2e9:.2f} billion weights: about {need / 1e9:.1f} GB more on disk ({free / 1e9:.1f} GB free), "
        f"at most {memory[most] / 1e9:.1f} GB of memory besides the mapped model, in {most} ({have / 1e9:.1f} GB here)"
    ]
    if need > free:
        lines.append(f"the disk is too small: about {need / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free")
    if not _links():
        lines.append("files cannot be linked here: run `dvc config --local cache.type copy`; DVC then keeps each artifact twice")
    if weights > have:
        lines.append(f"its {weights / 1e9:.1f} GB at 16 bits are more than the memory: each pass reads them from disk")
    for stage, bytes in memory.items():
        if bytes > have:
            lines.append(f"{stage} needs about {bytes / 1e9:.1f} GB of memory and {have / 1e9:.1f} GB are here: it will be killed")
    return lines


def memory_by_stage(settings: Params, folder: Path) -> dict[str, float]:
    """{stage: bytes of its own at most}"""
    whole = 2 * count_weights(folder)
    largest, outside = _parts(folder)
    found = {"floor": IMPORTS + 4 * (outside + largest)}
    for name, variant in settings.variants.items():
        found[f"quantize@{name}"] = IMPORTS + COPIES.get(variant.quantizer, 0) * whole + 4 * largest
        if variant.engine in LOADED:
            found[f"benchmark@{name}"] = IMPORTS + variant_bytes(variant, folder)
    return found


def disk_bytes(settings: Params, folder: Path) -> float:
    """What base and variants will take that are not here yet, and the largest file that is made on the way."""
    here = {name for name in settings.variants if (artifacts.model_dir(name) / artifacts.MANIFEST).exists()}
    new = sum(variant_bytes(v, folder) for name, v in settings.variants.items() if name not in here and not _is_link(v, folder))
    if not (artifacts.BASE / artifacts.MANIFEST).exists():
        new += sum(tensor.bytes for tensor in read_headers(folder).values())
    passing = {name for name, v in settings.variants.items() if v.quantizer == "gguf"} - here
    return new * (1 if _links() else 2) + (2 * count_weights(folder) if passing else 0)


def variant_bytes(variant: Variant, folder: Path) -> float:
    """What a variant's files hold: its matrices at its bits and their scales, all else at 16 or, in ONNX, 32."""
    bits = _bits(variant)
    packed = sum(outputs * inputs for outputs, inputs in linear_shapes(folder).values())
    rest = 4 if bits == 32 or variant.engine == "onnxruntime" else 2
    return packed * (bits + (SCALES if bits < 16 else 0)) / 8 + (count_weights(folder) - packed) * rest


def _bits(variant: Variant) -> int:
    asked = options.with_defaults(quantizers.find(variant.quantizer), variant.options, quantizers.GIVEN)
    return next((int(number) for key in WIDTH for number in re.findall(r"\d+", str(asked.get(key, "")))), 16)


def _is_link(variant: Variant, folder: Path) -> bool:
    """Whether a cast has nothing to cast."""
    wanted = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}.get(str(variant.options.get("dtype")))
    return variant.quantizer == "cast" and {tensor.dtype for tensor in read_headers(folder).values()} == {wanted}


def _parts(folder: Path) -> tuple[int, int]:
    """Weights of the largest layer, and of all that is in none."""
    found: Counter[str] = Counter()
    for name, tensor in weights_of(folder).items():
        found[(re.match(r"(.*?\.)?\d+\.", name) or [""])[0]] += math.prod(tensor.shape)
    outside = found.pop("", 0)
    return max(found.values(), default=0), outside


def _links() -> bool:
    """Whether a file here can have a second name, as DVC's cache gives it."""
    artifacts.ARTIFACTS.mkdir(exist_ok=True)
    one, other = (artifacts.ARTIFACTS / f".link.{os.getpid()}.{k}.tmp" for k in (0, 1))
    try:
        one.touch()
        other.hardlink_to(one)
    except OSError:
        return False
    finally:
        one.unlink(missing_ok=True)
        other.unlink(missing_ok=True)
    return True
