"""What the source of ONNX Runtime's builder says it needs of a model's files."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from pipeline.core.errors import Unsupported
from pipeline.model.config import text_config
from pipeline.model.headers import read_headers


def refuse_missing_tensors(model_dir: Path) -> None:
    """Raise if the builder packs this class's experts only from tensors as they were published, and the base has none of them."""
    found = find_spec("onnxruntime_genai")
    if found is None:
        return
    models, kind = Path(found.origin or "").parent / "models", text_config(model_dir)["architectures"][0]
    made = re.search(rf'"{kind}".*?onnx_model = (\w+)\(', (models / "builder.py").read_text(encoding="utf-8"), re.DOTALL)
    files = [file.read_text(encoding="utf-8") for file in (models / "builders").glob("*.py")] if made else []
    for source in (text for text in files if made and re.search(rf"^class {made[1]}\b", text, re.MULTILINE)):
        for loader in re.findall(r"models\.loaders\.(\w+) import", source):
            wanted = re.findall(r'load_tensor\(f"\S+\.(\w+)"\)', (models / "loaders" / f"{loader}.py").read_text(encoding="utf-8"))
            held = {name.rpartition(".")[2] for name in read_headers(model_dir)}
            if lost := next((name for name in wanted if name not in held), None):
                raise Unsupported(f"ONNX Runtime's builder packs {kind} only from tensors as published, and the base has no {lost}")
