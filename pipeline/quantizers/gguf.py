"""gguf: llama.cpp's own converter and quantizer; block formats that its kernels read directly, no calibration."""

from __future__ import annotations

import ctypes
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

from pipeline import envs
from pipeline.calibration import Calibration
from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError, Unsupported
from pipeline.core.model_config import sliding, text_config
from pipeline.core.quiet import output_to
from pipeline.quantizers import Facts
from pipeline.quantizers._reproducible import ANY_MACHINE
from pipeline.weights import kept_layers

ENGINE = "llamacpp"  # the one that reads what this writes
FILE = "model.gguf"
FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_M": 12, "Q4_K_S": 14,
              "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "BF16": 32}  # fmt: skip  # llama.h: enum llama_ftype
BF16 = 30  # ggml.h: enum ggml_type
# Where llama.cpp keeps a sliding window: one layer in so many sees all, whatever the config says. It drops all others in silence.
EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
READ = 4096  # tokens that engine 'llamacpp' reads at most: a longer window loses nothing here
K_ROW = 256  # weights in a block of a K-quant
NO_ROOM = 1 << 24


def quantize(
    model_dir: Path,
    out_dir: Path,
    *,
    calibration: Calibration,
    seed: int,
    type: Literal["BF16", "F16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_0", "Q5_1", "Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q3_K_M", "Q2_K"],
    keep: list[str] = [],  # noqa: B006  # read only
) -> Facts:
    """Convert to float32 GGUF in the converter's own environment, then let llama.cpp quantize that.

    K-quants need rows of 256: llama.cpp gives tensors with other rows another type, which the manifest says as a warning and as
    measured bits (`tensor_types`, `bits_per_weight`).
    """
    try:
        import llama_cpp
    except ImportError as e:
        raise Unsupported(f"quantizer 'gguf' needs {e.name}; python -m pipeline.core.install") from None
    kept = kept_layers(model_dir, keep)
    with tempfile.TemporaryDirectory(dir=out_dir.parent) as tmp:
        whole = Path(tmp) / "whole.gguf"
        _convert(model_dir, whole)
        asked = llama_cpp.llama_model_quantize_default_params()
        asked.ftype = FILE_TYPES[type]
        left = _names(whole, kept)
        override = llama_cpp.llama_model_tensor_override
        patterns = [f"^{re.escape(name)}$".encode() for name in left]
        ends = override()  # an empty one ends them
        asked.tt_overrides = (override * (len(left) + 1))(*(override(pattern, BF16) for pattern in patterns), ends)
        with output_to(artifacts.LOGS / "gguf.log"):
            failed = llama_cpp.llama_model_quantize(str(whole).encode(), str(out_dir / FILE).encode(), ctypes.byref(asked))
        if failed and shutil.disk_usage(out_dir).free < NO_ROOM:  # C++ says only that a stream failed
            raise ArtifactError(f"{out_dir / FILE} could not be written: the disk is full; make room, then start again")
    if failed:
        raise Unsupported(f"llama.cpp could not quantize to {type} (code {failed}); its log is in {artifacts.LOGS}")
    shutil.copyfile(model_dir / "config.json", out_dir / "config.json")
    converter = (envs.FILES / "gguf.txt").read_text(encoding="utf-8").split("\n")[2]
    warnings = _fallen_back(out_dir / FILE, type, left)
    return {
        "library": "llama-cpp-python", "converter": converter, "reproducible": ANY_MACHINE, "kept": kept, "warnings": warnings
    }  # fmt: skip


def refuse(model_dir: Path, options: dict[str, Any]) -> None:
    """See `pipeline.quantizers`: a model whose sliding window llama.cpp does not keep would be another model there."""
    config = text_config(model_dir)
    tokens, layers = sliding(config)
    every = EVERY.get(str(config.get("model_type")))
    if tokens >= READ or not layers or (every and layers == [(k + 1) % every != 0 for k in range(len(layers))]):
        return
    raise Unsupported(
        f"{sum(layers)} of {len(layers)} layers see a window of {tokens} tokens, which llama.cpp "
        + (f"keeps in all but every {every}th layer only" if every else f"does not keep for {config.get('model_type')}")
        + ": GGUF would be another model"
    )


def _names(whole: Path, layers: list[str]) -> list[str]:
    """GGUF's names of transformers' layers; one that it does not know is an error, not a layer that is quantized after all."""
    import gguf

    reader = gguf.GGUFReader(whole)
    architecture = str(reader.fields["general.architecture"].contents())
    known = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    blocks = int(reader.fields[f"{architecture}.block_count"].contents())
    names = gguf.get_tensor_name_map(known[architecture], blocks)
    found = {layer: names.get_name(f"{layer}.weight", try_suffixes=(".weight",)) for layer in layers}
    held = {tensor.name for tensor in reader.tensors}
    for layer, name in found.items():
        if name not in held:
            raise Unsupported(f"options.keep: {layer} has no tensor of its own in GGUF; take it out of keep")
    return list(found.values())


def _fallen_back(file: Path, type: str, left: list[str]) -> list[str]:
    """In words, the matrices that a K-quant could not pack because their rows are no multiple of 256. left: kept on purpose."""
    import gguf

    if "_K" not in type:
        return []
    matrices = [t for t in gguf.GGUFReader(file).tensors if len(t.shape) == 2 and t.name not in left]
    other = [t for t in matrices if int(t.shape[0]) % K_ROW and not t.tensor_type.name.endswith("_K")]
    if not other:
        return []
    share = 100 * sum(int(t.n_elements) for t in other) / sum(int(t.n_elements) for t in matrices)
    types = ", ".join(sorted({t.tensor_type.name for t in other}))
    widths = ", ".join(map(str, sorted({int(t.shape[0]) for t in other})))
    return [
        f"{len(other)} of {len(matrices)} matrices ({share:.0f} % of their weights) have rows of {widths}, no multiple of {K_ROW}: "
        f"llama.cpp packed them as {types} instead of {type}"
    ]


def _convert(model_dir: Path, out: Path) -> None:
    log = artifacts.LOGS / "gguf-convert.log"
    arguments = ("-m", "convert_hf_to_gguf", str(model_dir.absolute()), "--outfile", str(out.absolute()), "--outtype", "f32")
    try:
        envs.run("gguf", *arguments, log=log)
    except RuntimeError as e:  # an architecture that llama.cpp does not know
        raise Unsupported(f"llama.cpp's converter does not take this model: {e}") from None
