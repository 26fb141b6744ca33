"""Convert a base's tokenizer and chat template, from whatever files, to tokenizer.json and chat_template.jinja.

Some stages read tokenizer.json, others load transformers' class for the model: both must give the same tokens."""

from __future__ import annotations

import datetime
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.core import isolate
from pipeline.core.artifacts import read_json, write_text
from pipeline.core.errors import DataError, DownloadError
from pipeline.evalset import load_texts
from pipeline.evalset.windows import chat_template

ORIGINALS = ("tokenizer.model", "spiece.model", "tiktoken.model", "tekken.json", "vocab.json", "vocab.txt")
TODAY = datetime.date(2026, 1, 1)  # for templates that read the clock: the same prompts on any day
Encode = Callable[[str], list[int]]
CORPUS = Path(__file__).resolve().parents[2] / "evalsets/corpus"


def settle(folder: Path, trusted: bool) -> list[str]:
    """Write tokenizer.json and chat_template.jinja from a base's files; return what was done. Raises `DownloadError` if no
    tokenizer can be made, or if it tokenizes a text of our corpus unlike its original."""
    done = [] if (folder / "tokenizer.json").exists() else [_convert(folder, trusted)]
    return done + _one_template(folder)


def corpus_texts() -> list[str]:
    """Texts for comparing two tokenizers: prose, code, Chinese."""
    return [row["text"] for row in load_texts(CORPUS)]


def _convert(folder: Path, trusted: bool) -> str:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file = next((folder / name for name in ORIGINALS if (folder / name).exists()), None)
    if file is None:
        raise DownloadError(f"the model holds no tokenizer: none of tokenizer.json, {', '.join(ORIGINALS)}")
    encode, texts, why = _original(file), corpus_texts(), ""
    for make in (AutoTokenizer, PreTrainedTokenizerFast):  # the model's class may add rules that the file lacks
        try:
            tokenizer = make.from_pretrained(folder, trust_remote_code=trusted)
            tokenizer.backend_tokenizer  # noqa: B018 - a slow one of its own code has none
        except Exception as e:  # a tokenizer's class may raise anything for files that it cannot read
            why = why or isolate.brief(e)
            continue
        differ = sum(tokenizer(text, add_special_tokens=False).input_ids != encode(text) for text in texts) if encode else 0
        if not differ:
            tokenizer.save_pretrained(folder)
            return f"tokenizer.json: made from {file.name}" + (f", equal on {len(texts)} texts" if encode else "")
        why = f"it tokenizes {differ} of {len(texts)} texts differently"
    raise DownloadError(f"no tokenizer.json can be made of {file.name} ({why}); use transformers' save_pretrained")


def _original(file: Path) -> Encode | None:
    """Token ids of a text by the original library of a tokenizer's file; None if transformers' class is the only one."""
    if file.suffix != ".model":
        return None
    if re.match(rb"[A-Za-z0-9+/=]+ \d+\r?\n", file.read_bytes()[:200]):
        from transformers.convert_slow_tokenizer import TikTokenConverter

        ranks = _library("tiktoken.load", file).load_tiktoken_bpe(str(file))
        rule = TikTokenConverter(vocab_file=str(file)).pattern  # not in the file: Llama 3's, as transformers assumes
        make = _library("tiktoken", file).Encoding
        encode: Encode = make("base", pat_str=rule, mergeable_ranks=ranks, special_tokens={}).encode_ordinary
    else:
        encode = _library("sentencepiece", file).SentencePieceProcessor(model_file=str(file)).encode
    return encode


def _library(module: str, file: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise DownloadError(f"{file.name} needs {e.name}: pip install {e.name} (or add the model's tokenizer.json)") from None


def refuse_two_ways(folder: Path) -> None:
    """Raise if transformers' class for the model, which may have its own rules, tokenizes texts unlike tokenizer.json."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    file, texts = Tokenizer.from_file(str(folder / "tokenizer.json")), corpus_texts()
    loaded = AutoTokenizer.from_pretrained(folder)
    differ = sum(loaded(t, add_special_tokens=False).input_ids != file.encode(t, add_special_tokens=False).ids for t in texts)
    if differ:
        cuts = f"transformers' {type(loaded).__name__} tokenizes {differ} of {len(texts)} texts differently than tokenizer.json"
        kind = read_json(folder / "config.json")["model_type"]
        raise DownloadError(f"{cuts}: it has its own rules for model_type {kind!r}; use a tokenizer of that kind")


def _one_template(folder: Path) -> list[str]:
    """Write the template as chat_template.jinja, with a fixed date; return what was done."""
    try:
        template = chat_template(folder)
    except DataError:  # `check` reports it if a task or a prompt is a chat
        template = None
    if template is None:
        return []
    done = [] if (folder / "chat_template.jinja").exists() else ["chat_template.jinja: taken from where the model kept it"]
    fixed = re.sub(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)", lambda call: json.dumps(TODAY.strftime(call[2])), template)
    if fixed != template:
        done.append(f"chat_template.jinja: it reads the clock; {TODAY} stands in it for every day")
    if done:
        write_text(folder / "chat_template.jinja", fixed)
    return done
