"""Write safetensors files tensor by tensor, so that memory stays near one tensor; the bytes are those that safetensors would
write."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SHARD_BYTES = 4_000_000_000  # of a file, unless one tensor is larger
CHUNK = 1 << 22  # elements worked on at a time
# torch's type: safetensors' name and bytes of an element; within a file the last of these come first
TYPES = {
    "bool": ("BOOL", 1), "uint8": ("U8", 1), "int8": ("I8", 1), "float8_e5m2": ("F8_E5M2", 1), "float8_e4m3fn": ("F8_E4M3", 1),
    "int16": ("I16", 2), "float16": ("F16", 2), "bfloat16": ("BF16", 2), "int32": ("I32", 4), "float32": ("F32", 4),
    "float64": ("F64", 8), "int64": ("I64", 8),
}  # fmt: skip
ORDER = list(TYPES)
Shapes = dict[str, tuple[str, tuple[int, ...]]]  # {tensor: (torch's type, shape)}


def write(folder: Path, shapes: Shapes, values: Iterable[tuple[str, Any]], metadata: dict[str, str]) -> None:
    """Write all of `shapes` as model.safetensors, or as shards with their index. values: (name, the tensor's next elements, flat),
    in any order of tensors."""
    import torch

    shards = list(_shards(shapes))
    count = len(shards)
    names = [f"model-{k + 1:05}-of-{count:05}.safetensors" for k in range(count)] if count > 1 else ["model.safetensors"]
    where: dict[str, tuple[Path, int]] = {}  # of the next element
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as f:
            begin = f.write(header(shard, metadata))
        where |= {tensor: (folder / name, begin + offset) for tensor, offset in offsets(shard).items()}
    for tensor, value in values:
        file, at = where[tensor]
        with file.open("rb+") as f:
            f.seek(at)
            where[tensor] = (file, at + f.write(memoryview(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())))
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": sum(map(_size, shapes.values()))}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def chunks(tensor: Any) -> Iterator[Any]:
    yield from tensor.contiguous().view(-1).split(CHUNK)


def header(shapes: Shapes, metadata: dict[str, str]) -> bytes:
    """A header with its length, as safetensors writes them; metadata sorted."""
    tensors = {
        name: {"dtype": TYPES[kind][0], "shape": list(shape), "data_offsets": [begin, begin + _size((kind, shape))]}
        for name, begin in offsets(shapes).items()
        for kind, shape in [shapes[name]]
    }
    content = {"__metadata__": dict(sorted(metadata.items())), **tensors}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return struct.pack("<Q", len(text)) + text


def offsets(shapes: Shapes) -> dict[str, int]:
    """{tensor: offset of its data after the header}, in the order of the file."""
    begins, at = {}, 0
    for name in sorted(shapes, key=lambda n: (-ORDER.index(shapes[n][0]), n)):
        begins[name] = at
        at += _size(shapes[name])
    return begins


def _shards(shapes: Shapes) -> Iterator[Shapes]:
    shard: Shapes = {}
    held = 0
    for name, described in shapes.items():
        if shard and held + _size(described) > SHARD_BYTES:
            yield shard
            shard, held = {}, 0
        shard[name] = described
        held += _size(described)
    yield shard


def _size(described: tuple[str, tuple[int, ...]]) -> int:
    return TYPES[described[0]][1] * math.prod(described[1])
