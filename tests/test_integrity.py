"""A base model that would fail hours later is refused when it is fetched, and the error names the part."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from model_house import change_json, change_weights, fetch, tensors_of, write_tensors

from pipeline import check
from pipeline.core.errors import DownloadError
from pipeline.core.params import PathModel

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def base(tiny: Path, tmp_path: Path) -> Path:
    """A whole model that a test may break. Its tied head is stored once."""
    return Path(shutil.copytree(tiny, tmp_path / "base"))


def passes(folder: Path, **how: bool) -> None:
    assert fetch(folder, folder.parent / "out", **how)["source"] == "path"
    shutil.rmtree(folder.parent / "out")


def refusal(folder: Path, **how: bool) -> str:
    """The error's one line."""
    with pytest.raises(DownloadError) as caught:
        fetch(folder, folder.parent / "out", **how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def add_token(folder: Path, token: str, *, special: bool) -> None:
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([AddedToken(token, special=special)])
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_whole_model_passes_in_one_file_or_in_shards_that_are_all_there(base: Path) -> None:
    passes(base)
    tensors = tensors_of(base)
    (base / "model.safetensors").unlink()
    parts = {"model-00001-of-00002.safetensors": {UP: tensors.pop(UP)}, "model-00002-of-00002.safetensors": tensors}
    for name, part in parts.items():
        write_tensors(base, part, name)
    index = {"metadata": {}, "weight_map": {t: name for name, part in parts.items() for t in part}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    passes(base)
    (base / "model-00001-of-00002.safetensors").unlink()
    assert "index.json names model-00001-of-00002.safetensors, absent" in refusal(base)


@pytest.mark.parametrize("text, word", [("{", "is not valid JSON"), ("[]", "holds a list"), ("{}", "holds no .safetensors")])
def test_an_index_that_lists_nothing_is_refused(base: Path, text: str, word: str) -> None:
    (base / "model.safetensors").unlink()  # else no loader asks an index
    (base / "model.safetensors.index.json").write_text(text)
    assert word in refusal(base)


@pytest.mark.parametrize("change, words", [
    (lambda tensors: tensors.pop(UP), f"lack {UP}, which"),
    (lambda tensors: [tensors.pop(t) for t in list(tensors) if "layers.1" in t], " and 6 more, which"),
    (lambda tensors: tensors.update(extra=tensors[UP].clone()), "hold extra, which config.json's model has no place for"),
], ids=["one missing", "many missing", "one more"])  # fmt: skip
def test_tensors_that_are_not_the_model_s_are_named_and_counted(
    base: Path, capfd: pytest.CaptureFixture[str], change: Any, words: str
) -> None:
    """And transformers' own report of them is neither printed nor silenced afterwards."""
    import logging

    before = logging.root.manager.disable
    assert words in refusal(change_weights(base, change))
    assert "REPORT" not in "".join(capfd.readouterr()) and logging.root.manager.disable == before


@pytest.mark.parametrize("values, word", [
    ({"hidden_size": 32, "head_dim": 16}, r"has shape .*64.* and config.json asks for .*32"),
    ({"vocab_size": 100}, r"embed_tokens.weight has shape \(\d+, 64\) and config.json asks for \(100, 64\);"),
    ({"num_hidden_layers": 3}, r"lack model\.layers\.2\."), ({"num_hidden_layers": 1}, r"hold model\.layers\.1\..* no place for"),
    ({"tie_word_embeddings": False}, "lack lm_head.weight"),
    ({"hidden_size": "wide"}, "transformers (refuses config.json|cannot build)"),
    ({"model_type": "llama9"}, "transformers refuses config.json .*llama9"),
    ({"model_type": None}, "transformers refuses config.json .*model type"), ({"model_type": "t5"}, "transformers cannot build"),
    ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}, "set model.trust_remote_code: true"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantization_config \(gptq\): the base is quantized"),
], ids=lambda v: "-".join(v) if isinstance(v, dict) else "")  # fmt: skip
def test_a_config_that_is_not_the_weights_is_refused(base: Path, values: dict[str, Any], word: str) -> None:
    change_json(base / "config.json", **values)
    message = refusal(base)
    assert re.search(word, message), message


def code_of_its_own(base: Path, body: str = "") -> None:
    """Make a base whose class comes with it; body: the class's own methods."""
    (base / "mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Mine(LlamaConfig):\n    model_type = 'mine'\n"
        "class MineForCausalLM(LlamaForCausalLM):\n    config_class = Mine\n" + body
    )
    named = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    change_json(base / "config.json", model_type="mine", auto_map=named, architectures=["MineForCausalLM"])


def test_code_of_the_models_own_runs_where_it_is_trusted_only(base: Path) -> None:
    """The model's own class is what its weights are compared with."""
    code_of_its_own(base)
    passes(base, trust_remote_code=True)
    change_weights(base, lambda tensors: tensors.pop(UP))
    assert f"lack {UP}" in refusal(base, trust_remote_code=True)


def test_trusted_code_that_cannot_do_without_weights_passes_and_it_is_said(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code_of_its_own(base, "    def __init__(self, config):\n        raise RuntimeError('no meta')\n")
    passes(base, trust_remote_code=True)
    said = "".join(capsys.readouterr())
    assert "weights not compared with config.json: the model's own code raises RuntimeError: no meta" in said


@pytest.mark.parametrize("value, dtype", [("nan", "float32"), ("inf", "bfloat16"), ("-inf", "float16"), ("nan", "float8_e5m2")])
def test_a_weight_that_is_not_finite_is_named(base: Path, value: str, dtype: str) -> None:
    import torch

    def spoil(tensors: dict[str, Any]) -> None:
        tensors[UP][3, 5] = float(value)
        tensors[UP] = tensors[UP].to(getattr(torch, dtype))

    assert refusal(change_weights(base, spoil)).startswith(f"{UP} in model.safetensors holds NaN or infinite values")


def test_a_token_beyond_the_vocabulary_is_named_unless_it_is_special_and_unused(base: Path) -> None:
    add_token(base, "<|picture|>", special=True)
    passes(base)
    template = base / "chat_template.jinja"
    whole = template.read_text("utf-8")
    template.write_text(whole + "<|picture|>", encoding="utf-8")
    assert "('<|picture|>')" in refusal(base)
    template.write_text(whole, encoding="utf-8")
    shutil.rmtree(base.parent / "out")
    add_token(base, "newword", special=False)
    assert "('newword') and config.json's vocab_size is" in refusal(base)


def test_a_tokenizer_that_cannot_be_read_is_refused(base: Path) -> None:
    (base / "tokenizer.json").write_text("{}")
    assert "tokenizer.json cannot be read" in refusal(base)


@pytest.mark.parametrize("files, word", [
    ([], "holds no config.json; is it"), (["config.json"], "holds no .safetensors"),
    (["config.json", "pytorch_model.bin"], "pickled ones are not loaded; use save_pretrained"),
])  # fmt: skip
def test_check_says_what_a_model_folder_lacks(tmp_path: Path, files: list[str], word: str) -> None:
    for file in files:
        (tmp_path / file).write_text("{}")
    with pytest.raises(DownloadError, match=word):
        check._check_folder(PathModel(source="path", path=str(tmp_path)))
