"""Check params.yaml against the base model's files, wherever they are here."""

from __future__ import annotations

from pathlib import Path

from pipeline import quantizers
from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError, DataError, ParamsError, QuantgateError, Unsupported
from pipeline.core.params import Params, PathModel
from pipeline.engines.llamacpp import LONGEST
from pipeline.evalset import choose, load_prompts
from pipeline.evalset.chats import refuse_chats
from pipeline.preflight.prior_results import is_of
from pipeline.preflight.tasks import lengths, longest, unanswerable


def base_folder(settings: Params) -> Path | None:
    """The folder of the base model's files: its own, or artifacts/base if that is this model; None: not here yet."""
    if isinstance(settings.model, PathModel) and settings.model.folder.suffix != ".gguf":
        return settings.model.folder
    try:
        manifest = artifacts.read_manifest(artifacts.BASE)
    except QuantgateError:  # not downloaded yet
        return None
    return artifacts.BASE if is_of(manifest, settings) and (artifacts.BASE / "config.json").exists() else None


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
    return messages + [f"params.yaml: variants.{name}: {e}" for name, e in refused if not isinstance(e, Unsupported)]


def notes(settings: Params) -> list[str]:
    """Variants that will be `unsupported` or packed in part: a result and no fault, the run goes on."""
    folder = base_folder(settings)
    refused = _refused(settings, folder) if folder else []
    gate = dict.fromkeys(settings.gate.required, ", and it is required: the gate will FAIL")
    unsupported = {n: e for n, e in refused if isinstance(e, Unsupported)}
    lines = [f"variants.{n} will be unsupported: {e}{gate.get(n, '')}" for n, e in unsupported.items()]
    for name, variant in settings.variants.items():
        if folder and name not in unsupported and (why := quantizers.packs_only(variant.quantizer, folder)):
            lines.append(f"variants.{name}: {why}")
    return lines


def _too_long(settings: Params, folder: Path) -> list[str]:
    """Requests, trajectories and windows that are longer than the model's window: each would fail, one after another."""
    amount, most, messages = settings.amount, longest(folder), []
    for section, asked in (("benchmark", amount.benchmark), ("serving", amount.serving if settings.serving.variants else None)):
        if asked and most and asked.prompt_tokens + asked.output_tokens > most:
            lengths_asked = f"{asked.prompt_tokens} prompt and {asked.output_tokens} output tokens"
            where = f"params.yaml: tiers.{settings.tier}.{section}"
            messages.append(f"{where}: {lengths_asked} are more than the model's {most}; ask for fewer")
    if most:
        messages += _long_trajectories(settings, folder, most)
    window = min(settings.diverge.window, most or settings.diverge.window)
    users = [name for name, variant in settings.variants.items() if variant.engine == "llamacpp"]
    if window > LONGEST and users:
        why = f"{window} tokens are more than engine 'llamacpp' reads here ({LONGEST}), for {', '.join(users)}"
        messages.append(f"params.yaml: diverge.window: {why}; lower it")
    return messages


def _long_trajectories(settings: Params, folder: Path, most: int) -> list[str]:
    """The longest trajectory past the model's window. A template can only add to what is counted here."""
    setup = settings.diverge.trajectories
    prompts = choose(load_prompts(Path(setup.prompts)), settings.amount.trajectories, settings.seed)
    texts = {row["id"]: row.get("prompt") or " ".join(m["content"] for m in row["messages"]) for row in prompts}
    near = {name: text for name, text in texts.items() if len(text.encode()) + setup.tokens > most}  # a token has a byte at least
    long = {name: n + setup.tokens for name, n in lengths(near, folder).items() if n + setup.tokens > most}
    if not long:
        return []
    name = max(long, key=long.__getitem__)
    return [
        f"params.yaml: diverge.trajectories: prompt {name!r} and reply have {long[name]} tokens and the model's window is {most}; "
        "lower diverge.trajectories.tokens or shorten the prompt"
    ]


def _refused(settings: Params, folder: Path) -> list[tuple[str, QuantgateError]]:
    """[(variant, why its quantizer does not take the model)]"""
    refused: list[tuple[str, QuantgateError]] = []
    for name, variant in settings.variants.items():
        try:
            quantizers.check_model(variant.quantizer, variant.options, folder)
        except (ParamsError, Unsupported) as e:
            refused.append((name, e))
    return refused
