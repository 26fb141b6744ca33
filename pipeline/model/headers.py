"""Read safetensors headers, and what their model's class makes of them; no weights are loaded."""

from __future__ import annotations

import fnmatch
import inspect
import json
import math
import re
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from pipeline.core.droppings import data_files
from pipeline.core.errors import ArtifactError, ParamsError
from pipeline.core.explain import did_you_mean


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    bytes: int


Packs: TypeAlias = Callable[["Matrix"], bool]


def read_headers(folder: Path) -> dict[str, Tensor]:
    """{tensor name: type, shape, bytes} over all safetensors files of a folder."""
    tensors = {}
    for file in data_files(folder, "*.safetensors"):
        with file.open("rb") as f:
            try:
                header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
            except (struct.error, ValueError, MemoryError, OverflowError):
                raise ArtifactError(f"{file} is not a safetensors file, or cut short; delete it and `dvc repro`") from None
        for name, t in header.items():
            if name != "__metadata__":
                begin, end = t["data_offsets"]
                tensors[name] = Tensor(t["dtype"], tuple(t["shape"]), end - begin)
    return tensors


def weights_of(folder: Path, base: Path | None = None) -> dict[str, Tensor]:
    """Headers of a model's weights, each once: without second copies of tied ones, and buffers that transformers does not read,
    such as masks and rotary frequencies. base: the folder whose class decides, if another."""
    headers, model = read_headers(folder), skeleton(base or folder)
    if model is None:
        return headers
    unread = re.compile("|".join(model.unread) or r"(?!)")
    kept = {name: t for name, t in headers.items() if name in model.parameters or not unread.search(name)}
    for copy, source in model.tied.items():
        # the model's names, or its base class's, without the first part
        one, other = (next((n for n in (p, p.partition(".")[2]) if n in kept), None) for p in (copy, source))
        if one and other and _equal(folder, one, other):
            del kept[one]
    return kept


def _equal(folder: Path, one: str, other: str) -> bool:
    import torch
    from safetensors import safe_open

    held: dict[str, torch.Tensor] = {}
    for file in data_files(folder, "*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            held |= {name: tensors.get_tensor(name) for name in {one, other} & set(tensors.keys())}
    return torch.equal(held[one], held[other])


def count_weights(folder: Path) -> int:
    """Number of weights; tied tensors count once, however often they are stored."""
    return sum(math.prod(t.shape) for t in weights_of(folder).values())


@dataclass(frozen=True)
class Matrix:
    """kind: its module's class; linear: whether it is used as a Linear; block: whether it is in a repeated layer; count: of experts
    in one tensor; bare: whether the surrounding class multiplies with its weight directly."""

    kind: str
    outputs: int
    inputs: int
    linear: bool
    block: bool
    count: int = 1
    bare: bool = False

    @property
    def weights(self) -> int:
        return self.outputs * self.inputs * self.count


@dataclass(frozen=True)
class Skeleton:
    """Facts of a model's class: its matrices except the output head, by module; names of tied parameters, {copy: source}; patterns
    of what its loader ignores, except parameters, whose names are with and without the base class's in front."""

    matrices: dict[str, Matrix]
    tied: dict[str, str]
    unread: tuple[str, ...]
    head: str
    parameters: frozenset[str]

    @property
    def ties_head(self) -> bool:
        return f"{self.head}.weight" in self.tied


def skeleton(folder: Path) -> Skeleton | None:
    """The model of a folder's config.json, built without memory; None if its class is unknown or the model's own code."""
    file = folder / "config.json"
    return _skeleton(str(folder.resolve()), file.stat().st_mtime_ns) if file.exists() else None


@lru_cache
def _skeleton(folder: str, changed: int) -> Skeleton | None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception:  # download says what is wrong with it
        return None
    head, head_name, matrices = model.get_output_embeddings(), "lm_head", {}
    lists = [part for part in model.get_decoder().modules() if isinstance(part, torch.nn.ModuleList)]
    repeated = {part for modules in lists for part in modules.modules()}
    for name, part in model.named_modules():
        block = part in repeated
        if part is head:
            head_name = name
        elif isinstance(part, torch.nn.Linear):
            around, _, last = name.rpartition(".")
            bare = last in _bare(type(model.get_submodule(around)).__module__)
            plain = type(part).forward is torch.nn.Linear.forward and not bare  # Falcon's uses attributes that no packed weight has
            matrices[name] = Matrix(type(part).__name__, part.out_features, part.in_features, plain, block, bare=bare)
        elif isinstance(part, Conv1D):
            matrices[name] = Matrix("Conv1D", part.weight.shape[1], part.weight.shape[0], False, block)
        elif "Experts" in type(part).__name__:
            turned = getattr(part, "is_transposed", False)
            for parameter, tensor in part.named_parameters(recurse=False):
                if tensor.dim() == 3:
                    count, outputs, inputs = tensor.shape if not turned else (tensor.shape[0], *tensor.shape[:0:-1])
                    matrices[f"{name}.{parameter}"] = Matrix(type(part).__name__, outputs, inputs, False, block, count)
    unread = (*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
    parameters = frozenset(n for name, _ in model.named_parameters() for n in (name, name.partition(".")[2]))
    return Skeleton(matrices, dict(getattr(model, "all_tied_weights_keys", None) or {}), unread, head_name, parameters)


@lru_cache
def _bare(module: str) -> set[str]:
    """Parts whose weights a module's classes multiply with directly, such as Mamba's time steps."""
    return set(re.findall(r"self\.(\w+)\.weight @", inspect.getsource(sys.modules[module])))


# Which matrices a library packs.
def any_linear(matrix: Matrix) -> bool:
    """Every Linear used as one, except those whose weights torch.nn.MultiheadAttention reads."""
    return matrix.linear and matrix.kind != "NonDynamicallyQuantizableLinear"


def plain_linear(matrix: Matrix) -> bool:
    """Every Linear, no subclasses, and GPT-2's Conv1D."""
    return matrix.kind in ("Linear", "Conv1D")


def in_blocks(matrix: Matrix) -> bool:
    """Every matrix of the layers, including fused experts."""
    return matrix.block


def linear_shapes(folder: Path, packs: Packs = in_blocks) -> dict[str, tuple[int, int]]:
    """{module: (out_features, in_features)} of the matrices that a method packs."""
    model = skeleton(folder)
    if model is None:
        return {
            name.removesuffix(".weight"): (t.shape[0], t.shape[1])
            for name, t in read_headers(folder).items()
            if name.endswith(".weight") and len(t.shape) == 2 and ".layers." in name
        }
    return {name: (m.outputs, m.inputs) for name, m in model.matrices.items() if packs(m)}


def linear_widths(folder: Path, packs: Packs = in_blocks) -> dict[str, int]:
    return {name: shape[1] for name, shape in linear_shapes(folder, packs).items()}


def packed_bits(
    folder: Path, kept: list[str], *, weight: float, group: int = 0, group_size: int = -1,
    row: int = 0, column: int = 0, each: int = 0, packs: Packs = in_blocks,
) -> float:  # fmt: skip
    """Bits per weight of a method's packed matrices, from their shapes. weight: bits of a code; group: bits shared by `group_size`
    inputs (-1: a row); row, column: bits of each output and input row; each: bits of every matrix."""
    bits = weights = 0.0
    for name, (outputs, inputs) in linear_shapes(folder, packs).items():
        if name not in kept:
            groups = 1 if group_size == -1 else math.ceil(inputs / group_size)
            bits += outputs * (inputs * weight + groups * group + row) + inputs * column + each
            weights += outputs * inputs
    return bits / weights


def kept_layers(folder: Path, patterns: list[str]) -> list[str]:
    """Names of the layers' matrices that `options.keep` leaves at 16 bits. patterns: as in a shell, for whole names or their ends
    (`*.down_proj`, `layers.0.*`); one that matches nothing is an error."""
    names = list(linear_shapes(folder))
    kept: set[str] = set()
    for pattern in patterns:
        matched = {n for n in names if fnmatch.fnmatchcase(n, pattern) or fnmatch.fnmatchcase(n, f"*.{pattern}")}
        if not matched:
            raise ParamsError(f"options.keep: {pattern!r} matches no layer{did_you_mean(pattern, names[:7])}")
        kept |= matched
    return [n for n in names if n in kept]
