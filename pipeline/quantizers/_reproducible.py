"""Equal inputs give equal files: where (a manifest's `reproducible`), and how they are saved."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from pipeline.model.streaming import SHARD_BYTES

ANY_MACHINE = "any machine"
# For methods that calibrate: the processor chooses the kernels that sum activations, and a Cholesky factor depends on the threads.
# One last bit changes one rounding, and so every later one.
SAME_MACHINE = "same processor, same number of threads"


def save(model: Any, out_dir: Path) -> None:
    """`save_pretrained`, with sorted metadata in each file's header: safetensors writes it as a hash map, seeded per process."""
    model.save_pretrained(out_dir, max_shard_size=SHARD_BYTES)
    for file in out_dir.glob("*.safetensors"):
        with file.open("rb+") as f:
            (size,) = struct.unpack("<Q", f.read(8))
            header = json.loads(f.read(size))
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
            f.seek(8)
            f.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size))
