"""What tests of models share: a fetched base, changed weights and configs, calibration rows, GGUF files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline import download
from pipeline.core import artifacts
from pipeline.core.params import PathModel
from pipeline.evalset.calibration import Calibration

SENTENCEPIECE = {
    "model_type": "bpe", "byte_fallback": True, "minloglevel": 2, "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}  # fmt: skip


def fetch(folder: Path, out: Path, **more: Any) -> Any:
    """Download a base from a local folder or GGUF file; returns the manifest's facts."""
    out.mkdir()
    return download.download(PathModel(source="path", path=str(folder), **more), out)


def tensors_of(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def write_tensors(folder: Path, tensors: dict[str, Any], name: str = "model.safetensors") -> None:
    from safetensors.torch import save_file

    (folder / name).unlink(missing_ok=True)  # tensors that were loaded from it are mapped
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / name, metadata={"format": "pt"})


def change_weights(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    tensors = tensors_of(folder)
    change(tensors)
    write_tensors(folder, tensors)
    return folder


def change_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | values), encoding="utf-8")


def calibration(folder: Path, rows: list[list[int]] | None = None) -> Calibration:
    """Rows as `calibrate` writes them: those given, or four of 64 tokens."""
    rows = rows or [[5 + (7 * k + r) % 500 for k in range(64)] for r in range(4)]
    artifacts.write_jsonl(folder / "rows.jsonl", ({"token_ids": row} for row in rows))
    files = artifacts.files_of(folder)
    artifacts.write_json(folder / artifacts.MANIFEST, {"status": "ok", "rows_used": len(rows), "files": files, "digest": "d"})
    return Calibration(folder)


def write_gguf_parts(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
