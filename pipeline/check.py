"""check: find everything that can be wrong with params.yaml and the data before any work starts. Its output never changes, so an
edit of params that passes reruns only the stages which read the edited key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline import engines, evalset, quantizers
from pipeline.core import artifacts, cli, params
from pipeline.core.errors import ParamsError, QuantgateError
from pipeline.core.explain import backends, did_you_mean
from pipeline.core.params import HowMany, Params, PathModel, Variant
from pipeline.engines._speculation import drafting_variant
from pipeline.evalset import tasks
from pipeline.evalset.calibration import measured_rows, refuse_overlap
from pipeline.gating.rules import bound_of
from pipeline.layers import choosing
from pipeline.metrics.answers import DEPTH
from pipeline.metrics.definitions import TOKEN_PARTS, is_served, timed
from pipeline.model import from_gguf, integrity
from pipeline.preflight import model as preflight_model
from pipeline.preflight import power, room, servers
from pipeline.reporting import smallest
from pipeline.serving import results
from pipeline.speed import hardware, schedule

SCORED = ("acc", "acc_delta", "score_delta", "recovery", "flips_to_wrong", "flips_to_right", "p_mcnemar")
BY_TASK = (*SCORED, "byte_ppl", "byte_ppl_ratio")
CHECKED = artifacts.ARTIFACTS / "checked.json"


def faults(settings: Params) -> list[str]:
    """All that is wrong beyond the shape of params.yaml, as messages."""
    messages: list[str] = []

    def collect(where: str, check: Callable[..., object], *args: object) -> None:
        try:
            check(*args)
        except QuantgateError as e:
            messages.append(f"{where}: {e}")

    if (engine := settings.variants[settings.reference].engine) != "hf":
        why = "choose one in 'hf': its hidden states are kept"
        messages.append(f"params.yaml: reference {settings.reference!r} runs in {engine!r}; {why}")
    options = settings.variants[settings.reference].engine_options
    if "speculate" in options:
        why = "every speed-up would be one over its draft's; remove speculate from its engine_options"
        messages.append(f"params.yaml: reference {settings.reference!r} speculates; {why}")
    if engines.packs_cache(options):
        why = "what is compared with it would be compared with a loss; remove kv from its engine_options"
        messages.append(f"params.yaml: reference {settings.reference!r} quantizes its key-value cache; {why}")
    for name, v in settings.variants.items():
        if v.engine == "hf" and "speculate" in v.engine_options and engines.packs_cache(v.engine_options):
            messages.append(f"params.yaml: {name}: a packed cache of hf cannot take guesses back; remove kv or speculate")
    if isinstance(settings.model, PathModel):
        collect("params.yaml: model.path", _check_folder, settings.model)
    for name, variant in settings.variants.items():
        where = f"params.yaml: variants.{name}"
        collect(where, quantizers.check, variant.quantizer, variant.options)
        if variant.engine in backends("engines") and variant.quantizer in backends("quantizers"):
            collect(where, quantizers.check_engine, variant.quantizer, variant.engine)
        collect(where, _check_engine, variant, settings)
    for k, rule in enumerate(settings.gate.rules):
        where = f"params.yaml: gate.rules.{k}"
        collect(where, bound_of, rule)
        collect(where, _check_part, rule.metric, settings)
        collect(where, servers.check_rule, rule, settings)
    corpus, prompts = Path(settings.diverge.corpus), Path(settings.diverge.trajectories.prompts)
    collect("params.yaml: calibration.set", evalset.load_texts, Path(settings.calibration.set))
    collect("params.yaml: diverge.corpus", evalset.load_texts, corpus)
    collect("params.yaml: diverge.trajectories.prompts", evalset.load_prompts, prompts)
    messages += servers.faults(settings)
    if settings.serving.variants:
        collect("params.yaml: serving.prompts", evalset.load_texts, Path(settings.serving.prompts))
    collect("params.yaml: benchmark.prompts", evalset.load_texts, Path(settings.benchmark.prompts))
    messages += [f"params.yaml: {fault}" for fault in choosing.faults(settings)]
    asked = {task: name for name, tier in settings.tiers.items() for task in tier.tasks}
    local = tasks.local_tasks().keys()
    known = _lm_eval_tasks() if asked.keys() - local else set()
    for task in sorted(local | asked.keys() - known):  # calibration text is compared with every local task
        where = f"params.yaml: tiers.{asked[task]}.tasks" if task in asked else "evalsets/tasks"
        collect(where, tasks.load_task, task)
    if not messages:  # these read all the files again, and would repeat what is wrong with them
        source = settings.calibration.set  # `calibrate` checks what a hub or the model gives
        measured = measured_rows(corpus, prompts)
        collect("params.yaml: calibration.set", refuse_overlap, evalset.load_texts(Path(source)), measured, source)
        messages += preflight_model.faults(settings)
    return messages


def _check_engine(variant: Variant, settings: Params) -> None:
    engines.check(variant.engine, variant.engine_options)
    if (draft := drafting_variant(variant.engine_options)) and (other := settings.variant(draft).engine) != variant.engine:
        raise ParamsError(f"draft {draft!r} runs in engine {other!r}; name a variant of engine {variant.engine!r}, or ngram")


def _check_folder(model: PathModel) -> None:
    folder = model.folder
    if folder.suffix == ".gguf":
        from_gguf.refuse_absent(folder)
        return
    if not folder.is_dir():
        raise ParamsError(f"{str(folder)!r} is not a folder (looked in {folder.resolve()})")
    integrity.refuse_incomplete(folder, repr(str(folder)))
    integrity.refuse_quantized(integrity.read_object(folder / "config.json"), model.dequantize)


def _check_part(metric: str, settings: Params) -> None:
    """Raise if the part after a metric's slash is missing or will not be measured."""
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
        kind = tasks.load_task(part)[0]["output_type"]
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
    elif stem in ("acc_depth", "acc_depth_delta"):
        known = [f"{task}:{name}" for task, count in settings.amount.tasks.items() for name in _depths(task, count, settings.seed)]
        if part not in known:
            raise ParamsError(f"metric {metric!r}: give a task and a depth that the tier asks for{did_you_mean(part, known)}")
    elif part and stem not in BY_TASK:
        raise ParamsError(f"metric {metric!r}: {stem} has no parts; write {stem!r}")


def _depths(task: str, count: HowMany, seed: int) -> list[str]:
    """Slices that name a depth, of the items that a tier asks for."""
    rows = tasks.load_task(task)[1] if task in tasks.local_tasks() else []
    return sorted({name for k in tasks.subset(len(rows), count, seed) if DEPTH.search(name := str(rows[k].get("slice")))})


def _lm_eval_tasks() -> set[str]:
    from lm_eval.tasks import TaskManager

    return set(TaskManager().all_tasks)


def main() -> None:
    """Check params.yaml and every data file it names."""
    settings = params.load()
    if messages := faults(settings):
        raise ParamsError("\n       ".join(messages))
    artifacts.write_json(CHECKED, {"status": "ok"})
    results.write_asked(settings)
    for line in power.lines(settings) + servers.inconclusive(settings):
        cli.say("power", line)
    for line in preflight_model.notes(settings) + servers.unsupported(settings) + room.capacity(settings):
        cli.say("check", line)
    for rule in settings.gate.rules:
        if rule.limit and timed(rule.metric) and not rule.machine:
            cli.say("check", f"gate: the limit on {rule.metric} judges any machine; machine: NAME of {hardware.MACHINE} binds it")
    if not smallest.PAGE.exists():
        artifacts.write_text(smallest.PAGE, smallest.PENDING)
    if not hardware.MACHINE.exists():  # DVC asks for it before a stage that times could write it
        hardware.note()
    elif machine := hardware.elsewhere():
        cli.say("check", f"timings here are of another machine ({machine}); `make repro` times again, and keeps quality")
    cli.say("check", f"params.yaml is valid: {len(settings.variants)} variants, {len(settings.gate.rules)} gate rules")


if __name__ == "__main__":
    cli.run(main)
