"""Whether a machine has room: the memory, card and disk that each stage takes, said before any work, and what would make it fit.

No weights are read. Memory is what no file backs: the system may drop a mapped model. The constants are measured, those of cards
estimated."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline import quantizers
from pipeline.core import artifacts, explain, quota
from pipeline.core.params import Params, Variant
from pipeline.engines import ROWS
from pipeline.model.config import text_config
from pipeline.model.headers import count_weights, linear_shapes, read_headers, weights_of
from pipeline.preflight.model import base_folder

IMPORTS = 0.4e9  # bytes of Python and its libraries
RUNNING = 1.5e9  # bytes of a stage that runs a model, IMPORTS among them: 0.7 to 1.6 in the default run
LOGITS = 6  # blocks of ROWS positions that it holds: two models' logits, and what compares them
# What a method's library holds at most, in parts of the model at 16 bits; the others work tensor by tensor.
COPIES = {"awq": 1.0, "bnb": 0.5, "gptq": 1.0, "onnx": 2.8, "rtn": 1.0}
REPACKED = ("awq", "gptq", "rtn")  # quantizers whose weights a kernel stores in an order of its own: not mapped
LOADED = {"onnxruntime": 0.0, "vllm": 1.8e9}  # engines that read a variant into memory, and do not map it: bytes besides
ON_CARD = {"awq": 0.0, "bnb": 0.5, "gptq": 0.0, "torchao": 1.0}  # as COPIES, of a card; 0: a layer at a time
CONTEXT = 0.6e9  # bytes that CUDA takes of a card
SHARE = 0.9  # of a card that a model may fill
SCALES = 0.5  # bits a packed weight, for scales and zero points
ON_PROCESSORS = "a larger card can run it, and so can processors: CUDA_VISIBLE_DEVICES= dvc repro STAGE"
RUNS = ("diverge", "evaluate", "benchmark")  # stages of a variant that run its model


class Room(NamedTuple):
    """What a machine has: bytes of memory, and of each card."""

    memory: float
    cards: Sequence[float]


class Need(NamedTuple):
    """What a stage takes: bytes of memory besides a mapped model, and of a card. spread: cards that share the latter; 0: all."""

    memory: float
    card: float = 0.0
    spread: int = 1

    def cards_of(self, room: Room) -> int:
        """How many of a machine's cards it takes."""
        if not room.cards or not self.card:
            return 0
        return min(len(room.cards), self.spread or math.ceil(self.card / (SHARE * min(room.cards))) or len(room.cards))


def here() -> Room:
    return Room(quota.memory_bytes(), quota.card_bytes(os.environ.get("CUDA_VISIBLE_DEVICES")))


def capacity(settings: Params) -> list[str]:
    """One line for the whole, and one for each thing that is too small here; empty if the model is not here yet."""
    folder = base_folder(settings)
    if folder is None:
        return []
    room, memory = here(), {stage: need.memory / 1e9 for stage, need in needs(settings, folder).items()}
    most = max(memory, key=memory.__getitem__)
    weights = 2 * count_weights(folder) / 1e9  # at 16 bits
    need, free = disk_bytes(settings, folder) / 1e9, shutil.disk_usage(Path.cwd()).free / 1e9
    lines = [
        f"the model's {weights / 2:.2f} billion weights: about {need:.1f} GB more on disk ({free:.1f} GB free), "
        f"at most {memory[most]:.1f} GB of memory besides the mapped model, in {most} ({room.memory / 1e9:.1f} GB here)"
    ]
    if need > free:
        lines.append(f"the disk is too small: about {need:.1f} GB are needed and {free:.1f} GB are free")
    if weights > room.memory / 1e9:
        lines.append(f"its {weights:.1f} GB at 16 bits are more than the memory: each pass reads them from disk")
    return lines + too_large(settings, folder, room)


def too_large(settings: Params, folder: Path, room: Room) -> list[str]:
    """Stages that a machine has no room for, and what would make them fit."""
    lines = dict[str, list[str]]()  # what to say: of which stages
    for stage, need in needs(settings, folder).items():
        name = stage.partition("@")[2] or settings.reference
        if need.memory > room.memory:
            small = stage.startswith("quantize") and settings.variants[name].quantizer in COPIES
            what = f"about {need.memory / 1e9:.1f} GB of memory and {room.memory / 1e9:.1f} GB are here: it will be killed"
            way = "quantizers cast, gguf and torchao take less" if small else "a larger machine can run it (docs/machines.md)"
            lines.setdefault(f"{what}; {way}", []).append(stage)
        taken = need.cards_of(room)
        if taken and need.card > SHARE * taken * min(room.cards):
            cards = "a card" if taken == 1 else f"{taken} cards"
            what = f"about {need.card / 1e9:.1f} GB on {cards} of {min(room.cards) / 1e9:.1f} GB"
            way = ON_PROCESSORS if stage.startswith("quantize") else _way(settings.variants[name], need, room)
            lines.setdefault(f"{what}; {way}", []).append(stage)
    return [f"{', '.join(stages)}: {line}" for line, stages in lines.items()]


def _way(variant: Variant, need: Need, room: Room) -> str:
    """What gives a stage more of the cards."""
    enough = need._replace(spread=0).cards_of(room)
    fits = need.card <= SHARE * enough * min(room.cards)
    if variant.engine == "vllm":
        return f"engine_options: {{tensor_parallel: {enough}}} shares it" if fits else "a machine with more cards can run it"
    if need.spread == 0:
        return "the machine's memory takes the rest, and each pass waits for it"
    over = f"{enough} cards" if fits else f"all {len(room.cards)} cards and the machine's memory"
    return f"engine_options: {{device_map: auto}} spreads it over {over}"


def needs(settings: Params, folder: Path) -> dict[str, Need]:
    """{stage: what it takes at most}, as if the machine had cards."""
    whole, config = 2.0 * count_weights(folder), text_config(folder)
    sizes: Counter[str] = Counter()  # weights by layer; "": of all that is in none
    for name, tensor in weights_of(folder).items():
        sizes[(re.match(r"(.*?\.)?\d+\.", name) or [""])[0]] += math.prod(tensor.shape)
    outside = sizes.pop("", 0)
    largest = max(sizes.values(), default=0)
    work = LOGITS * 4.0 * ROWS * int(config.get("vocab_size") or 0)
    found = dict[str, Need]()
    for name, variant in settings.variants.items():
        options, size = variant.engine_options, variant_bytes(variant, folder)
        copies = ON_CARD.get(variant.quantizer)
        card = 0.0 if copies is None else CONTEXT + copies * whole + 4 * largest
        found[f"quantize@{name}"] = Need(IMPORTS + COPIES.get(variant.quantizer, 0) * whole + 4 * largest, card)
        loaded = size if variant.engine in LOADED or variant.quantizer in REPACKED else 0.0
        uses_card = variant.engine == "vllm" or (variant.engine == "hf" and options.get("device") != "cpu")
        run = Need(
            RUNNING + work + loaded + LOADED.get(variant.engine, 0.0), uses_card * (CONTEXT + work + size),
            0 if options.get("device_map") == "auto" else int(str(options.get("tensor_parallel", 1))),
        )  # fmt: skip
        found |= {f"{stage}@{name}": run for stage in RUNS}
        if name == settings.reference:
            wide = 4.0 * (outside + largest)  # a layer at a time computes in float32
            found |= {"reference": run, "floor": run._replace(memory=run.memory + wide, card=run.card and run.card + wide)}
    return found


def disk_bytes(settings: Params, folder: Path) -> float:
    """What base and variants will take that are not here yet, and the largest temporary file."""
    new = {n: v for n, v in settings.variants.items() if not (artifacts.model_dir(n) / artifacts.MANIFEST).exists()}
    total = sum(variant_bytes(variant, folder) for variant in new.values() if not _links(variant, folder))
    if not (artifacts.BASE / artifacts.MANIFEST).exists():
        total += sum(tensor.bytes for tensor in read_headers(folder).values())
    return total + (2 * count_weights(folder) if any(variant.quantizer == "gguf" for variant in new.values()) else 0)


def _links(variant: Variant, folder: Path) -> bool:
    """Whether a cast has nothing to cast, and links the base's files."""
    wanted = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}.get(str(variant.options.get("dtype")))
    return variant.quantizer == "cast" and {tensor.dtype for tensor in read_headers(folder).values()} == {wanted}


def variant_bytes(variant: Variant, folder: Path) -> float:
    """Bytes of a variant's weights: its matrices at its bits and their scales, the rest at 16 or, in ONNX, 32 bits."""
    asked = explain.with_defaults(quantizers.find(variant.quantizer), variant.options, quantizers.GIVEN)
    bits = explain.nominal_bits(asked) or 16
    packed = sum(outputs * inputs for outputs, inputs in linear_shapes(folder).values())
    rest = 4 if bits == 32 or variant.engine == "onnxruntime" else 2
    return packed * (bits + (SCALES if bits < 16 else 0)) / 8 + (count_weights(folder) - packed) * rest
