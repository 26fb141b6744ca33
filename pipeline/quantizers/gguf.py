"""gguf: llama.cpp's own converter and quantizer; block formats that its kernels read directly; no calibration."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pipeline.core import artifacts, isolate, venvs
from pipeline.core.errors import ArtifactError, NoResult, ParamsError, Unsupported, needs
from pipeline.core.explain import did_you_mean
from pipeline.core.quiet import output_to
from pipeline.evalset.calibration import Calibration
from pipeline.model.config import READ, sliding, text_config, wanted
from pipeline.model.headers import kept_layers, linear_shapes, read_headers, skeleton
from pipeline.quantizers import Facts
from pipeline.quantizers._reproducible import ANY_MACHINE

ENGINE = "llamacpp"  # the one that reads it
FILE = "model.gguf"
CONVERTER = "converter.py"  # beside gguf.txt
FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_M": 12, "Q4_K_S": 14,
              "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "BF16": 32}  # fmt: skip  # llama.h: enum llama_ftype
Stored = Literal["Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "BF16"]
TENSOR_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
                "IQ4_NL": 20, "BF16": 30}  # fmt: skip  # ggml.h: enum ggml_type
EMBEDDINGS, HEAD = "embed_tokens", "lm_head"  # their names in `types`
OUTSIDE = {EMBEDDINGS: "token_embd.weight", HEAD: "output.weight"}  # and in GGUF
# Where llama.cpp uses the weights of the chosen experts as they are; elsewhere they sum to 1, unless the file says otherwise.
UNNORMED = {"qwen2moe", "olmoe", "llada-moe", "deepseek"}
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
    types: dict[str, Stored] | None = None,  # None: in no manifest, so that files without it stay the same to the byte
) -> Facts:
    """Convert to a GGUF of the base's own type in the converter's environment, then quantize that by llama.cpp. types: {pattern:
    tensor type} of layers, as in `keep`, and of `embed_tokens` and `lm_head`, which differ from `type`'s; of two matching patterns
    the later counts. If llama.cpp stores another type, that raises `Unsupported`. K-quants need rows of 256: llama.cpp gives other
    tensors another type; the manifest has a warning and the measured bits (`tensor_types`, `bits_per_weight`)."""
    with needs("quantizer 'gguf'", "python -m pipeline.core.install"):
        import llama_cpp
    kept = kept_layers(model_dir, keep)
    with tempfile.TemporaryDirectory(dir=out_dir.parent) as tmp:
        whole = Path(tmp) / "whole.gguf"
        _convert(model_dir, whole)
        if lost := _lost(whole, model_dir):
            raise Unsupported(lost)
        asked = llama_cpp.llama_model_quantize_default_params()
        asked.ftype = FILE_TYPES[type]
        asked_types = dict.fromkeys(kept, "BF16") | layer_types(model_dir, types or {})
        outside = {name: asked_types.pop(name) for name in (EMBEDDINGS, HEAD) if name in asked_types}
        named = names_of(whole, list(asked_types))
        override = llama_cpp.llama_model_tensor_override
        codes = [override(f"^{re.escape(name)}$".encode(), TENSOR_TYPES[asked_types[layer]]) for layer, name in named.items()]
        asked.tt_overrides = (override * (len(codes) + 1))(*codes, override())  # an empty one ends them
        if EMBEDDINGS in outside:
            asked.token_embedding_type = TENSOR_TYPES[outside[EMBEDDINGS]]
        if HEAD in outside:
            asked.output_tensor_type = TENSOR_TYPES[outside[HEAD]]
        with output_to(artifacts.LOGS / "gguf.log"):
            failed = llama_cpp.llama_model_quantize(str(whole).encode(), str(out_dir / FILE).encode(), ctypes.byref(asked))
        if failed and shutil.disk_usage(out_dir).free < NO_ROOM:  # C++ says only that a stream failed
            raise ArtifactError(f"{out_dir / FILE} could not be written: the disk is full; make room, then start again")
    if failed:
        raise Unsupported(f"llama.cpp could not quantize to {type} (code {failed}); its log is in {artifacts.LOGS}")
    shutil.copyfile(model_dir / "config.json", out_dir / "config.json")
    converter = (venvs.FILES / "gguf.txt").read_text(encoding="utf-8").split("\n")[2]
    wanted_types = {name: asked_types[layer] for layer, name in named.items()}
    wanted_types |= {OUTSIDE[part]: kind for part, kind in outside.items()}
    _refuse_other_types(out_dir / FILE, wanted_types)
    warnings = _fallen_back(out_dir / FILE, type, list(named.values()))
    return {
        "library": "llama-cpp-python", "converter": converter, "reproducible": ANY_MACHINE, "kept": kept, "warnings": warnings
    }  # fmt: skip


def refuse(model_dir: Path, options: dict[str, Any]) -> None:
    """See `pipeline.quantizers`: what llama.cpp's converter, or llama.cpp itself, does not take, by a file with holes for values.
    Tried once per model, if the converter's environment is here."""
    if not venvs.is_here("gguf"):
        return
    files = [f for f in wanted(model_dir, code=False) if f.suffix != ".safetensors"]
    parts = [*(f.read_bytes() for f in files), repr(read_headers(model_dir)).encode(), (venvs.FILES / CONVERTER).read_bytes()]
    answer = venvs.folder("gguf") / "asked" / hashlib.sha256(b"".join(parts)).hexdigest()
    if not answer.exists():
        answer.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as tmp:
            try:
                _convert(model_dir, Path(tmp) / FILE, "--skeleton")
                why = isolate.isolated(_lost, Path(tmp) / FILE, model_dir, what="check gguf")
            except NoResult as e:
                why = str(e)
        artifacts.write_text(answer, why)
    if why := answer.read_text(encoding="utf-8"):
        raise Unsupported(why)


def _lost(file: Path, model_dir: Path) -> str:
    """Why llama.cpp cannot read a file, or would run another model, by its log of the header; empty if neither."""
    import llama_cpp

    lines: list[str] = []
    listen = llama_cpp.llama_log_callback(lambda level, text, data: lines.append(text.decode(errors="replace")))
    llama_cpp.llama_log_set(listen, None)
    asked, room = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()
    asked.no_alloc, asked.load_mode = True, llama_cpp.LLAMA_LOAD_MODE_NONE
    room.n_ctx = room.n_batch = room.n_ubatch = 256
    value = ctypes.create_string_buffer(64)

    def held(key: str) -> bool:
        return bool(model) and llama_cpp.llama_model_meta_val_str(model, key.encode(), value, len(value)) >= 0

    try:
        model = llama_cpp.llama_model_load_from_file(str(file).encode(), asked)
        context = llama_cpp.llama_init_from_model(model, room) if model else None
        window = llama_cpp.llama_model_n_swa(model) if model else 0
        architecture = value.value.decode() if held("general.architecture") else ""
        says_norm = held(f"{architecture}.expert_weights_norm")
        if context:
            llama_cpp.llama_free(context)
        if model:
            llama_cpp.llama_model_free(model)
    finally:
        llama_cpp.llama_log_set(llama_cpp._logger.llama_log_callback, None)
    said = "".join(lines)
    if not context:
        why = re.findall(r"error loading model: (.*)", said)
        return f"llama.cpp cannot read this model as GGUF ({why[-1] if why else 'its log says no more'})"
    config = _whole_config(model_dir)
    seen = {int(layer) for layer in re.findall(r"layer +(\d+): dev =", said.partition("    SWA KV cache")[2])}
    differs = []
    tokens, layers = sliding(config)
    window = window if seen else 0
    if (tokens, {k for k, slides in enumerate(layers) if slides}) != (window, seen) and min(tokens or READ, window or READ) < READ:
        kept = f"keeps {window} in {len(seen)}" if seen else "keeps none"
        differs.append(f"{sum(layers)} of {len(layers)} layers see a window of {tokens} tokens, and llama.cpp {kept}")
    heads = config.get("query_pre_attn_scalar")
    scale = float(re.findall(r"f_attn_scale += (\S+)", said)[-1])
    if heads and abs((scale or config["head_dim"] ** -0.5) * heads**0.5 - 1) > 0.1:  # said with two digits
        differs.append(f"attention is scaled for heads of {heads:g}, and llama.cpp scales by {scale:g}")
    normed = config.get("norm_topk_prob")
    if normed is not None and not says_norm and normed == (architecture in UNNORMED):
        differs.append(f"norm_topk_prob is {normed}, which llama.cpp does not read for {architecture}")
    return f"{'; '.join(differs)}: GGUF would be another model" if differs else ""


def _whole_config(model_dir: Path) -> dict[str, Any]:
    """The text part's config with its class's defaults, such as the kinds of layers; without them if the class is unknown."""
    from transformers import AutoConfig

    try:
        return dict(AutoConfig.from_pretrained(model_dir).get_text_config().to_dict())
    except ValueError:  # code of its own
        return text_config(model_dir)


def layer_types(model_dir: Path, types: dict[str, Stored]) -> dict[str, str]:
    """{layer, or EMBEDDINGS, HEAD: tensor type} by patterns. Raises `ParamsError` for one that matches nothing."""
    model = skeleton(model_dir)
    names = [*linear_shapes(model_dir), EMBEDDINGS, *([] if model and model.ties_head else [HEAD])]
    found: dict[str, str] = {}
    for pattern, kind in types.items():
        matched = [n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, f"*.{pattern}")]
        if not matched:
            raise ParamsError(f"options.types: {pattern!r} matches no layer{did_you_mean(pattern, [*names[:7], EMBEDDINGS])}")
        found |= dict.fromkeys(matched, kind)
    return found


def stores(kind: str, width: int) -> bool:
    """Whether a tensor type can store rows of that width: blocks of a K-quant have 256 weights, others 32."""
    return kind == "BF16" or width % (K_ROW if kind.endswith("_K") else 32) == 0


def _refuse_other_types(file: Path, asked: dict[str, str]) -> None:
    """Raise if a tensor is not stored as requested: K-quants need rows of 256."""
    import gguf

    if not asked:
        return
    stored = {t.name: t for t in gguf.GGUFReader(file).tensors}
    for name, kind in asked.items():
        if name in stored and (given := stored[name].tensor_type.name) != kind:
            width = int(stored[name].shape[0])
            raise Unsupported(f"options.types: llama.cpp stores {name} (rows of {width}) as {given}, not {kind}; ask for {given}")


def names_of(whole: Path, layers: list[str]) -> dict[str, str]:
    """{transformers' layer: GGUF's name}. A layer without one is an error, else it would be quantized nevertheless."""
    import gguf

    if not layers:  # reading a file's vocabulary takes seconds
        return {}
    reader = gguf.GGUFReader(whole)
    architecture = str(reader.fields["general.architecture"].contents())
    known = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    blocks = int(reader.fields[f"{architecture}.block_count"].contents())
    names = gguf.get_tensor_name_map(known[architecture], blocks)
    found = {layer: names.get_name(f"{layer}.weight", try_suffixes=(".weight",)) for layer in layers}
    held = {tensor.name for tensor in reader.tensors}
    for layer, name in found.items():
        if name not in held:
            raise Unsupported(f"options.keep, options.types: {layer} has no tensor of its own in GGUF; take it out")
    return found


def _fallen_back(file: Path, type: str, left: list[str]) -> list[str]:
    """A warning if a K-quant could not pack matrices because their rows are no multiple of 256. left: kept on purpose."""
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


def _convert(model_dir: Path, out: Path, *options: str) -> None:
    log, tool = artifacts.LOGS / "gguf-convert.log", str((venvs.FILES / CONVERTER).absolute())
    held = {tensor.dtype for tensor in read_headers(model_dir).values() if len(tensor.shape) > 1}
    whole = {"BF16": "bf16", "F16": "f16"}.get(held.pop(), "f32") if len(held) == 1 else "f32"  # the smallest that loses nothing
    try:
        venvs.run("gguf", tool, *options, str(model_dir.absolute()), "--outfile", str(out.absolute()), "--outtype", whole, log=log)
    except RuntimeError as e:  # an architecture that llama.cpp does not know
        raise Unsupported(f"llama.cpp's converter does not take this model: {e}") from None
