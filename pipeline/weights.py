"""What safetensors files hold, read from their headers: nothing is loaded, so the figures are those of the files."""

from __future__ import annotations

import fnmatch
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import ArtifactError, ParamsError
from pipeline.core.explain import did_you_mean


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def read_headers(folder: Path) -> dict[str, Tensor]:
    """{tensor name: type, shape, bytes} over all safetensors files of a folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as f:
            try:
                header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
            except (struct.error, ValueError, MemoryError, OverflowError):
                raise ArtifactError(f"{file} is no safetensors file or is cut short; delete it and `dvc repro`") from None
        for name, t in header.items():
            if name != "__metadata__":
                begin, end = t["data_offsets"]
                found[name] = Tensor(t["dtype"], tuple(t["shape"]), end - begin)
    return found


def count_weights(folder: Path) -> int:
    """Number of weights; tied tensors are stored, and counted, once."""
    return sum(math.prod(t.shape) for t in read_headers(folder).values())


def linear_shapes(folder: Path) -> dict[str, tuple[int, int]]:
    """{layer: (out_features, in_features)} of the matrices inside the decoder layers: what weight quantizers pack."""
    return {
        name.removesuffix(".weight"): (t.shape[0], t.shape[1])
        for name, t in read_headers(folder).items()
        if name.endswith(".weight") and len(t.shape) == 2 and ".layers." in name
    }


def linear_widths(folder: Path) -> dict[str, int]:
    """{layer: in_features} of `linear_shapes`."""
    return {name: shape[1] for name, shape in linear_shapes(folder).items()}


def packed_bits(
    folder: Path,
    kept: list[str],
    *,
    weight: float,
    group: int = 0,
    group_size: int = -1,
    row: int = 0,
    column: int = 0,
    each: int = 0,
) -> float:
    """Bits a weight that a method's packed matrices take, from their shapes.

    weight: bits of a code; group: of what a group of `group_size` inputs shares (-1: a row); row, column: of what an output or an
    input row carries; each: of what every matrix carries.
    """
    bits = weights = 0.0
    for name, (outputs, inputs) in linear_shapes(folder).items():
        if name not in kept:
            groups = 1 if group_size == -1 else math.ceil(inputs / group_size)
            bits += outputs * (inputs * weight + groups * group + row) + inputs * column + each
            weights += outputs * inputs
    return bits / weights


def kept_layers(folder: Path, patterns: list[str]) -> list[str]:
    """Names of the decoder layers' matrices that `options.keep` leaves at 16 bit.

    patterns: as in a shell, matched against whole names or their ends (`*.down_proj`, `layers.0.*`). One that matches nothing
    is an error: it would quantize what somebody meant to keep.
    """
    names = list(linear_widths(folder))
    found: set[str] = set()
    for pattern in patterns:
        own = {n for n in names if fnmatch.fnmatchcase(n, pattern) or fnmatch.fnmatchcase(n, f"*.{pattern}")}
        if not own:
            raise ParamsError(f"options.keep: {pattern!r} matches no layer{did_you_mean(pattern, names[:7])}")
        found |= own
    return [n for n in names if n in found]
