"""Check params.yaml against the base model's files, wherever they are here: what it does not take, and what memory and disk it
takes. No weights are read. Memory is what no file backs: the system may drop a mapped model. The constants are measured."""

from __future__ import annotations

import math
import re
import shutil
from collections import Counter
from pathlib import Path

from pipeline import engines, quantizers
from pipeline.core import artifacts, explain, quota, records
from pipeline.core.errors import ArtifactError, DataError, ParamsError, QuantgateError, Unsupported
from pipeline.core.params import HowMany, Params, PathModel, Variant
from pipeline.core.records import BaseManifest, Json
from pipeline.engines.llamacpp import LONGEST
from pipeline.evalset import choose, load_prompts
from pipeline.evalset.tasks import TASKS, is_chat, load_task, local_tasks, subset
from pipeline.evalset.windows import refuse_chats, why_not
from pipeline.model.config import text_config, window
from pipeline.model.headers import count_weights, linear_shapes, read_headers, weights_of

IDENTITY = ("source", "package", "file", "sha256", "path", "id")  # what params and a base's manifest both say of a model
IMPORTS = 0.4e9  # bytes of Python and its libraries
# What a method's library holds at most, in parts of the model at 16 bits; the others work tensor by tensor.
COPIES = {"awq": 1.0, "bnb": 0.5, "gptq": 1.0, "onnx": 2.8, "rtn": 1.0}
LOADED = {"onnxruntime": IMPORTS, "vllm": 3.3e9}  # engines that read a variant into memory, and do not map it: bytes besides
SCALES = 0.5  # bits a packed weight, for scales and zero points
HELLO = [{"role": "user", "content": "hello"}]


def base_manifest(settings: Params) -> BaseManifest | None:
    """The manifest of artifacts/base if that is the model that params name; None: not downloaded yet."""
    try:
        manifest = records.read(artifacts.BASE / artifacts.MANIFEST, BaseManifest)
    except QuantgateError:
        return None
    asked = settings.model.model_dump()
    return manifest if all(manifest.get(key) == asked[key] for key in IDENTITY if key in asked) else None


def base_folder(settings: Params) -> Path | None:
    """The folder of the base model's files: its own, or artifacts/base if that is this model; None: not here yet."""
    if isinstance(settings.model, PathModel) and settings.model.folder.suffix != ".gguf":
        return settings.model.folder
    return artifacts.BASE if base_manifest(settings) and (artifacts.BASE / "config.json").exists() else None


def faults(settings: Params) -> list[str]:
    """List settings the base model does not support; empty if it has not been downloaded."""
    folder = base_folder(settings)
    if folder is None:
        return []
    try:
        tasks = unanswerable(settings.amount.tasks, folder, settings.evaluate.allow_truncated, settings.seed)
        refused = _refused(settings, folder)
    except ArtifactError as e:  # a file of the model's is damaged
        return [f"params.yaml: model: {e}"]
    messages = [f"params.yaml: tiers.{settings.tier}.tasks: {why}" for why in tasks] + _too_long(settings, folder)
    try:
        prompts = load_prompts(Path(settings.diverge.trajectories.prompts))
        refuse_chats(choose(prompts, settings.amount.trajectories, settings.seed), folder)
    except DataError as e:
        messages.append(f"params.yaml: diverge.trajectories.prompts: {e}")
    return messages + [f"params.yaml: variants.{name}: {e}" for name, e in refused.items() if not isinstance(e, Unsupported)]


def notes(settings: Params) -> list[str]:
    """Variants that will be `unsupported` or packed in part: a result and no fault, the run goes on."""
    folder = base_folder(settings)
    gate = dict.fromkeys(settings.gate.required, ", and it is required: the gate will FAIL")
    unsupported = {name: e for name, e in _refused(settings, folder).items() if isinstance(e, Unsupported)}
    lines = [f"variants.{name} will be unsupported: {e}{gate.get(name, '')}" for name, e in unsupported.items()]
    for name, variant in settings.variants.items():
        if folder and name not in unsupported and (why := quantizers.packs_only(variant.quantizer, folder)):
            lines.append(f"variants.{name}: {why}")
    return lines


def _refused(settings: Params, folder: Path | None) -> dict[str, QuantgateError]:
    """Why variants cannot be; folder: the base model's files, where they are here."""
    refused: dict[str, QuantgateError] = {}
    for name, variant in settings.variants.items():
        try:
            if folder:
                quantizers.check_model(variant.quantizer, variant.options, folder)
            engines.check_here(variant.engine)
        except (ParamsError, Unsupported) as e:
            refused[name] = e
    return refused


# ---- texts against the model's window ----------------------------------------------------------------------------------------
def _past(texts: dict[str, str], most: int, model_dir: Path) -> dict[str, int]:
    """{item: tokens of its text, without special ones} where they are more than `most`; empty where no tokenizer.json is here."""
    near = {item: text for item, text in texts.items() if len(text.encode()) > most}  # a token has a byte at least
    if not near or not (model_dir / "tokenizer.json").exists():
        return {}
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    lengths = {item: len(tokenizer.encode(text, add_special_tokens=False).ids) for item, text in near.items()}
    return {item: n for item, n in lengths.items() if n > most}


def _too_long(settings: Params, folder: Path) -> list[str]:
    """Requests, trajectories and windows that are longer than the model's window: each would fail, one after another."""
    amount, most, messages = settings.amount, window(text_config(folder)), []
    for section, asked in (("benchmark", amount.benchmark), ("serving", amount.serving if settings.serving.variants else None)):
        if asked and most and asked.prompt_tokens + asked.output_tokens > most:
            lengths = f"{asked.prompt_tokens} prompt and {asked.output_tokens} output tokens are more than the model's {most}"
            messages.append(f"params.yaml: tiers.{settings.tier}.{section}: {lengths}; ask for fewer")
    setup = settings.diverge.trajectories
    prompts = choose(load_prompts(Path(setup.prompts)), amount.trajectories, settings.seed)
    texts = {row["id"]: row.get("prompt") or " ".join(m["content"] for m in row["messages"]) for row in prompts}
    if most and (long := _past(texts, most - setup.tokens, folder)):
        name = max(long, key=long.__getitem__)
        lengths = f"prompt {name!r} and reply have {long[name] + setup.tokens} tokens and the model's window is {most}"
        messages.append(f"params.yaml: diverge.trajectories: {lengths}; lower diverge.trajectories.tokens or shorten the prompt")
    length = min(settings.diverge.window, most or settings.diverge.window)
    users = [name for name, variant in settings.variants.items() if variant.engine == "llamacpp"]
    if length > LONGEST and users:
        why = f"{length} tokens are more than engine 'llamacpp' reads here ({LONGEST}), for {', '.join(users)}"
        messages.append(f"params.yaml: diverge.window: {why}; lower it")
    return messages


def unanswerable(tasks: dict[str, HowMany], model_dir: Path, allow_truncated: bool, seed: int) -> list[str]:
    """Tasks that a model cannot answer: chats without a template, items longer than its window, targets longer than a reply."""
    most, messages = window(text_config(model_dir)) if (model_dir / "config.json").exists() else None, []
    for name in tasks.keys() & local_tasks().keys():
        config, rows = load_task(name)
        if is_chat(config) and (why := why_not(HELLO, model_dir)):
            messages.append(f"task {name!r} {why}; take it out of the tier")
        chosen = [rows[i] for i in subset(len(rows), tasks[name], seed)]
        generated = config["output_type"] == "generate_until"
        reply = (config.get("generation_kwargs") or {}).get("max_gen_toks") if generated else None
        if isinstance(reply, int):  # of an item's targets the shortest counts; after a space, as replies begin, tokens may be fewer
            shortest = {row["id"]: min(_texts(row, config, "doc_to_target"), key=len, default="").strip() for row in chosen}
            bare, spaced = (_past({i: f"{s}{text}" for i, text in shortest.items()}, reply, model_dir) for s in ("", " "))
            long = {item: min(bare[item], spaced[item]) for item in bare.keys() & spaced.keys()}
            way = f"shorten it, or raise generation_kwargs.max_gen_toks in {(TASKS / name).with_suffix('.yaml')}"
            messages += _longest(name, long, f": its target has {{}} tokens and a reply at most {reply}", way)
        if most and not allow_truncated:
            more = reply if isinstance(reply, int) else 0
            asked = _past({row["id"]: _asked(row, config) for row in chosen}, most - more, model_dir)
            of_reply = f", the {more} of its reply among them," if more else ""
            way = "shorten it, take the task out of the tier, or say evaluate.allow_truncated: true"
            fault = f" has {{}} tokens{of_reply} and the model's window is {most}"
            messages += _longest(name, {item: n + more for item, n in asked.items()}, fault, way)
    return sorted(messages)


def _longest(name: str, long: dict[str, int], fault: str, way: str) -> list[str]:
    if not long:
        return []
    item = max(long, key=long.__getitem__)
    more = f" ({len(long) - 1} more are too long)" if len(long) > 1 else ""
    return [f"task {name!r} item {item!r}{fault.format(long[item])}{more}; {way}"]


def _texts(row: Json, config: Json, key: str) -> list[str]:
    value = row.get(str(config.get(key)), [])  # nothing where a template makes it
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def _asked(row: Json, config: Json) -> str:
    """What the model reads of an item in one piece, as far as plain columns say it; nothing where a text is rolled through."""
    if config["output_type"] == "loglikelihood_rolling":
        return ""
    choice = max(_texts(row, config, "doc_to_choice"), key=len, default="")
    return "".join(_texts(row, config, "doc_to_text")) + str(config.get("target_delimiter", " ")) * bool(choice) + choice


# ---- memory and disk ---------------------------------------------------------------------------------------------------------
def capacity(settings: Params) -> list[str]:
    """One line for the whole, and one for each stage or disk that is too small; empty if the model is not here yet."""
    folder = base_folder(settings)
    if folder is None:
        return []
    memory = {stage: size / 1e9 for stage, size in memory_by_stage(settings, folder).items()}
    most = max(memory, key=memory.__getitem__)
    have, weights = quota.memory_bytes() / 1e9, 2 * count_weights(folder) / 1e9  # at 16 bits
    need, free = disk_bytes(settings, folder) / 1e9, shutil.disk_usage(Path.cwd()).free / 1e9
    lines = [
        f"the model's {weights / 2:.2f} billion weights: about {need:.1f} GB more on disk ({free:.1f} GB free), "
        f"at most {memory[most]:.1f} GB of memory besides the mapped model, in {most} ({have:.1f} GB here)"
    ]
    if need > free:
        lines.append(f"the disk is too small: about {need:.1f} GB are needed and {free:.1f} GB are free")
    if weights > have:
        lines.append(f"its {weights:.1f} GB at 16 bits are more than the memory: each pass reads them from disk")
    small = [stage for stage, size in memory.items() if size > have]
    fate = "it will be killed; a larger machine can run it (docs/machines.md)"
    return lines + [f"{s} needs about {memory[s]:.1f} GB of memory and {have:.1f} GB are here: {fate}" for s in small]


def memory_by_stage(settings: Params, folder: Path) -> dict[str, float]:
    """{stage: bytes of memory at most}"""
    whole = 2 * count_weights(folder)
    sizes: Counter[str] = Counter()  # weights by layer; "": of all that is in none
    for name, tensor in weights_of(folder).items():
        sizes[(re.match(r"(.*?\.)?\d+\.", name) or [""])[0]] += math.prod(tensor.shape)
    outside = sizes.pop("", 0)
    largest = max(sizes.values(), default=0)
    needed = {"floor": IMPORTS + 4 * (outside + largest)}
    for name, variant in settings.variants.items():
        needed[f"quantize@{name}"] = IMPORTS + COPIES.get(variant.quantizer, 0) * whole + 4 * largest
        if variant.engine in LOADED:
            needed[f"benchmark@{name}"] = LOADED[variant.engine] + variant_bytes(variant, folder)
    return needed


def disk_bytes(settings: Params, folder: Path) -> float:
    """What base and variants will take that are not here yet, and the largest temporary file."""
    new = {n: v for n, v in settings.variants.items() if not (artifacts.model_dir(n) / artifacts.MANIFEST).exists()}
    total = sum(variant_bytes(variant, folder) for variant in new.values())
    if not (artifacts.BASE / artifacts.MANIFEST).exists():
        total += sum(tensor.bytes for tensor in read_headers(folder).values())
    return total + (2 * count_weights(folder) if any(variant.quantizer == "gguf" for variant in new.values()) else 0)


def variant_bytes(variant: Variant, folder: Path) -> float:
    """Bytes of a variant's files: its matrices at its bits and their scales, the rest at 16 or, in ONNX, 32 bits; none where a cast
    has nothing to cast, and links the base's."""
    asked = explain.with_defaults(quantizers.find(variant.quantizer), variant.options, quantizers.GIVEN)
    wanted = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}.get(str(asked.get("dtype")))
    if variant.quantizer == "cast" and {tensor.dtype for tensor in read_headers(folder).values()} == {wanted}:
        return 0.0
    bits = explain.nominal_bits(asked) or 16
    packed = sum(outputs * inputs for outputs, inputs in linear_shapes(folder).values())
    rest = 4 if bits == 32 or variant.engine == "onnxruntime" else 2
    return packed * (bits + (SCALES if bits < 16 else 0)) / 8 + (count_weights(folder) - packed) * rest
