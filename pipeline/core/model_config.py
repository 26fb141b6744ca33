"""What a model folder's config.json says of the part that reads text, whatever its class calls it: nothing heavy is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.core import artifacts

NESTED = ("text_config", "llm_config", "language_config")  # where a model with pictures or sound keeps its text part
WINDOWS = ("max_position_embeddings", "n_positions", "max_seq_len")


def text_config(folder: Path) -> dict[str, Any]:
    """config.json, with what it says of its text part in front."""
    config: dict[str, Any] = artifacts.read_json(folder / "config.json")
    nested = (config[name] for name in NESTED if isinstance(config.get(name), dict))
    return config | next(nested, {})


def window(config: dict[str, Any]) -> int | None:
    """The most tokens that a model reads, or None where its config names no bound, as with ALiBi or a recurrent state."""
    return next((config[name] for name in WINDOWS if isinstance(config.get(name), int)), None)
