"""Refuse a base model's folder that is incomplete or inconsistent, in seconds, not hours later in a stage that needs the part.

transformers' own loader matches names and shapes on the meta device, so renamed, merged and tied weights are counted its way."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.core import cli, isolate
from pipeline.core.droppings import data_files
from pipeline.core.errors import DownloadError
from pipeline.core.explain import some
from pipeline.core.records import Json
from pipeline.model.dequantize import packed_as, why_not
from pipeline.model.headers import read_headers

SHOWN = 3  # how many names an error lists


def refuse_incoherent(folder: Path, trusted: bool) -> None:
    """Raise `DownloadError` unless config.json, weights and tokenizer form one complete, finite model. trusted: whether the model's
    own code may run (`model.trust_remote_code`)."""
    from transformers import AutoConfig, AutoTokenizer

    config = read_object(folder / "config.json")
    for key, usual in (("transformers_weights", None), ("return_dict", True)):
        if config.get(key, usual) != usual:
            raise DownloadError(f"config.json has {key}: {config[key]!r}, which loads or returns other things; take it out")
    try:
        built = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
    except Exception as e:  # transformers checks the values; its classes may raise anything
        raise _refused("config.json", e) from None
    _refuse_other_weights(folder, built, trusted)
    if size := getattr(built.get_text_config(), "vocab_size", None):
        _refuse_ids_beyond(folder, size)
    try:
        with _quiet():
            AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
    except Exception as e:  # its classes may raise anything
        raise _refused("the tokenizer's files", e) from None
    _refuse_not_finite(folder)


def refuse_incomplete(folder: Path, name: str) -> None:
    """Raise `DownloadError` unless a folder holds config.json and safetensors weights. name: of the model, for the message."""
    if not (folder / "config.json").exists():
        raise DownloadError(f"{name} holds no config.json; is it a transformers model folder?")
    if not data_files(folder, "*.safetensors"):
        raise DownloadError(f"{name} holds no .safetensors weights (pickled ones are not loaded; use save_pretrained)")


def read_object(file: Path) -> Json:
    """A file's JSON object; `DownloadError` if it holds anything else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise DownloadError(f"{file.name} is not valid JSON ({e}); fetch it again") from None
    if not isinstance(content, dict):
        raise DownloadError(f"{file.name} holds a {type(content).__name__}, not a JSON object; fetch it again")
    return content


def indexed_shards(index: Path) -> set[str]:
    """Names of the weight files in an index; `DownloadError` if one is missing."""
    shards = set(read_object(index).get("weight_map", {}).values())
    if absent := sorted(s for s in shards if not (index.parent / s).exists()):
        raise DownloadError(f"{index.name} names {some(absent, SHOWN)}, absent from the model's folder; add what is missing")
    return shards


def refuse_quantized(config: Json, dequantize: bool) -> str | None:
    """The format of a base's packed weights, or None. Raises `DownloadError` unless they can be dequantized and `dequantize` (of
    params) is true: the base is the original that every variant is compared with."""
    packed = packed_as(config)
    if packed is None:
        return None
    fault = f"config.json has a quantization_config ({packed}): the base is quantized already"
    source = "take the full-precision model it was made from"
    if why := why_not(config):
        raise DownloadError(f"{fault}, and {why}; {source}")
    if not dequantize:
        way = f"`dequantize: true` under `model` makes its values in bfloat16 the base, and every page says so; else {source}"
        raise DownloadError(f"{fault}, and variants would be measured against rounded weights. {way}")
    return packed


def _refused(what: str, e: Exception) -> DownloadError:
    own_code = "trust_remote_code" in str(e)
    way = "if you trust its code, set model.trust_remote_code: true" if own_code else "correct it, or fetch it again"
    return DownloadError(f"transformers refuses {what} ({isolate.brief(e)}); {way}")


def _refuse_other_weights(folder: Path, config: Any, trusted: bool) -> None:
    """Raise if tensors are missing, unused by the model, or not of config.json's shapes."""
    try:
        info = _match(folder, config, trusted)
    except Exception as e:  # a model's class may raise anything for values it cannot be built from
        if trusted and hasattr(config, "auto_map"):  # a model's own code need not support the meta device
            cli.say("download", f"weights not compared with config.json: the model's own code raises {isolate.brief(e)}")
            return
        why = isolate.brief(e)
        raise DownloadError(f"transformers cannot build the model of config.json ({why}); correct config.json") from None
    fetch = "the weights are another model's or incomplete; fetch them again"
    if missing := sorted(info["missing_keys"]):
        raise DownloadError(f"the .safetensors files lack {some(missing, SHOWN)}, which config.json's model needs; {fetch}")
    if wrong := sorted(info["mismatched_keys"]):
        name, held, asked = wrong[0]
        shapes = f"{name} has shape {tuple(held)} and config.json asks for {tuple(asked)}"
        raise DownloadError(f"{shapes}; correct it, or fetch both again")
    if unknown := some(sorted(info["unexpected_keys"]), SHOWN):
        raise DownloadError(f"the .safetensors files hold {unknown}, which config.json's model has no place for; {fetch}")


def _match(folder: Path, config: Any, trusted: bool) -> Json:
    """The report of transformers' loader on the tensors' names and shapes."""
    import torch
    from transformers import AutoModelForCausalLM

    tensors = {name: torch.empty(t.shape, device="meta") for name, t in read_headers(folder).items()}
    with _quiet():
        with torch.device("meta"):
            kind = type(AutoModelForCausalLM.from_config(config, trust_remote_code=trusted))
        _, info = kind.from_pretrained(
            None, config=config, state_dict=tensors, ignore_mismatched_sizes=True, output_loading_info=True, device_map={"": "meta"}
        )
        return dict(info)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' report of mismatches, and torchao's of unsuitable builds."""
    from transformers.utils.logging import disable_progress_bar

    before = logging.root.manager.disable
    disable_progress_bar()
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _refuse_ids_beyond(folder: Path, size: int) -> None:
    """Raise if the tokenizer gives ids without an embedding. Such a special token is allowed if neither the chat template nor the
    begin or end of a text uses it, like the image token of Gemma 3's text models."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as e:  # tokenizers raises bare Exceptions
        raise DownloadError(f"tokenizer.json cannot be read ({isolate.brief(e)}); fetch it again") from None
    added = tokenizer.get_added_tokens_decoder()
    file = folder / "tokenizer_config.json"
    config = read_object(file) if file.exists() else {}
    named = [json.dumps(config[key], ensure_ascii=False) for key in ("chat_template", "bos_token", "eos_token") if key in config]
    used = "\n".join([*named, *(f.read_text(encoding="utf-8") for f in data_files(folder, "*.jinja"))])
    beyond = [(id, token) for token, id in tokenizer.get_vocab(with_added_tokens=True).items() if id >= size]
    if needed := [(id, token) for id, token in beyond if id not in added or not added[id].special or token in used]:
        id, token = max(needed)
        ids = f"the tokenizer gives ids up to {id} ({token!r}) and config.json's vocab_size is {size}"
        raise DownloadError(f"{ids}; use the model's own tokenizer, or resize_token_embeddings and save both again")


def _refuse_not_finite(folder: Path) -> None:
    from safetensors import safe_open

    for file in data_files(folder, "*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            for name in list(weights.keys()):
                if not _is_finite(weights.get_tensor(name)):
                    raise DownloadError(f"{name} in {file.name} holds NaN or infinite values; fetch it again, or export it anew")


def _is_finite(tensor: Any) -> bool:
    import torch

    if not tensor.is_floating_point() or not tensor.numel():
        return True
    tensor = tensor.float() if tensor.element_size() == 1 else tensor  # torch reduces no 8-bit floats
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())  # both are NaN if any value is
