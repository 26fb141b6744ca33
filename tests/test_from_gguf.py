"""A GGUF file as the base: the model that it was made from comes back, and llama.cpp itself says whether it did."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_house import SENTENCEPIECE, fetch, tensors_of, write_gguf_parts
from test_engines import write_gguf

from pipeline.core.errors import DownloadError
from pipeline.model import from_gguf
from pipeline.model.tokenizer_files import corpus_texts

# llama-cpp-python's log cuts a list of tokens within a character, and cannot decode it then
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
ODD = [
    "in  42 and 1234567 or 3.14", "I'm we'LL DON'T you've", "a\n\n\n  b\r\n\tc", "  lead", "trail   ", "你好世界123、テスト",
    "Ünïcödé ÉÀ straße", "foo_bar(x[0])==y->z!!", "😀👍🏽 ok", "٣٤٥ १२३", "a b\u00a0c", "x\u200by", "--- *** ///",
    "CamelCaseHTTPServer", "$100 <tag> ^caret ~tilde|pipe `tick`+plus", "\u212a \u10d0 \u1e9e",
]  # fmt: skip


def same_weights(folder: Path, base: Path) -> bool:
    import torch

    made, right = tensors_of(folder), tensors_of(base)
    same = (made[name].dtype == right[name].dtype and torch.equal(made[name], right[name]) for name in right)
    return made.keys() == right.keys() and all(same)


def test_weights_and_tokens_come_back_and_the_type_is_the_narrow_one_that_holds_them(tiny_bf16: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_gguf(tiny_bf16, tmp_path / "base.gguf")
    facts = fetch(tmp_path / "base.gguf", tmp_path / "out")
    assert same_weights(tmp_path / "out", tiny_bf16) and "dequantized_from" not in facts
    made, original = (AutoTokenizer.from_pretrained(f) for f in (tmp_path / "out", tiny_bf16))
    assert all(made(text).input_ids == original(text).input_ids for text in ODD)


def test_a_packed_file_is_the_values_of_its_blocks_and_says_so(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Q8_0: 32 codes and a scale in half precision."""
    import gguf

    add = gguf.GGUFWriter.add_tensor

    def packed(self: Any, name: str, tensor: Any, **more: Any) -> None:
        if tensor.ndim == 2:
            more["raw_dtype"] = gguf.GGMLQuantizationType.Q8_0
            tensor = gguf.quantize(tensor, more["raw_dtype"])
        add(self, name, tensor, **more)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", packed)
    write_gguf(tiny, tmp_path / "base.gguf")
    monkeypatch.setattr(from_gguf, "NEAR", 1.0)  # a random model is far from llama.cpp's 8-bit activations
    assert fetch(tmp_path / "base.gguf", tmp_path / "out")["dequantized_from"] == "GGUF Q8_0"
    name = "model.layers.1.mlp.up_proj.weight"
    written, source = (tensors_of(folder)[name].numpy() for folder in (tmp_path / "out", tiny))
    rows = source.reshape(len(source), -1, 32)
    scale = np.abs(rows).max(-1, keepdims=True) / 127
    codes = np.trunc(rows / scale + np.copysign(0.5, rows))
    assert np.array_equal(written, (codes * scale.astype(np.float16).astype(np.float32)).reshape(source.shape))


def test_a_split_file_is_the_whole_and_each_part_is_needed(tiny_bf16: Path, tmp_path: Path) -> None:
    write_gguf(tiny_bf16, tmp_path / "base.gguf", split_max_tensors=8)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) == 3 and files[0].name == "base-00001-of-00003.gguf"
    facts = fetch(files[0], tmp_path / "out")
    assert facts["given"] == [f.name for f in files] == list(facts["repaired"])
    assert not list((tmp_path / "out").glob("*.gguf")) and same_weights(tmp_path / "out", tiny_bf16)
    files[2].unlink()
    with pytest.raises(DownloadError, match="base-00003-of-00003.gguf is not in"):
        fetch(files[0], tmp_path / "again")


def test_positions_that_llama_3_stretches_are_put_back_and_others_are_refused(tiny_bf16: Path, tmp_path: Path) -> None:
    """The file holds a factor for each frequency, which transformers' loader drops; transformers' own are the judge."""
    import torch
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.from_pretrained(tiny_bf16)
    settings = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, 16, 2) / 16)
    config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"], "rope_type": "llama3"} | settings
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors = (plain / stretched).numpy().astype(np.float32).round(5)
    assert factors[-1] == 8 and factors[0] == 1
    write_gguf(tiny_bf16, tmp_path / "base.gguf", {"rope_freqs.weight": factors})
    fetch(tmp_path / "base.gguf", tmp_path / "out")
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters == config.rope_parameters
    write_gguf(tiny_bf16, tmp_path / "odd.gguf", {"rope_freqs.weight": factors[::-1].copy()})
    with pytest.raises(DownloadError, match=r"stretches positions \(rope_freqs\)"):
        fetch(tmp_path / "odd.gguf", tmp_path / "odd")


def test_a_model_that_transformers_reads_otherwise_than_llama_cpp_is_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_gguf, "_put_back_positions", lambda reader, config: setattr(config, "rms_norm_eps", 1.0))
    write_gguf(tiny, tmp_path / "base.gguf")
    with pytest.raises(DownloadError, match="another model than llama.cpp's: .* nats apart"):
        fetch(tmp_path / "base.gguf", tmp_path / "out")


def test_a_file_that_is_none_and_an_architecture_that_is_not_known_are_named(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("version https://git-lfs")
    with pytest.raises(DownloadError, match="text.gguf is not a GGUF file"):
        fetch(tmp_path / "text.gguf", tmp_path / "out")
    write_gguf(tiny, tmp_path / "base.gguf")
    data = (tmp_path / "base.gguf").read_bytes()
    (tmp_path / "other.gguf").write_bytes(data.replace(b"llama", b"plamo"))
    with pytest.raises(DownloadError, match="plamo is not supported yet"):
        fetch(tmp_path / "other.gguf", tmp_path / "other")


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer whose merges reach over words, digits and signs: it gives other tokens wherever text is cut otherwise."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=3000, max_token_length=12, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"],
        show_progress=False,
    )  # fmt: skip
    texts = corpus_texts()
    pieces = [text[at : at + 60] for text in texts for at in range(0, len(text), 60)]
    tokenizer.train_from_iterator(pieces + ODD * 30, trainer)
    return json.loads(tokenizer.to_str())["model"]


def write_vocabulary(file: Path, kind: str, pre: str, tokens: list[Any], types: list[int], **more: Any) -> None:
    """A GGUF file without tensors. more: names of gguf's writer, without `add_`, and what they are given."""
    import gguf

    writer = gguf.GGUFWriter(file, "llama")
    sizes = ("block_count", "context_length", "embedding_length", "head_count", "feed_forward_length", "rope_dimension_count")
    told = {"tokenizer_model": kind, "tokenizer_pre": pre, "token_list": tokens, "token_types": types, "layer_norm_rms_eps": 1e-5}
    for name, value in (dict.fromkeys(sizes, 8) | told | more).items():
        getattr(writer, f"add_{name}")(value)
    write_gguf_parts(writer)


def tokenizer_of(file: Path) -> Any:
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    from_gguf._write_tokenizer(file, GGUFReader(file), file.parent)
    (file.parent / "config.json").write_text('{"model_type": "llama"}')
    return AutoTokenizer.from_pretrained(file.parent)


def write_merging(model: dict[str, Any], pre: str, file: Path) -> None:
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [" ".join(m) for m in model["merges"]]
    ends = {"bos_token_id": 0, "eos_token_id": 0, "add_bos_token": False}
    write_vocabulary(file, "gpt2", pre, tokens, [3, *[1] * (len(tokens) - 1)], token_merges=merges, **ends)


@pytest.mark.parametrize("pre", [*from_gguf.DIGITS, "gpt-2", "llama-bpe"])
def test_text_is_cut_as_llama_cpp_cuts_it(merging: dict[str, Any], tmp_path: Path, pre: str) -> None:
    write_merging(merging, pre, file := tmp_path / "vocabulary.gguf")
    tokenizer, texts = tokenizer_of(file), corpus_texts() + ODD
    assert [tokenizer(text).input_ids for text in texts] == from_gguf.llama_ids(file, texts)


def test_a_rule_that_nobody_here_knows_is_refused_by_its_name(merging: dict[str, Any], tmp_path: Path) -> None:
    write_merging(merging, "youtu", file := tmp_path / "vocabulary.gguf")
    tokenizer_of(file)
    with pytest.raises(DownloadError, match=r"tokenizer.ggml.pre 'youtu': .* tokenizes 79 of 79 texts differently than llama.cpp"):
        from_gguf._refuse_other_tokens(file, "youtu", tmp_path)


@pytest.mark.parametrize("more", [{}, {"add_bos_token": False}, {"add_eos_token": True}], ids=str)
def test_a_sentencepiece_vocabulary_gives_llama_cpp_s_tokens(tmp_path: Path, more: dict[str, bool]) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    text, texts = tmp_path / "text", corpus_texts()
    text.write_text("\n".join(texts), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        **SENTENCEPIECE, input=str(text), model_prefix=str(tmp_path / "original"), vocab_size=1500
    )
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "original.model"))
    ids = range(original.vocab_size())
    types = [2 if original.is_unknown(i) else 3 if original.is_control(i) else 6 if original.is_byte(i) else 1 for i in ids]
    ends = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "token_scores": [original.get_score(i) for i in ids]}
    file = tmp_path / "vocabulary.gguf"
    write_vocabulary(file, "llama", "default", [original.id_to_piece(i).encode() for i in ids], types, **ends, **more)
    tokenizer, by_llama_cpp = tokenizer_of(file), from_gguf.llama_ids(file, texts)
    assert [tokenizer(t).input_ids for t in texts] == by_llama_cpp
    assert more or by_llama_cpp == [[1, *original.encode(t)] for t in texts]
