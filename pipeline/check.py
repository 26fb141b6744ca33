"""check: find all faults of params.yaml and the data before any work starts. Its output never changes, so a valid edit of params
reruns only the stages that read the edited key."""

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
from pipeline.metrics.definitions import POSITIONS, TOKEN_PARTS, is_served, timed
from pipeline.model import from_gguf, integrity
from pipeline.preflight import model as preflight_model
from pipeline.preflight import power, room, servers
from pipeline.reporting import smallest
from pipeline.serving import results
from pipeline.speed import hardware, schedule

SCORED = ("acc", "acc_delta", "score_delta", "recovery", "flips_to_wrong", "flips_to_right", "p_mcnemar")
BY_TASK = (*SCORED, "byte_ppl", "byte_ppl_ratio")
IN_PARTS = (*BY_TASK, "acc_depth", "acc_depth_delta")  # without a value as a whole
CHECKED = artifacts.ARTIFACTS / "checked.json"


def faults(settings: Params) -> list[str]:
    """All faults beyond the shape of params.yaml, as messages."""
    messages: list[str] = []

    def collect(where: str, check: Callable[..., object], *args: object) -> None:
        try:
            check(*args)
        except QuantgateError as e:
            messages.append(f"{where}: {e}")

    reference = settings.variants[settings.reference]
    for wrong, why in (
        (reference.engine != "hf", f"runs in {reference.engine!r}; choose one in 'hf': its hidden states are kept"),
        ("speculate" in reference.engine_options, "speculates, and speed-ups would be over its draft's; remove speculate"),
        (engines.packs_cache(reference.engine_options), "quantizes its key-value cache, which is a loss; remove kv"),
    ):
        if wrong:
            messages.append(f"params.yaml: reference {settings.reference!r} {why}")
    for name, v in settings.variants.items():
        if v.engine == "hf" and "speculate" in v.engine_options and engines.packs_cache(v.engine_options):
            messages.append(f"params.yaml: {name}: a quantized cache of hf cannot drop rejected guesses; remove kv or speculate")
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
    texts = {"calibration.set": settings.calibration.set, "benchmark.prompts": settings.benchmark.prompts}
    texts |= {"diverge.corpus": settings.diverge.corpus}
    texts |= {"serving.prompts": settings.serving.prompts} if settings.serving.variants else {}
    for key, file in texts.items():
        collect(f"params.yaml: {key}", evalset.load_texts, Path(file))
    collect("params.yaml: diverge.trajectories.prompts", evalset.load_prompts, prompts)
    messages += servers.faults(settings) + [f"params.yaml: {fault}" for fault in choosing.faults(settings)]
    asked = {task: name for name, tier in settings.tiers.items() for task in tier.tasks}
    local = tasks.local_tasks().keys()
    known = _lm_eval_tasks() if asked.keys() - local else set()
    for task in sorted(local | asked.keys() - known):  # calibration text is compared with all local tasks
        where = f"params.yaml: tiers.{asked[task]}.tasks" if task in asked else "evalsets/tasks"
        collect(where, tasks.load_task, task)
    if not messages:  # these read all files again and would repeat their faults
        source = settings.calibration.set  # `calibrate` checks text from a hub or the model
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
    """Raise `ParamsError` if the part after a metric's slash is missing or will not be measured."""
    stem, _, part = metric.partition("/")
    if is_served(metric):
        servers.check_metric(metric, settings)
        return
    known = [f"{stem}/{name}" for name in _parts(stem, settings)] if part or stem in IN_PARTS else [stem]
    if metric not in known:
        near = did_you_mean(metric, known or [stem])
        raise ParamsError(f"metric {metric!r} is not measured in tier {settings.tier!r}{near}")
    if stem in SCORED and part in tasks.local_tasks():
        kind = tasks.load_task(part)[0]["output_type"]
        if kind == "loglikelihood_rolling":
            raise ParamsError(f"metric {metric!r}: {part} has no right and wrong; use byte_ppl_ratio/{part}")
        if kind == "generate_until" and stem == "score_delta":
            raise ParamsError(f"metric {metric!r}: {part} has no choices; use acc_delta/{part}")


def _parts(stem: str, settings: Params) -> list[str]:
    """The parts in which a metric is measured."""
    amount = settings.amount
    if stem in (*BY_TASK, "truncated"):
        return [*amount.tasks, *(["all"] if stem in BY_TASK else [])]
    if stem in IN_PARTS:
        return [f"{task}:{name}" for task, count in amount.tasks.items() for name in _depths(task, count, settings.seed)]
    if stem in ("kld_mean", "top1_agreement"):
        domains = {row["domain"] for row in evalset.load_texts(Path(settings.diverge.corpus))}
        beyond = {f"position:{name}" for name, (first, _) in POSITIONS.items() if first >= settings.diverge.window}
        return [*sorted(domains), "trajectory", *(part for part in TOKEN_PARTS if part not in beyond)]
    return schedule.published(amount.benchmark).get(stem, [])


def _depths(task: str, count: HowMany, seed: int) -> list[str]:
    """Slices that name a depth among the items of a tier."""
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
    here = hardware.of_timings()[0]
    for rule in settings.gate.rules:
        if rule.machine not in (None, here):
            cli.say("check", f"gate: the limit on {rule.metric} is for machine {rule.machine}, and timings here are of {here}")
        if rule.limit and timed(rule.metric) and not rule.machine:
            cli.say("check", f"gate: the limit on {rule.metric} is for any machine; `machine: {here}` keeps it to this class")
    if not smallest.PAGE.exists():
        artifacts.write_text(smallest.PAGE, smallest.PENDING)
    if not hardware.MACHINE.exists():  # DVC needs it before any stage that measures times
        hardware.note()
    elif machine := hardware.elsewhere():
        cli.say("check", f"timings here are from another machine ({machine}); `make repro` repeats them and keeps quality")
    cli.say("check", f"params.yaml is valid: {len(settings.variants)} variants, {len(settings.gate.rules)} gate rules")


if __name__ == "__main__":
    cli.run(main)
