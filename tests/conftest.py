"""A two-layer random Llama with a tokenizer of its own: everything a real model folder has, in a second."""

import compileall
import contextlib
import functools
import io
import logging
import os
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.core import isolate

os.environ.setdefault("OMP_NUM_THREADS", "1")  # products as small as these only wait for a second thread, and burn it
os.environ.setdefault("HF_HUB_OFFLINE", "1")

isolate.isolated = lambda work, *args, what, **named: work(*args, **named)  # a stage that a test calls works in its process
plain_tool = isolate.tool


def tool(command: list[str], *, what: str, log: Path, env: dict[str, str]) -> None:
    """`isolate.tool`, but with ONNX Runtime's builder in this process: in one of its own it imports torch for ten seconds."""
    if command[1:3] != ["-m", "onnxruntime_genai.models.builder"]:
        return plain_tool(command, what=what, log=log, env=env)
    quiet = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        patch.setattr(logging.root, "handlers", [*logging.root.handlers])  # it sets up its own
        patch.setattr(logging.root, "level", logging.root.level)
        patch.setattr(sys, "argv", command[2:])
        patch.setenv("GIT_DIR", env["GIT_DIR"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                runpy.run_module(command[2], run_name="__main__")
            except Exception as e:
                raise RuntimeError(f"{what}: {e} (see {log})") from e


isolate.tool = tool

CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
ROOT = Path(__file__).resolve().parent.parent

# Where PYTHONDONTWRITEBYTECODE is set, as in most containers, each of the hundred processes that tests start would compile these.
compileall.compile_dir(str(ROOT / "pipeline"), quiet=2)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test works in a folder of its own, as a stage in a project's."""
    monkeypatch.chdir(tmp_path)
    logging.getLogger("dvc").handlers.clear()  # DVC's write to the output of the test in which it set them up


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty store of MLflow's, to be copied: it takes seconds to make."""
    from track_house import empty_database

    return empty_database(tmp_path_factory.mktemp("mlflow"))


@pytest.fixture(scope="session")
def tracked(tmp_path_factory: pytest.TempPathFactory, database: Path) -> Path:
    """A folder with results that are tracked, to be copied (track_house.copy_tracked)."""
    from track_house import sqlite_house

    from pipeline import track

    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        settings, uri, _ = sqlite_house(folder, database)
        track.track(settings, uri)
    return folder


@functools.cache
def trained() -> str:
    """A tokenizer of 512 entries, trained on the project's own corpus."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    marks, alphabet = ["<|end|>", "<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator((ROOT / "evalsets/corpus/news.jsonl").read_text(encoding="utf-8").split("\n"), trainer)
    return str(raw.to_str())


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    own = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(trained()), **own)
    tokenizer.chat_template = CHAT
    return tokenizer


def make_model(folder: Path, *, seed: int = 0, hidden: int = 64, layers: int = 2, dtype: str = "float32") -> Path:
    """Write a random Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=1,
        eos_token_id=2, pad_token_id=2, initializer_range=0.2,  # wide enough that predictions differ between tokens
    )  # fmt: skip
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny16") / "model", dtype="bfloat16")


@pytest.fixture
def server() -> Iterator[Any]:
    """A real server in a thread, of one's own, that plays what a test asks for (serving_server.py)."""
    from tests import serving_server

    with serving_server.serving() as running:
        yield running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that `make test`'s second process is not left without work at the end."""
    rank = {f"test_{name}": k for k, name in enumerate(("pipeline", "golden", "same_bytes", "quantize", "parity", "original"), -6)}
    items.sort(key=lambda item: rank.get(item.path.stem, 0))
