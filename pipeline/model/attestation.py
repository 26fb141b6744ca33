"""Check what a variant's manifest promises against its files and its loaded model.

A quantizer that silently kept, skipped or unpacked something would otherwise be measured under a wrong name.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.core.errors import InvalidVariant
from pipeline.engines import Sampling
from pipeline.quantizers._probe import token_ids

TOLERANCE = 0.03  # of the expected bits: padding, a rounded group, a description of a few bytes
PLAIN = ("float32", "float16", "bfloat16", "F32", "F16", "BF16", "MatMul", "Gemm")  # products of unpacked weights
DECODED = 3  # tokens that a probe decodes
CLOSE = 1e-2  # of the largest logit: another process may choose another kernel, not other weights


def check_bits(facts: dict[str, Any], quantized_bits: float | None) -> None:
    """Raise if the packed matrices take other bits a weight (quantized_bits, measured) than their method says."""
    expected = facts.get("expected_bits")
    if expected is None or quantized_bits is None:
        return
    if abs(quantized_bits - expected) > TOLERANCE * expected:
        raise InvalidVariant(
            f"its packed matrices take {quantized_bits:.3g} bits a weight where the method says {expected:.3g}: "
            "it was not quantized as asked"
        )


def check_kernels(kernels: dict[str, int], manifest: dict[str, Any]) -> None:
    """Raise if the loaded model runs fewer or more packed matrices than were quantized."""
    expected = manifest.get("modules")
    if expected is None or not kernels:
        return
    packed = sum(n for kind, n in kernels.items() if not any(f"[{plain}]" in kind for plain in PLAIN))
    if packed != expected:
        raise InvalidVariant(f"{expected} matrices were quantized and {packed} run packed: {kernels}")


def check_answer(engine: Any, before: dict[str, Any] | None) -> None:
    """Raise if the loaded model's logits are not finite, or not those of the process that saved it.
    before: {token_ids, at, logits} of the model in memory (quantizers/_probe.py), where it could be asked."""
    ids = before["token_ids"] if before else token_ids(engine.vocab_size)
    ours = engine.logits(ids)[-1]
    if not np.isfinite(ours).all():
        raise InvalidVariant(f"{int((~np.isfinite(ours)).sum())} of its {len(ours)} logits after a probe are not finite")
    list(engine.stream(ids, DECODED, Sampling(stop=False)))  # decoding runs other kernels than reading
    if not before:
        return
    theirs = np.asarray(before["logits"])
    again = ours[np.asarray(before["at"])]
    error = float(np.abs(again - theirs).max() / np.abs(theirs).max())
    if not error <= before.get("close", CLOSE):
        raise InvalidVariant(
            f"loaded anew, it gives {again[0]:.4g} where the model that was saved gave {theirs[0]:.4g} (probe of "
            f"{len(ids)} tokens): saving or loading lost something"
        )
