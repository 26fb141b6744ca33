"""Tokenizers and chat templates in the files that people have: what they become gives the same tokens and the same text."""

import base64
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from model_house import SENTENCEPIECE, fetch
from test_from_gguf import ODD

from pipeline.core.errors import DownloadError
from pipeline.model.tokenizer_files import corpus_texts

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def base(tiny: Path, tmp_path: Path) -> Path:
    """A model whose tokenizer a test may replace; with more places for tokens than its own has."""
    return Path(shutil.copytree(tiny, tmp_path / "base"))


def loaded(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def without_json(folder: Path) -> dict[str, Any]:
    """Take tokenizer.json away; returns its content."""
    content: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    (folder / "tokenizer.json").unlink()
    return content


def configure(folder: Path, **values: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")


def test_vocabulary_and_merges_become_one_file_with_the_same_tokens(base: Path, tiny: Path, tmp_path: Path) -> None:
    model = without_json(base)["model"]
    (base / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    (base / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in model["merges"]), encoding="utf-8")
    configure(base, tokenizer_class="GPT2Tokenizer", bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<|end|>")
    facts = fetch(base, tmp_path / "out")
    assert facts["repairs"][0] == "tokenizer.json: made from vocab.json" and "tokenizer_config.json" in facts["repaired"]
    made, original = loaded(tmp_path / "out"), loaded(tiny)
    assert all(made(text).input_ids == original(text).input_ids for text in corpus_texts() + ODD)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_model_becomes_a_tokenizer_with_its_tokens(base: Path, tmp_path: Path, kind: str) -> None:
    """Unigram, though transformers' class for Llama knows BPE only."""
    sentencepiece = pytest.importorskip("sentencepiece")
    without_json(base)
    text = tmp_path / "text"
    text.write_text("\n".join(t for t in corpus_texts() if t.isascii()), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        **SENTENCEPIECE | {"model_type": kind},
        input=str(text),
        model_prefix=str(base / "tokenizer"),
        vocab_size=512,
        split_digits=True,
    )
    configure(base, tokenizer_class="LlamaTokenizer", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    facts = fetch(base, tmp_path / "out")
    assert "made from tokenizer.model, equal on 79 texts" in facts["repairs"][0]
    original = sentencepiece.SentencePieceProcessor(model_file=str(base / "tokenizer.model"))
    made = loaded(tmp_path / "out")
    assert all(made(text, add_special_tokens=False).input_ids == original.encode(text) for text in corpus_texts())


def test_a_tiktoken_file_becomes_a_tokenizer_with_its_tokens(base: Path, tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    vocab = without_json(base)["model"]["vocab"]
    words = sorted((w for w in vocab if not w.startswith("<|")), key=vocab.__getitem__)
    ranks = {bytes(byte_of[c] for c in word): k for k, word in enumerate(words)}
    lines = (f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items())
    (base / "tiktoken.model").write_text("\n".join(lines) + "\n")
    configure(base, tokenizer_class="PreTrainedTokenizerFast")
    fetch(base, tmp_path / "out")
    rule = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    original = tiktoken.Encoding("mine", pat_str=rule, mergeable_ranks=ranks, special_tokens={})
    made = loaded(tmp_path / "out")
    assert all(made(text, add_special_tokens=False).input_ids == original.encode_ordinary(text) for text in corpus_texts() + ODD)


def test_what_cannot_become_a_tokenizer_is_refused_with_the_way_out(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_json(base)
    with pytest.raises(DownloadError, match="holds no tokenizer: none of tokenizer.json, tokenizer.model, "):
        fetch(base, tmp_path / "none")
    (base / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DownloadError, match="tokenizer.model needs sentencepiece: pip install sentencepiece"):
        fetch(base, tmp_path / "library")


def test_a_tokenizer_that_transformers_reads_otherwise_than_its_file_says_is_refused(tmp_path: Path) -> None:
    from zoo import make

    folder = make("qwen2", tmp_path / "base")
    with pytest.raises(DownloadError, match="Qwen2Tokenizer tokenizes .* differently than tokenizer.json: .* model_type 'qwen2'"):
        fetch(folder, tmp_path / "out")


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NAMED = [{"name": "rag", "template": "no"}, {"name": "default", "template": TEMPLATE}]


@pytest.mark.parametrize("files", [
    {"chat_template.jinja": TEMPLATE, "tokenizer_config.json": {"chat_template": "no"}},
    {"chat_template.json": {"chat_template": TEMPLATE}}, {"tokenizer_config.json": {"chat_template": TEMPLATE}},
    {"tokenizer_config.json": {"chat_template": NAMED}},
    {"additional_chat_templates/default.jinja": TEMPLATE, "additional_chat_templates/rag.jinja": "no"},
])  # fmt: skip
def test_a_template_is_found_wherever_it_is_kept(base: Path, tmp_path: Path, files: dict[str, Any]) -> None:
    (base / "chat_template.jinja").unlink()
    for name, content in files.items():
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    fetch(base, tmp_path / "out")
    assert (tmp_path / "out/chat_template.jinja").read_text("utf-8") == TEMPLATE
    assert loaded(tmp_path / "out").apply_chat_template(MESSAGES, tokenize=False) == "<user>hello"


def test_a_template_that_reads_the_clock_gives_the_same_text_on_any_day(base: Path, tmp_path: Path) -> None:
    clock = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }} {{ strftime_now( \"%Y-%m-%d\" ) }}{% endif %}"
    (base / "chat_template.jinja").write_text(clock, encoding="utf-8")
    facts = fetch(base, tmp_path / "out")
    assert loaded(tmp_path / "out").apply_chat_template(MESSAGES, tokenize=False) == "01 Jan 2026 2026-01-01"
    assert facts["repairs"] == ["chat_template.jinja: it reads the clock; 2026-01-01 stands in it for every day"]
    assert "chat_template.jinja" in facts["repaired"]
