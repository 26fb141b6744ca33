"""Check params.yaml against the base model's files, wherever they are here: what it does not take. No weights are read."""

from __future__ import annotations

from pathlib import Path

from pipeline import engines, quantizers
from pipeline.core import artifacts, records
from pipeline.core.errors import ArtifactError, DataError, ParamsError, QuantgateError, Unsupported
from pipeline.core.params import HowMany, Params, PathModel
from pipeline.core.records import BaseManifest, Json
from pipeline.engines.llamacpp import LONGEST
from pipeline.evalset import choose, load_prompts
from pipeline.evalset.tasks import TASKS, is_chat, load_task, local_tasks, subset
from pipeline.evalset.windows import refuse_chats, why_not
from pipeline.model.config import text_config, window

IDENTITY = ("source", "package", "file", "sha256", "path", "id")  # what params and a base's manifest both say of a model
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
