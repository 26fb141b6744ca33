"""What safetensors files hold, read from their headers: nothing is loaded, so the figures are those of the files."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ArtifactError

FULL = {"F64", "F32", "F16", "BF16"}  # types that hold a weight as it is; anything else is packed or scaled


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


@dataclass(frozen=True)
class Measured:
    """weight_bytes: of all tensors; bits_per_weight: over the base's weights; quantized_share: of the base's weights."""

    weight_bytes: int
    bits_per_weight: float
    quantized_share: float


def measure(base: Path, variant: Path) -> Measured:
    """Size of a variant by its files. A base weight counts as quantized unless the variant holds it in a full type."""
    ours, theirs = read_headers(variant), read_headers(base)
    total = sum(math.prod(t.shape) for t in theirs.values())
    kept = sum(
        math.prod(t.shape)
        for name, t in theirs.items()
        if name in ours and ours[name].shape == t.shape and ours[name].dtype in FULL
    )
    size = sum(t.bytes for t in ours.values())
    return Measured(size, 8 * size / total, 1 - kept / total)


def linear_widths(folder: Path) -> dict[str, int]:
    """{layer: in_features} of the matrices inside the decoder layers: what weight quantizers pack in groups."""
    return {
        name.removesuffix(".weight"): t.shape[1]
        for name, t in read_headers(folder).items()
        if name.endswith(".weight") and len(t.shape) == 2 and ".layers." in name
    }
