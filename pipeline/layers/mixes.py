"""Mixes: the format of each group, as the options of an ordinary variant.

A level is a format: a tensor type of GGUF; for other quantizers `low`, as their options pack, or `kept`, 16 bits by `keep`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from inspect import signature
from pathlib import Path

from pipeline import quantizers
from pipeline.core.errors import ParamsError
from pipeline.core.explain import did_you_mean, nominal_bits
from pipeline.core.params import Smallest
from pipeline.core.records import Options
from pipeline.layers.groups import Group
from pipeline.model.headers import count_weights, skeleton
from pipeline.quantizers import gguf
from pipeline.quantizers.gguf import EMBEDDINGS, HEAD

LOW, KEPT = "low", "kept"
Mix = dict[str, str]  # {group: level}


def check(setup: Smallest) -> None:
    """Raise `ParamsError` for a quantizer that stores all layers alike, and for unknown levels."""
    quantizers.check(setup.quantizer, setup.options)
    quantizers.check_engine(setup.quantizer, setup.engine)
    taken = signature(quantizers.find(setup.quantizer)).parameters
    if "keep" not in taken:
        raise ParamsError(f"smallest.quantizer: {setup.quantizer!r} stores all layers alike; choose one with an option `keep`")
    if given := {"keep", "types"} & setup.options.keys():
        raise ParamsError(f"smallest.options.{min(given)}: what is kept is what is looked for; leave it out")
    if setup.types and "types" not in taken:
        raise ParamsError(f"smallest.types: quantizer {setup.quantizer!r} has no tensor types: what it keeps has 16 bits")
    for name in levels(setup) if "types" in taken else []:
        if name not in gguf.TENSOR_TYPES:
            raise ParamsError(f"smallest: {name!r} is not a tensor type of llama.cpp{did_you_mean(name, list(gguf.TENSOR_TYPES))}")
    if len(levels(setup)) < 2:
        raise ParamsError("smallest.types: give at least one type besides options.type")


def levels(setup: Smallest) -> list[str]:
    """The levels, the one in `options` first."""
    if setup.quantizer == "gguf":
        return list(dict.fromkeys([str(setup.options.get("type")), *setup.types]))
    return [LOW, KEPT]


def least_bytes(setup: Smallest, base: Path) -> float | None:
    """Bytes of all matrices at the lowest level; None if the options name no bits, or the model's class is unknown."""
    model, low = skeleton(base), levels(setup)[0]
    if model is None:
        return None
    inside = sum(m.weights for m in model.matrices.values())
    outside = count_weights(base) - inside
    if setup.quantizer != "gguf":
        bits = nominal_bits(setup.options)
        return None if bits is None else (inside * bits + outside * 16) / 8
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[low]]
    return float((inside + outside) * size / block)


def held_by(setup: Smallest, level: str, groups: Sequence[Group], base: Path) -> list[Group]:
    """The groups that can be stored at a level. Quantizers other than GGUF keep embeddings and head at both."""
    if setup.quantizer != "gguf":
        return list(groups)
    model = skeleton(base)
    assert model is not None  # checked by groups_of
    hidden = next(m.inputs for m in model.matrices.values() if m.block)
    widths = {name: matrix.inputs for name, matrix in model.matrices.items()} | {EMBEDDINGS: hidden, HEAD: hidden}
    return [g for g in groups if all(gguf.stores(level, widths[module]) for module in g.modules)]


def uniform(setup: Smallest, level: str, groups: Sequence[Group], base: Path) -> Mix:
    """One level for every group that can be stored at it; empty if not all can."""
    held = held_by(setup, level, groups, base)
    return {g.name: level for g in held} if len(held) == len(groups) else {}


def options_of(setup: Smallest, groups: Sequence[Group], mix: Mix) -> Options:
    """The options of the variant that stores groups by a mix: a pattern for the type of most matrices of a name, then
    exceptions."""
    if setup.quantizer != "gguf":
        return {**setup.options, "keep": [m for g in groups if g.layer is not None and mix[g.name] == KEPT for m in g.modules]}
    asked = {module: mix[g.name] for g in groups if g.name in mix for module in g.modules}
    by_name: dict[str, Counter[str]] = {}
    for module, level in asked.items():
        by_name.setdefault(module.rpartition(".")[2], Counter())[level] += 1
    most = {last: counts.most_common(1)[0][0] for last, counts in by_name.items()}
    types = {last if last in asked else f"*.{last}": level for last, level in most.items()}
    types |= {module: level for module, level in asked.items() if level != most[module.rpartition(".")[2]]}
    return {**setup.options, "types": types}
