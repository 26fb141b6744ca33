"""Take a GGUF file as the base: dequantize it into a transformers folder.

transformers' loader silently drops settings and tokenizer rules that it does not know. Known losses are restored here; then
llama.cpp's tokens and its logits over a text must agree, or the file is refused."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import engines
from pipeline.core import cli, isolate, quota
from pipeline.core.errors import Crashed, DownloadError, Unsupported
from pipeline.core.records import Json
from pipeline.divergence.distributions import compare_logits
from pipeline.model.config import parts
from pipeline.model.streaming import SHARD_BYTES
from pipeline.model.tokenizer_files import corpus_texts

COMPARED = 256  # tokens of text
NEAR = 0.05  # nats, mean: llama.cpp's kernels round activations to 8 bits; a lost window or scale gives far more
PLAIN = ("F32", "F16", "BF16")

# Values of `tokenizer.ggml.pre` that split off single digits before GPT-2's rule; transformers makes other rules itself.
DIGITS = ("smollm", "starcoder", "minerva-7b")


def refuse_absent(file: Path) -> None:
    """Raise `DownloadError` unless all files of a GGUF model exist."""
    for part in parts(file):
        if not part.is_file():
            raise DownloadError(f"{part.name} is not in {part.parent.resolve()} (a split model needs all its files)")
        with part.open("rb") as f:
            if f.read(4) != b"GGUF":
                raise DownloadError(f"{part.name} is not a GGUF file; fetch it again")


def convert(file: Path, out: Path) -> str | None:
    """Write a GGUF file's model as a transformers folder; return the formats of packed weights, or None. The folder's type is
    float32, or bfloat16 if that holds every weight. Raises `DownloadError` if the folder would be another model."""
    from gguf import GGUFReader

    refuse_absent(file)
    file = _joined(parts(file), out) if len(parts(file)) > 1 else parts(file)[0]
    reader = GGUFReader(file)
    types = sorted({t.tensor_type.name for t in reader.tensors if t.tensor_type.name not in PLAIN})
    _write_tokenizer(file, reader, out)
    _write_model(file, reader, out)
    _refuse_other_tokens(file, _field(reader, "tokenizer.ggml.pre"), out)
    _refuse_other_logits(file, out)
    if file.parent == out:  # joined
        file.unlink()
    return f"GGUF {', '.join(types)}" if types else None


def _field(reader: Any, key: str) -> Any:
    return reader.fields[key].contents() if key in reader.fields else None


def _joined(files: list[Path], out: Path) -> Path:
    """One file of a split model: the first part's metadata and the tensors of all."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    readers = [GGUFReader(file) for file in files]
    writer = GGUFWriter(out / "joined.gguf", _field(readers[0], "general.architecture"))
    for name, field in readers[0].fields.items():
        if not name.startswith(("GGUF.", "split.")) and name != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in (tensor for reader in readers for tensor in reader.tensors):
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out / "joined.gguf"


def _write_model(file: Path, reader: Any, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
        )
    except (ValueError, KeyError, NotImplementedError, RuntimeError) as e:
        raise DownloadError(f"transformers cannot load this GGUF file ({isolate.brief(e)})") from None
    if info["missing_keys"]:
        raise DownloadError(f"the GGUF file has no {sorted(info['missing_keys'])[0]}, which transformers' model needs")
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the file, not of these weights; it stops save_pretrained
    config._name_or_path = ""
    config.architectures = [type(loaded).__name__]
    _put_back_positions(reader, config)
    weights = loaded.state_dict()
    if all(torch.equal(t, t.bfloat16().to(t.dtype)) for t in weights.values()):
        weights = {name: t.bfloat16() for name, t in weights.items()}
        config.dtype = torch.bfloat16
    # save_pretrained refuses a model that was loaded from GGUF, so the weights move to a fresh one of the same class
    with torch.device("meta"):
        fresh = type(loaded)(config)
    fresh.load_state_dict(weights, strict=True, assign=True)
    fresh.tie_weights()
    fresh.save_pretrained(out, max_shard_size=SHARD_BYTES)


def _put_back_positions(reader: Any, config: Any) -> None:
    """Set what stretches positions in a long context; refuse a window that would be lost."""
    kind = _field(reader, "general.architecture")
    length = _field(reader, f"{kind}.context_length") or 0
    window = _field(reader, f"{kind}.attention.sliding_window")
    if isinstance(window, int) and window < length and not getattr(config, "sliding_window", None):
        raise DownloadError(f"the GGUF file's layers see a window of {window} tokens, which transformers' loader of {kind} drops")
    rope: Json = getattr(config, "rope_parameters", None) or {}
    scaling = _field(reader, f"{kind}.rope.scaling.type")
    factors = next((np.array(t.data, np.float32) for t in reader.tensors if t.name == "rope_freqs.weight"), None)
    if rope.get("rope_type", "default") != "default" or (scaling in (None, "none") and factors is None):
        return
    stretched: Json | None = None
    if factors is not None:
        stretched = _llama3(rope["rope_theta"], factors)
    elif scaling in ("linear", "yarn") and "rope_theta" in rope:
        stretched = {"rope_type": scaling, "factor": float(_field(reader, f"{kind}.rope.scaling.factor"))}
        if scaling == "yarn":
            original = int(_field(reader, f"{kind}.rope.scaling.original_context_length") or length)
            stretched["original_max_position_embeddings"] = original
    if stretched is None:
        how = scaling or "rope_freqs"
        raise DownloadError(f"the GGUF file stretches positions ({how}) in a way that transformers' loader drops")
    config.rope_parameters = rope | stretched


def _llama3(theta: float, factors: Any) -> Json | None:
    """The settings of Llama 3's stretched positions, if a file's factors are what they give."""
    turns = 8192 * theta ** -(np.arange(len(factors)) / len(factors)) / (2 * np.pi)  # within the original length
    smooth = np.clip((turns - 1) / 3, 0, 1)
    factor = float(factors.max())
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-3):
        return None
    return {
        "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }  # fmt: skip


def _write_tokenizer(file: Path, reader: Any, out: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as e:  # tokenizers and transformers may raise anything
        kind = _field(reader, "tokenizer.ggml.model")
        raise DownloadError(f"no tokenizer can be made of this GGUF file's ({kind}): {isolate.brief(e)}") from None
    if _field(reader, "tokenizer.ggml.model") == "gpt2" and _field(reader, "tokenizer.ggml.pre") in DIGITS:
        backend, digits = tokenizer.backend_tokenizer, pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    tokenizer.save_pretrained(out)


def _refuse_other_tokens(file: Path, pre: Any, out: Path) -> None:
    from transformers import AutoTokenizer

    texts = corpus_texts()
    tokenizer = AutoTokenizer.from_pretrained(out)
    try:
        by_llama_cpp = isolate.isolated(llama_ids, file, texts, what="download tokens")
    except (Crashed, Unsupported) as e:
        raise DownloadError(f"this GGUF file's tokens cannot be compared with llama.cpp's: {e}") from None
    differ = sum(tokenizer(text).input_ids != ids for text, ids in zip(texts, by_llama_cpp))
    if differ:
        why = f"the tokenizer made of this GGUF file tokenizes {differ} of {len(texts)} texts differently than llama.cpp"
        raise DownloadError(f"tokenizer.ggml.pre {pre!r}: {why}; take the model in its original format")


def llama_ids(file: Path, texts: list[str]) -> list[list[int]]:
    """Token ids of texts by llama.cpp, without reading weights."""
    try:
        import llama_cpp
    except ImportError as e:
        raise Unsupported(f"{e.name} is not installed; python -m pipeline.core.install") from None
    try:
        model = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    except ValueError:
        raise Unsupported("llama.cpp cannot load it") from None
    return [model.tokenize(text.encode(), add_bos=True, special=True) for text in texts]


def _refuse_other_logits(file: Path, out: Path) -> None:
    try:
        differs = isolate.isolated(divergence, file, out, what="download logits")
    except (Crashed, Unsupported) as e:  # of llama.cpp: its variants will report it too
        cli.say("download", f"not compared with llama.cpp's own reading of the file: {e}")
        return
    if not differs <= NEAR:
        why = f"is another model than llama.cpp's: {differs:.3g} nats apart over {COMPARED} tokens"
        raise DownloadError(f"what transformers makes of this GGUF file {why}; take the model in its original format")


def divergence(file: Path, folder: Path) -> float:
    """Mean KLD in nats between the file's model in llama.cpp and the folder's over a text."""
    threads = quota.processors()
    with tempfile.TemporaryDirectory() as tmp:
        for source in [*folder.glob("*.json"), *folder.glob("*.jinja")]:
            (Path(tmp) / source.name).symlink_to(source.resolve())
        (Path(tmp) / "model.gguf").symlink_to(file.resolve())
        llama_cpp: Any = engines.load("llamacpp", Path(tmp), threads=threads, kv="f32")
        ids = llama_cpp.tokenize(corpus_texts()[0])[: min(COMPARED, llama_cpp.max_length)]
        logits = llama_cpp.logits(ids)
        llama_cpp.close()
    converted = engines.load("hf", folder, threads=threads)
    return float(compare_logits(converted.logits(ids), logits, np.array(ids)).kld.mean())
