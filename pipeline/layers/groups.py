"""Groups of matrices that runtimes fuse into one product and that therefore need one format: q, k and v; gate and up."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import Unsupported
from pipeline.model.headers import skeleton
from pipeline.quantizers.gguf import EMBEDDINGS, HEAD

QKV = {"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv", "query", "key", "value"}
OUT = {"o_proj", "out_proj", "dense", "wo"}
GATE_UP = {"gate_proj", "up_proj", "gate_up_proj", "fc1", "fc_in", "c_fc", "dense_h_to_4h", "w1", "w3"}
DOWN = {"down_proj", "fc2", "fc_out", "dense_4h_to_h", "w2"}
ATTENTION = re.compile(r"attn|attention")
ORDER = ("qkv", "o", "gate+up", "down", "experts")


@dataclass(frozen=True)
class Group:
    """modules: transformers' names of its matrices, without `.weight`; layer: None outside the layers; kind: one of ORDER,
    `embeddings`, `head`, or its module's name."""

    name: str
    layer: int | None
    kind: str
    modules: tuple[str, ...]


def kind_of(module: str, experts: bool = False) -> str:
    """The kind of group that a matrix of a layer belongs to."""
    parent, _, last = module.rpartition(".")
    if experts or ".experts." in f"{module}.":
        return "experts"
    if last == "c_proj":  # GPT-2 calls both so
        return "o" if ATTENTION.search(parent) else "down"
    for kind, names in (("qkv", QKV), ("o", OUT), ("gate+up", GATE_UP), ("down", DOWN)):
        if last in names:
            return kind
    return last


def groups_of(folder: Path) -> list[Group]:
    """All groups of a model: embeddings, those of each layer in order, and the head if it has its own weights."""
    model = skeleton(folder)
    if model is None:
        raise Unsupported("the model's class is its own code: its layers cannot be distinguished")
    found: dict[tuple[int, str], list[str]] = {}
    for module, matrix in model.matrices.items():
        number = re.search(r"\.(\d+)\.", module)
        if matrix.block and number:
            found.setdefault((int(number[1]), kind_of(module, matrix.count > 1)), []).append(module)
    if not found:
        raise Unsupported("the model has no repeated layers")

    def place(key: tuple[int, str]) -> tuple[int, int, str]:
        return key[0], ORDER.index(key[1]) if key[1] in ORDER else len(ORDER), key[1]

    inside = [Group(f"{layer}.{kind}", layer, kind, tuple(found[layer, kind])) for layer, kind in sorted(found, key=place)]
    head = [] if model.ties_head else [Group("head", None, "head", (HEAD,))]
    return [Group("embeddings", None, "embeddings", (EMBEDDINGS,)), *inside, *head]
