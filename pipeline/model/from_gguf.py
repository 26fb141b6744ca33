"""Take a GGUF file as the base: dequantize it into a transformers folder.

transformers' loader silently drops settings and rules of cutting text that it does not know. What is known to be lost is put back
here; then llama.cpp's tokens and its logits over a text must agree, or the file is refused.
"""

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
NEAR = 0.05  # nats, mean: llama.cpp's kernels round activations to 8 bits; a lost window or scale is far beyond
PLAIN = ("F32", "F16", "BF16")

# How text is cut before merges apply, by `tokenizer.ggml.pre`, where transformers 5.24 takes GPT-2's rule for want of another:
# llama.cpp's expressions (src/llama-vocab.cpp), one after another.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CASED = (  # letters of scripts that have capitals
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-"
    "\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-"
    "\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    "\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc"
    "\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f"
    "\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
FALCON, THREE, CJK = r"[\p{P}\$\+<=>\^~\|`]+", "[0-9][0-9][0-9]", "[一-龥ࠀ-一가-퟿]+"
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS: dict[str, tuple[str, ...]] = {
    "default": (FALCON.replace("`", ""), GPT2, r"\p{N}+", THREE),
    "falcon": (FALCON, GPT2, THREE),
    "deepseek-llm": (
        "[\r\n]", rf"\s?[{CASED}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$", CJK, r"\p{N}+"
    ),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"),
    "deepseek-v3": DEEPSEEK3,
    "stablelm2": (QWEN2,),
    "seed-coder": (QWEN2.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+"),),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "viking": (BLOOM, r"\p{N}"),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (BLOOM,)),
}  # fmt: skip
DIGITS = ("smollm", "starcoder", "minerva-7b")  # one by one, then GPT-2's


def refuse_absent(file: Path) -> None:
    """Raise `DownloadError` unless all files of a GGUF model are here."""
    for part in parts(file):
        if not part.is_file():
            raise DownloadError(f"{part.name} is not in {part.parent.resolve()} (a split model needs all its files)")
        with part.open("rb") as f:
            if f.read(4) != b"GGUF":
                raise DownloadError(f"{part.name} is no GGUF file; fetch it again")


def convert(file: Path, out: Path) -> str | None:
    """Write a GGUF file's model as a transformers folder; returns what its weights were packed in, if they were.
    The type is float32, or bfloat16 if every weight is one. Raises `DownloadError` where the folder would be another model."""
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
        del config.quantization_config  # it describes the file, not these weights, and stops save_pretrained
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
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as e:  # tokenizers and transformers raise what they like
        kind = _field(reader, "tokenizer.ggml.model")
        raise DownloadError(f"no tokenizer can be made of this GGUF file's ({kind}): {isolate.brief(e)}") from None
    if _field(reader, "tokenizer.ggml.model") == "gpt2":
        restore_splitting(tokenizer.backend_tokenizer, _field(reader, "tokenizer.ggml.pre") or "default")
    elif _field(reader, "tokenizer.ggml.add_space_prefix") is False:
        _remove_prefix(tokenizer.backend_tokenizer)
    tokenizer.save_pretrained(out)


def _remove_prefix(tokenizer: Any) -> None:
    from tokenizers import decoders, pre_tokenizers

    if isinstance(tokenizer.pre_tokenizer, pre_tokenizers.Metaspace):  # Gemma's has no prefix anyway
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="never", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def restore_splitting(tokenizer: Any, pre: str) -> None:
    """Put back what transformers loses of a GGUF file's rules for cutting text before its merges apply.
    pre: the file's `tokenizer.ggml.pre`. Rules that are not listed stay as transformers makes them."""
    from tokenizers import Regex, pre_tokenizers

    if pre in DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    elif pre in CUTS:
        cuts = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in CUTS[pre]]
        joined = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, joined])


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
        raise DownloadError(
            f"tokenizer.ggml.pre {pre!r}: the tokenizer made of this GGUF file cuts {differ} of {len(texts)} texts otherwise than "
            "llama.cpp; take the model in its original format"
        )


def llama_ids(file: Path, texts: list[str]) -> list[list[int]]:
    """Token ids of texts by llama.cpp; no weight is read."""
    try:
        import llama_cpp
    except ImportError as e:
        raise Unsupported(f"{e.name} is not installed; python -m pipeline.core.install") from None
    asked = llama_cpp.llama_model_default_params()
    asked.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), asked)
    if not model:
        raise Unsupported("llama.cpp cannot load it")
    vocab, ids = llama_cpp.llama_model_get_vocab(model), []
    for data in (text.encode() for text in texts):
        room = (llama_cpp.llama_token * (len(data) + 8))()
        ids.append(list(room[: llama_cpp.llama_tokenize(vocab, data, len(data), room, len(room), True, True)]))
    llama_cpp.llama_model_free(model)
    return ids


def _refuse_other_logits(file: Path, out: Path) -> None:
    try:
        differs = isolate.isolated(divergence, file, out, what="download logits")
    except (Crashed, Unsupported) as e:  # of llama.cpp: the variants that it runs will say so too
        cli.say("download", f"not compared with llama.cpp's own reading of the file: {e}")
        return
    if not differs <= NEAR:
        raise DownloadError(
            f"what transformers makes of this GGUF file is another model than llama.cpp's: {differs:.3g} nats apart over "
            f"{COMPARED} tokens; take the model in its original format"
        )


def divergence(file: Path, folder: Path) -> float:
    """Mean KLD in nats between the file's model in llama.cpp and the folder's over a text."""
    threads = quota.processors()
    with tempfile.TemporaryDirectory() as tmp:
        for source in [*folder.glob("*.json"), *folder.glob("*.jinja")]:
            (Path(tmp) / source.name).symlink_to(source.resolve())
        (Path(tmp) / "model.gguf").symlink_to(file.resolve())
        llama_cpp: Any = engines.load("llamacpp", Path(tmp), threads=threads, kv_type="f32")
        ids = llama_cpp.tokenize(corpus_texts()[0])[: min(COMPARED, llama_cpp.max_length)]
        logits = llama_cpp.logits(ids)
        llama_cpp.close()
    converted = engines.load("hf", folder, threads=threads)
    return float(compare_logits(converted.logits(ids), logits, np.array(ids)).kld.mean())
