"""check: everything that can be wrong with params.yaml and the data is found here, before any work starts.

It is the first stage of dvc.yaml and every other follows it. What it writes never changes, so that an edit of params
that passes reruns only the stages which read the edited key.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

from pipeline import engines, evalset, quantizers
from pipeline.core import artifacts, cli, params
from pipeline.core.droppings import data_files
from pipeline.core.errors import ParamsError, QuantgateError
from pipeline.core.explain import did_you_mean
from pipeline.core.params import Params, PathModel, Tier
from pipeline.evalset import tasks
from pipeline.evalset.overlap import measured_rows, refuse_overlap
from pipeline.gating.rules import bound_of
from pipeline.metrics.definitions import TOKEN_PARTS, is_served
from pipeline.model import from_gguf, integrity
from pipeline.preflight import capacity, power, servers
from pipeline.preflight import model as preflight_model
from pipeline.serving import results
from pipeline.speed import hardware, schedule

SCORED = ("acc", "acc_delta", "score_delta", "recovery", "flips_to_wrong", "flips_to_right", "p_mcnemar")
BY_TASK = (*SCORED, "byte_ppl", "byte_ppl_ratio")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
CHECKED = artifacts.ARTIFACTS / "checked.json"


def faults(settings: Params) -> list[str]:
    """All that is wrong beyond the shape of params.yaml, as messages."""
    found: list[str] = []

    def collect(where: str, check: object, *args: object) -> None:
        try:
            check(*args)  # type: ignore[operator]
        except QuantgateError as e:
            found.append(f"{where}: {e}")

    if (engine := settings.variants[settings.reference].engine) != "hf":
        why = "choose one in 'hf': its hidden states are kept"
        found.append(f"params.yaml: reference {settings.reference!r} runs in {engine!r}; {why}")
    if isinstance(settings.model, PathModel):
        collect("params.yaml: model.path", _check_folder, settings.model)
    for name, variant in settings.variants.items():
        collect(f"params.yaml: variants.{name}", quantizers.check, variant.quantizer, variant.options)
        if variant.engine in engines.names() and variant.quantizer in quantizers.names():
            collect(f"params.yaml: variants.{name}", quantizers.check_engine, variant.quantizer, variant.engine)
        collect(f"params.yaml: variants.{name}", engines.check, variant.engine, variant.engine_options)
    for k, rule in enumerate(settings.gate.rules):
        collect(f"params.yaml: gate.rules.{k}", bound_of, rule)
        collect(f"params.yaml: gate.rules.{k}", _check_part, rule.metric, settings)
        collect(f"params.yaml: gate.rules.{k}", servers.check_rule, rule, settings)
    collect("params.yaml: calibration.set", evalset.load_texts, Path(settings.calibration.set))
    collect("params.yaml: diverge.corpus", evalset.load_texts, Path(settings.diverge.corpus))
    collect("params.yaml: diverge.trajectories.prompts", evalset.load_prompts, Path(settings.diverge.trajectories.prompts))
    found += servers.faults(settings)
    if settings.serving.variants:
        collect("params.yaml: serving.prompts", evalset.load_texts, Path(settings.serving.prompts))
    collect("params.yaml: benchmark.prompts", evalset.load_texts, Path(settings.benchmark.prompts))
    found += _tier_faults(settings)
    asked = {task: name for name, tier in settings.tiers.items() for task in tier.tasks}
    known = _lm_eval_tasks() if asked.keys() - tasks.local_tasks().keys() else set()
    for task, tier_name in asked.items():
        if task not in known or task in tasks.local_tasks():
            collect(f"params.yaml: tiers.{tier_name}.tasks", tasks.load_task, task)
    for task in tasks.local_tasks().keys() - asked.keys():  # calibration text is compared with every task that is here
        collect("evalsets/tasks", tasks.load_task, task)
    if not found:  # it reads all of these files again, and would only repeat what is wrong with them
        collect("params.yaml: calibration.set", _check_overlap, settings)
        found += preflight_model.faults(settings)
    return found


def _check_folder(model: PathModel) -> None:
    """Raise unless a local model folder holds a model, and one that is not packed or is to be dequantized."""
    folder = model.folder
    if folder.suffix == ".gguf":
        from_gguf.refuse_absent(folder)
        return
    if not folder.is_dir():
        raise ParamsError(f"{str(folder)!r} is not a folder (looked in {folder.resolve()})")
    if not (folder / "config.json").exists():
        raise ParamsError(f"{str(folder)!r} holds no config.json; is it a transformers model folder?")
    integrity.refuse_quantized(integrity.read_object(folder / "config.json"), model.dequantize)
    if data_files(folder, "*.safetensors"):
        return
    pickled = sorted(f.name for pattern in PICKLED for f in data_files(folder, pattern))
    if pickled:
        raise ParamsError(
            f"{str(folder)!r} holds no .safetensors weights, and pickled ones ({pickled[0]}) are not loaded; "
            "convert them with transformers' save_pretrained"
        )
    raise ParamsError(f"{str(folder)!r} holds a config.json and no .safetensors weights; add them, or correct the path")


def _tier_faults(settings: Params) -> list[str]:
    """Where a later tier measures less of something than an earlier one; a task may be in one of them only."""
    found = []
    pairs = list(settings.tiers.items())
    for (small, less), (large, more) in itertools.pairwise(pairs):
        for what, count in _counts(less).items():
            if _number(_counts(more).get(what, "all")) < _number(count):
                found.append(
                    f"params.yaml: tiers.{large}.{what} = {_counts(more).get(what)!r} is less than tiers.{small}'s {count!r}; "
                    "tiers stand from small to large, and each is part of the next"
                )
    return found


def more_than_there(settings: Params) -> list[str]:
    """Where a tier asks for more than a set holds, in words: all of it is measured, which is no fault."""
    there = {f"tasks.{name}": len(tasks.load_task(name)[1]) for name in _asked(settings) & tasks.local_tasks().keys()}
    there["documents"] = len(evalset.load_texts(Path(settings.diverge.corpus)))
    there["trajectories"] = len(evalset.load_prompts(Path(settings.diverge.trajectories.prompts)))
    return [
        f"tiers.{name}.{what} = {count} is more than there is: all {there[what]} are taken"
        for name, tier in settings.tiers.items()
        for what, count in _counts(tier).items()
        if isinstance(count, int) and count > there.get(what, math.inf)
    ]


def _asked(settings: Params) -> set[str]:
    return {task for tier in settings.tiers.values() for task in tier.tasks}


def _counts(tier: Tier) -> dict[str, params.HowMany]:
    named = {f"tasks.{name}": count for name, count in tier.tasks.items()}
    return named | {"documents": tier.documents, "trajectories": tier.trajectories}


def _number(count: params.HowMany) -> float:
    return math.inf if isinstance(count, str) else count


def _check_part(metric: str, settings: Params) -> None:
    """Raise if what stands after a metric's slash will not be there, or is missing."""
    stem, _, part = metric.partition("/")
    parts = [*settings.amount.tasks, "all"]
    if is_served(metric):
        servers.check_metric(metric, settings)
        return
    if stem == "truncated" and part in ("", *settings.amount.tasks):
        return
    if stem in BY_TASK and part not in parts:
        raise ParamsError(f"metric {metric!r}: give one of the tier's tasks, such as '{stem}/all'{did_you_mean(part, parts)}")
    if stem in SCORED and part in tasks.local_tasks():
        kind = tasks.load_task(part)[0].get("output_type")
        if kind == "loglikelihood_rolling":
            raise ParamsError(f"metric {metric!r}: {part} has no right and wrong; use byte_ppl_ratio/{part}")
        if kind == "generate_until" and stem == "score_delta":
            raise ParamsError(f"metric {metric!r}: {part} has no choices; use acc_delta/{part}")
    if part and stem in ("kld_mean", "top1_agreement"):
        domains = [*sorted({row["domain"] for row in evalset.load_texts(Path(settings.diverge.corpus))}), "trajectory"]
        if part not in domains and part not in TOKEN_PARTS:
            raise ParamsError(f"metric {metric!r}: no such domain or part{did_you_mean(part, [*domains, *TOKEN_PARTS])}")
        first = part.removeprefix("position:").partition("-")[0]
        if part.startswith("position:") and int(first) >= settings.diverge.window:
            raise ParamsError(f"metric {metric!r}: no token has {first} before it in windows of {settings.diverge.window} tokens")
    elif part and (timed := schedule.published(settings.amount.benchmark).get(stem)):
        if part not in timed:
            raise ParamsError(f"metric {metric!r}: the tier's benchmark has no such part{did_you_mean(part, timed)}")
    elif part and stem not in BY_TASK:
        raise ParamsError(f"metric {metric!r}: {stem} has no parts; write {stem!r}")


def _check_overlap(settings: Params) -> None:
    """Raise if calibration text is also measured on; what a hub or the model gives is looked at by `calibrate`."""
    measured = measured_rows(Path(settings.diverge.corpus), Path(settings.diverge.trajectories.prompts))
    refuse_overlap(evalset.load_texts(Path(settings.calibration.set)), measured, settings.calibration.set)


def _lm_eval_tasks() -> set[str]:
    """Names of lm-eval's own tasks; its index takes some seconds, so it is asked only for names that are not ours."""
    from lm_eval.tasks import TaskManager

    return set(TaskManager().all_tasks)


def main() -> None:
    """Check params.yaml and every data file it names."""
    settings = params.load()
    found = faults(settings)
    if found:
        raise ParamsError("\n       ".join(found))
    artifacts.write_json(CHECKED, {"status": "ok"})
    results.write_asked(settings)
    for line in power.told(settings):
        cli.say("power", line)
    for line in (
        more_than_there(settings) + preflight_model.told(settings) + servers.unsupported(settings) + capacity.told(settings)
    ):
        cli.say("check", line)
    for line in servers.inconclusive(settings):
        cli.say("power", line)
    if not hardware.MACHINE.exists():  # DVC asks for it before a stage that times could write it
        hardware.note()
    elif machine := hardware.elsewhere():
        cli.say("check", f"timings here are of another machine ({machine}); `make repro` times again, and keeps quality")
    cli.say("check", f"params.yaml is sound: {len(settings.variants)} variants, {len(settings.gate.rules)} gate rules")


if __name__ == "__main__":
    cli.run(main)
