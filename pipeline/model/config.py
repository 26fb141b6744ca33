"""Facts of a model folder's text part, whatever its class calls it. Nothing heavy is loaded."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import Any

from pipeline.core import artifacts
from pipeline.core.droppings import data_files
from pipeline.core.records import Json

NESTED = ("text_config", "llm_config", "language_config")  # the text part of a model with pictures or sound
# Files taken from a model folder: no pickled weights, and code only on request.
WANTED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja", "LICENSE*", "README.md")
READ = 4096  # tokens: longer than any scored text, so that a longer sliding window loses nothing
# Files that loaders would pick up beside the weights, or that would take the place of a quantizer's own.
LEFT = ("adapter_*", "*quant*config.json", "genai_config.json", "params.json")
WINDOWS = ("max_position_embeddings", "n_positions", "max_seq_len")


def text_config(folder: Path) -> Json:
    """config.json, with the keys of its text part in front."""
    config: Json = artifacts.read_json(folder / "config.json")
    return config | next(iter(nested(config)), {})


def nested(config: Json) -> list[Json]:
    """The text parts within a config.json."""
    return [config[name] for name in NESTED if isinstance(config.get(name), dict)]


def window(config: Json) -> int | None:
    """The most tokens that a model reads; None if its config sets no bound, as with ALiBi or a recurrent state."""
    return next((config[name] for name in WINDOWS if isinstance(config.get(name), int)), None)


def sliding(config: Json) -> tuple[int, list[bool]]:
    """(tokens, which layers) of attention limited to a window or chunk; (0, none) for a model without."""
    types = config.get("layer_types") or ["sliding_attention"] * (config.get("num_hidden_layers") or 0)
    chunked = "chunked_attention" in types
    tokens = config.get("attention_chunk_size" if chunked else "sliding_window") or 0
    layers = [kind == ("chunked_attention" if chunked else "sliding_attention") for kind in types]
    return (tokens, layers) if tokens and any(layers) and config.get("use_sliding_window") is not False else (0, [])


def wanted(folder: Path, code: bool) -> list[Path]:
    """The files to take from a model's folder, or all parts of a GGUF file. code: its Python files too."""
    if folder.suffix == ".gguf":
        return parts(folder)
    files = {file for pattern in (*WANTED, *["*.py"] * code) for file in data_files(folder, pattern)}
    return sorted(file for file in files if not any(fnmatch.fnmatchcase(file.name, left) for left in LEFT))


def parts(file: Path) -> list[Path]:
    """The files of a GGUF model, whether they exist or not: one, or all parts by a name such as `x-00001-of-00003.gguf`."""
    split = re.search(r"-\d{5}-of-(\d{5})\.gguf$", file.name)
    stem, count = (file.name[: split.start()], split[1]) if split else ("", "0")
    return [file.with_name(f"{stem}-{k + 1:05}-of-{count}.gguf") for k in range(int(count))] or [file]


def end_ids(folder: Path, tokenizer: Any) -> set[int]:
    """Tokens that end a reply in every engine: those of the generation config, else of the config, and the tokenizer's."""
    file = folder / "generation_config.json"
    ids = artifacts.read_json(file).get("eos_token_id") if file.exists() else None
    ids = text_config(folder).get("eos_token_id") if ids is None else ids
    return {*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id} - {None}


def leading(tokenizer: Any) -> list[int]:
    """The token that a tokenizer puts before every text, if it does."""
    return [t for t in tokenizer("").input_ids if t == tokenizer.bos_token_id][:1]


def appended(tokenizer: Any) -> int:
    """How many tokens, such as an end token, a tokenizer appends to every text; a text to continue must not have them."""
    bare, whole = (tokenizer("a", add_special_tokens=special).input_ids for special in (False, True))
    return next(len(whole) - at - len(bare) for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
