"""Measure a variant's files, and check its quantizer's facts against its files and its loaded model.

Else a quantizer that silently kept, skipped or unpacked something would be measured under a wrong name."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.droppings import data_files
from pipeline.core.errors import ArtifactError, InvalidVariant
from pipeline.core.records import BuildFacts, Json, Size
from pipeline.engines import ROWS, Sampling
from pipeline.model.headers import count_weights, weights_of
from pipeline.quantizers._probe import token_ids

FULL = set("F64 F32 F16 BF16 FLOAT FLOAT16 BFLOAT16 DOUBLE".split())  # all other types are packed or scaled
TOLERANCE = 0.03  # of the expected bits: padding, a rounded group, a few bytes of description
PLAIN = ("float32", "float16", "bfloat16", "F32", "F16", "BF16", "MatMul", "Gemm")  # products of unpacked weights
DECODED = 3  # tokens that a probe decodes
CLOSE = 1e-2  # of the largest logit: another process may choose another kernel


def measure(base: Path, variant: Path) -> Size:
    """Measure a variant by the headers of its files: GGUF, ONNX or safetensors."""
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
    return {
        "weight_bytes": size, "bits_per_weight": 8 * size / total, "quantized_share": quantized / total,
        "packed_bits": 8 * packed / quantized if packed is not None and quantized else None, "tensor_types": dict(types),
    }  # fmt: skip


def _safetensors(base: Path, variant: Path) -> tuple[Counter[str], int, int]:
    """({type: bytes}, quantized weights, their bytes): a base weight counts as quantized unless held in a full type. A weight that
    a library renamed is recognized by its shape."""
    held, weights = weights_of(variant, base), weights_of(base)
    types: Counter[str] = Counter()
    for tensor in held.values():
        types[tensor.dtype] += tensor.bytes
    kept = {n: n for n, t in weights.items() if n in held and held[n].shape == t.shape and held[n].dtype in FULL}
    renamed: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in held.items():
        if name not in weights and tensor.dtype in FULL:
            renamed.setdefault(tensor.shape, []).append(name)
    for name, tensor in weights.items():
        if name not in held and renamed.get(tensor.shape):
            kept[name] = renamed[tensor.shape].pop()
    quantized = sum(math.prod(t.shape) for n, t in weights.items() if n not in kept)
    whole = set(kept.values())
    return types, quantized, sum(t.bytes for n, t in held.items() if n not in whole)


def _gguf(variant: Path) -> tuple[Counter[str], int]:
    from gguf import GGUFReader

    types: Counter[str] = Counter()
    quantized = 0
    for tensor in GGUFReader(data_files(variant, "*.gguf")[0]).tensors:
        types[tensor.tensor_type.name] += int(tensor.n_bytes)
        quantized += 0 if tensor.tensor_type.name in FULL else int(tensor.n_elements)
    return types, quantized


def _onnx(base: Path, variant: Path) -> tuple[Counter[str], int]:
    """({type: bytes} of initializers, quantized weights): those of MatMulNBits nodes, by their N and K."""
    import onnx

    graph = onnx.load(variant / "model.onnx", load_external_data=False).graph
    types: Counter[str] = Counter()
    for tensor in graph.initializer:
        lengths = [int(e.value) for e in tensor.external_data if e.key == "length"]
        name = onnx.TensorProto.DataType.Name(tensor.data_type)
        types[name] += lengths[0] if lengths else len(tensor.raw_data)
    shapes = ({a.name: a.i for a in node.attribute} for node in graph.node if node.op_type == "MatMulNBits")
    return types, min(sum(shape["N"] * shape["K"] for shape in shapes), count_weights(base))


def check_bits(facts: BuildFacts, packed_bits: float | None) -> None:
    """Raise if the measured bits per weight of packed matrices (packed_bits) are not those of the method."""
    expected = facts.get("expected_bits")
    if expected and packed_bits is not None and abs(packed_bits - expected) > TOLERANCE * expected:
        taken = f"its packed matrices take {packed_bits:.3g} bits per weight, not the {expected:.3g} of the method"
        raise InvalidVariant(f"{taken}: it was not quantized as requested")


def check_kernels(kernels: dict[str, int], facts: Mapping[str, Any]) -> None:
    """Raise if the loaded model runs fewer or more packed matrices than were quantized."""
    expected = facts.get("modules")
    packed = sum(n for kind, n in kernels.items() if not any(f"[{plain}]" in kind for plain in PLAIN))
    if expected is not None and kernels and packed != expected:
        raise InvalidVariant(f"{expected} matrices were quantized and {packed} run packed: {kernels}")


def check_cache(engine: Any, ids: Sequence[int]) -> None:
    """Raise if an engine that should pack keys and values scores every token as without packing, or takes as many bytes."""
    plain = engine.plain()
    packed, whole = ([block for *_, block in e.logit_blocks([ids], [0], ROWS)] for e in (engine, plain))
    if all(map(np.array_equal, packed, whole)):
        raise InvalidVariant(f"its key-value cache was not quantized: without kv {len(ids) - 1} tokens have the same logits")
    for e in (engine, plain):
        list(e.stream(ids, DECODED, Sampling(stop=False)))
    taken, most = engine.trace.bytes_per_token, plain.trace.bytes_per_token
    if taken and most and taken > most * (1 + engine.trace.element_bytes / plain.trace.element_bytes) / 2:
        raise InvalidVariant(f"its key-value cache was not quantized: a token takes {taken:.0f} bytes, without kv {most:.0f}")


def check_answer(engine: Any, before: Json | None) -> None:
    """Raise if the loaded model's logits are not finite, or not those of the process that saved it. before: {token_ids, at, logits}
    of the model in memory (quantizers/_probe.py), if it could be probed."""
    ids = before["token_ids"] if before else token_ids(engine.vocab_size)
    logits = engine.logits(ids)[-1]
    if not np.isfinite(logits).all():
        raise InvalidVariant(f"{int((~np.isfinite(logits)).sum())} of its {len(logits)} logits after a probe are not finite")
    list(engine.stream(ids, DECODED, Sampling(stop=False)))  # decoding runs other kernels than reading
    if not before:
        return
    saved = np.asarray(before["logits"])
    again = logits[np.asarray(before["at"])]
    error = float(np.abs(again - saved).max() / np.abs(saved).max())
    if not error <= before.get("close", CLOSE):
        differ = f"it gives {again[0]:.4g} and the saved model gave {saved[0]:.4g} (probe of {len(ids)} tokens)"
        raise InvalidVariant(f"after loading, {differ}: saving or loading lost something")
