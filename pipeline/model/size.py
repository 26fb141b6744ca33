"""What a variant's files hold, whatever their format: bytes, bits a weight, share quantized. Only headers are read."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.droppings import data_files
from pipeline.core.errors import ArtifactError
from pipeline.model.headers import count_weights, weights_of

FULL = set("F64 F32 F16 BF16 FLOAT FLOAT16 BFLOAT16 DOUBLE".split())  # anything else is packed or scaled


@dataclass(frozen=True)
class Measured:
    """bits_per_weight and quantized_share: of the base's weights; packed_bits: per quantized weight, with its scales (None where
    the format does not tell them apart); tensor_types: bytes."""

    weight_bytes: int
    bits_per_weight: float
    quantized_share: float
    packed_bits: float | None
    tensor_types: dict[str, int]


def measure(base: Path, variant: Path) -> Measured:
    """Measure a variant by its files: GGUF, ONNX or safetensors."""
    packed: int | None = None
    if data_files(variant, "*.gguf"):
        types, quantized = _gguf(variant)
    elif (variant / "model.onnx").exists():
        types, quantized = _onnx(base, variant)
    elif data_files(variant, "*.safetensors"):
        types, quantized, packed = _safetensors(base, variant)
    else:
        raise ArtifactError(f"{variant} holds no weights: no .safetensors, .gguf or model.onnx was written")
    total, size = count_weights(base), sum(types.values())
    bits = 8 * packed / quantized if packed is not None and quantized else None
    return Measured(size, 8 * size / total, quantized / total, bits, dict(types))


def _safetensors(base: Path, variant: Path) -> tuple[Counter[str], int, int]:
    """({type: bytes}, weights quantized, bytes they take): a base weight counts as quantized unless held in a full type.
    A weight that a library renamed is recognized by its shape."""
    ours, theirs = weights_of(variant, base), weights_of(base)
    types: Counter[str] = Counter()
    for tensor in ours.values():
        types[tensor.dtype] += tensor.bytes
    kept = {n: n for n, t in theirs.items() if n in ours and ours[n].shape == t.shape and ours[n].dtype in FULL}
    renamed: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in ours.items():
        if name not in theirs and tensor.dtype in FULL:
            renamed.setdefault(tensor.shape, []).append(name)
    for name, tensor in theirs.items():
        if name not in ours and renamed.get(tensor.shape):
            kept[name] = renamed[tensor.shape].pop()
    quantized = sum(math.prod(t.shape) for n, t in theirs.items() if n not in kept)
    whole = set(kept.values())
    return types, quantized, sum(t.bytes for n, t in ours.items() if n not in whole)


def _gguf(variant: Path) -> tuple[Counter[str], int]:
    from gguf import GGUFReader

    types: Counter[str] = Counter()
    quantized = 0
    for tensor in GGUFReader(data_files(variant, "*.gguf")[0]).tensors:
        types[tensor.tensor_type.name] += int(tensor.n_bytes)
        quantized += 0 if tensor.tensor_type.name in FULL else int(tensor.n_elements)
    return types, quantized


def _onnx(base: Path, variant: Path) -> tuple[Counter[str], int]:
    """Initializers by element type; quantized: what MatMulNBits and QMoE-like nodes multiply with, by their N and K."""
    import onnx

    graph = onnx.load(variant / "model.onnx", load_external_data=False).graph
    types: Counter[str] = Counter()
    for tensor in graph.initializer:
        lengths = [int(e.value) for e in tensor.external_data if e.key == "length"]
        name = onnx.TensorProto.DataType.Name(tensor.data_type)
        types[name] += lengths[0] if lengths else len(tensor.raw_data)
    shapes = ({a.name: a.i for a in node.attribute} for node in graph.node if node.op_type == "MatMulNBits")
    return types, min(sum(shape["N"] * shape["K"] for shape in shapes), count_weights(base))
