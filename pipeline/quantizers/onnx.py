"""onnx: ONNX Runtime GenAI's model builder: its own graph, fused attention, packed int4 or int8 products; no calibration."""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.core import artifacts, isolate
from pipeline.core.errors import Unsupported
from pipeline.evalset.calibration import Calibration
from pipeline.model.config import READ, sliding, text_config
from pipeline.model.headers import kept_layers, read_headers
from pipeline.quantizers import Facts
from pipeline.quantizers._reproducible import ANY_MACHINE

ENGINE = "onnxruntime"  # the one that reads it
LOG = artifacts.LOGS / "onnx.log"
QKV = {"q_proj", "k_proj", "v_proj"}


def quantize(
    model_dir: Path,
    out_dir: Path,
    *,
    calibration: Calibration,
    seed: int,
    precision: Literal["fp32", "int8", "int4"],
    block_size: Annotated[int, Field(ge=16)] = 32,
    keep: list[str] = [],  # noqa: B006  # read only
) -> Facts:
    """Build a graph for the CPU. block_size: weights that share a scale (int4 and int8). Kept layers stay in float32."""
    for needed in ("onnxruntime_genai", "onnx_ir"):
        if find_spec(needed) is None:
            raise Unsupported(f"quantizer 'onnx' needs {needed}; pip install onnxruntime-genai onnx-ir -c constraints.txt")
    kept = kept_layers(model_dir, keep)
    nodes = _nodes(kept)
    options = ["hf_token=false", "windowed_kv_cache=false"]  # a window's cache cannot be rewound to a shared prefix
    options += [f"block_size={block_size}"] if precision != "fp32" else []
    options += [f"nodes_to_exclude={','.join(nodes)}"] if nodes else []
    with tempfile.TemporaryDirectory() as cache:
        command = [
            sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", str(model_dir), "-i", str(model_dir),
            "-o", str(out_dir), "-p", precision, "-e", "cpu", "-c", cache, "--extra_options", *options,
        ]  # fmt: skip
        env = os.environ | {"GIT_DIR": os.devnull}  # else it stamps the graph with the commit of the surrounding repository
        try:
            isolate.tool(command, what="ONNX Runtime's builder", log=LOG, env=env)
        except RuntimeError as e:
            raise Unsupported(f"this model at {precision} is refused by {e}") from None
    shutil.copyfile(model_dir / "config.json", out_dir / "config.json")
    _check_kept(out_dir, nodes)
    return {"library": "onnxruntime-genai", "reproducible": ANY_MACHINE, "kept": kept}


def refuse(model_dir: Path, options: dict[str, Any]) -> None:
    """See `pipeline.quantizers`: an architecture that the builder does not know or changes, or its runtime does not run; q, k and v
    can only be kept together."""
    _nodes(kept_layers(model_dir, options["keep"]))
    config, known = text_config(model_dir), _architectures()
    kind, rope, tokens = config["architectures"][0], config.get("rope_parameters") or {}, sliding(config)[0]
    if known and kind not in known:
        raise Unsupported(f"ONNX Runtime's builder has no {kind}")
    if "rope_local_base_freq" in config or any(isinstance(value, dict) for value in rope.values()):  # older, and today's
        raise Unsupported("ONNX Runtime's builder reads one rotary embedding, and this model has one for each kind of layer")
    if 0 < tokens < READ and not config.get("layer_types"):
        raise Unsupported(f"all layers see a window of {tokens} tokens, which ONNX Runtime's builder does not keep")
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if turned := int(width * (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1)) % 16:
        raise Unsupported(f"ONNX Runtime turns heads by multiples of 16, and {turned} of {width} are left over")
    if options["precision"] != "fp32":
        _refuse_missing_tensors(model_dir, kind)


def _builder() -> Path | None:
    """The folder of the builder's source; None if it is not installed."""
    found = find_spec("onnxruntime_genai")
    return Path(found.origin or "").parent / "models" if found else None


@cache
def _architectures() -> set[str]:
    """The architectures named in the builder's source; empty if it is not installed."""
    folder = _builder()
    source = (folder / "builder.py").read_text(encoding="utf-8") if folder else ""
    compared = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare))
    named = [node for node in compared if ast.unparse(node.left) == "config.architectures[0]"]
    return {str(side.value) for node in named for side in node.comparators if isinstance(side, ast.Constant)}


def _refuse_missing_tensors(model_dir: Path, kind: str) -> None:
    """Raise if the builder packs this class's experts only from tensors as published, and the base lacks them."""
    folder = _builder()
    if folder is None:
        return
    made = re.search(rf'"{kind}".*?onnx_model = (\w+)\(', (folder / "builder.py").read_text(encoding="utf-8"), re.DOTALL)
    files = [file.read_text(encoding="utf-8") for file in (folder / "builders").glob("*.py")] if made else []
    for source in (text for text in files if made and re.search(rf"^class {made[1]}\b", text, re.MULTILINE)):
        for loader in re.findall(r"models\.loaders\.(\w+) import", source):
            wanted = re.findall(r'load_tensor\(f"\S+\.(\w+)"\)', (folder / "loaders" / f"{loader}.py").read_text(encoding="utf-8"))
            held = {name.rpartition(".")[2] for name in read_headers(model_dir)}
            if lost := next((name for name in wanted if name not in held), None):
                raise Unsupported(f"ONNX Runtime's builder packs {kind} only from tensors as published, and the base has no {lost}")


def _nodes(layers: list[str]) -> list[str]:
    """The builder's names of transformers' layers. It multiplies q, k and v at once, so they can only be kept together."""
    named: dict[str, set[str]] = {}
    for layer in layers:
        block, _, part = layer.rpartition(".")
        node = "/" + block.replace("self_attn", "attn").replace(".", "/").replace("layers/", "layers.")
        named.setdefault(f"{node}/{'qkv_proj' if part in QKV else part}/MatMul", set()).add(part)
    for node, parts in named.items():
        if "qkv_proj" in node and parts != QKV:
            raise Unsupported(f"options.keep: ONNX Runtime multiplies q, k and v at once; keep all three or none ({node})")
    return list(named)


def _check_kept(out_dir: Path, nodes: list[str]) -> None:
    """Raise if a layer to keep is not a plain product in the written graph."""
    import onnx

    graph = onnx.load(out_dir / "model.onnx", load_external_data=False).graph
    plain = {node.name for node in graph.node if node.op_type == "MatMul"}
    for node in nodes:
        if node not in plain:
            raise Unsupported(f"options.keep: the builder did not leave {node} as it is; take it out of keep")
