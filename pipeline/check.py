"""check: everything that can be wrong with params.yaml and the data is found here, before any work starts.

It is the first stage of dvc.yaml and every other follows it. What it writes never changes, so that an edit of params
that passes reruns only the stages which read the edited key.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from pipeline import artifacts, cli, engines, evalset, params, quantizers
from pipeline.calibration import overlap
from pipeline.errors import ParamsError, QuantgateError
from pipeline.explain import did_you_mean
from pipeline.params import Params, PathModel
from pipeline.rules import bound_of

BY_TASK = (
    "acc", "acc_delta", "recovery", "flips_to_wrong", "flips_to_right", "p_mcnemar", "byte_ppl", "byte_ppl_ratio",
)  # fmt: skip
OUTPUT_TYPES = ("multiple_choice", "generate_until", "loglikelihood_rolling", "loglikelihood")
CHECKED = artifacts.ARTIFACTS / "checked.json"


def faults(settings: Params) -> list[str]:
    """All that is wrong beyond the shape of params.yaml, as messages."""
    found: list[str] = []

    def collect(where: str, check: object, *args: object) -> None:
        try:
            check(*args)  # type: ignore[operator]
        except QuantgateError as e:
            found.append(f"{where}: {e}")

    if settings.seed < 0:
        found.append(f"params.yaml: seed = {settings.seed}: must not be negative")
    if isinstance(settings.model, PathModel):
        collect("params.yaml: model.path", _check_folder, Path(settings.model.path).expanduser())
    for name, variant in settings.variants.items():
        collect(f"params.yaml: variants.{name}", quantizers.check, variant.quantizer, variant.options)
        collect(f"params.yaml: variants.{name}", engines.check, variant.engine, variant.engine_options)
    for k, rule in enumerate(settings.gate.rules):
        collect(f"params.yaml: gate.rules.{k}", bound_of, rule)
        collect(f"params.yaml: gate.rules.{k}", _check_part, rule.metric, settings)
    collect("params.yaml: calibration.set", evalset.load_texts, Path(settings.calibration.set))
    collect("params.yaml: diverge.corpus", evalset.load_texts, Path(settings.diverge.corpus))
    collect("params.yaml: diverge.trajectories.prompts", evalset.load_prompts, Path(settings.diverge.trajectories.prompts))
    collect("params.yaml: benchmark.prompts", evalset.load_texts, Path(settings.benchmark.prompts))
    theirs = set(settings.evaluate.tasks) - evalset.local_tasks().keys()
    known = _lm_eval_tasks() if theirs else set()
    for task in settings.evaluate.tasks:
        if task not in known:
            collect("params.yaml: evaluate.tasks", _check_task, task)
    if not found:  # it reads all of these files again, and would only repeat what is wrong with them
        collect("params.yaml: calibration.set", _check_overlap, settings)
    return found


def _check_folder(folder: Path) -> None:
    """Raise unless a local model folder holds a model."""
    if not folder.is_dir():
        raise ParamsError(f"{str(folder)!r} is not a folder (looked in {folder.resolve()})")
    if not (folder / "config.json").exists() or not list(folder.glob("*.safetensors")):
        raise ParamsError(f"{str(folder)!r} holds no config.json with .safetensors weights; is it a transformers model folder?")


def _check_task(name: str) -> None:
    """Raise unless a local task is sound; its YAML must be a mapping of an output type that lm-eval has."""
    path = evalset.local_tasks().get(name)
    if path is not None:
        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as e:
            raise ParamsError(f"{path} is not valid YAML: {e}") from None
        kind = config.get("output_type") if isinstance(config, dict) else None
        if kind not in OUTPUT_TYPES:
            raise ParamsError(f"{path}: output_type {kind!r}{did_you_mean(str(kind), list(OUTPUT_TYPES))}")
    evalset.load_task(name)


def _check_part(metric: str, settings: Params) -> None:
    """Raise if what stands after a metric's slash will not be there, or is missing."""
    stem, _, part = metric.partition("/")
    tasks = [*settings.evaluate.tasks, "all"]
    if stem in BY_TASK and part not in tasks:
        raise ParamsError(f"metric {metric!r}: give one of the tasks, such as '{stem}/all'{did_you_mean(part, tasks)}")
    if part and stem == "kld_mean":
        domains = [*sorted({row["domain"] for row in evalset.load_texts(Path(settings.diverge.corpus))}), "trajectory"]
        if part not in domains:
            raise ParamsError(f"metric {metric!r}: no such domain{did_you_mean(part, domains)}")
    elif part and stem not in BY_TASK:
        raise ParamsError(f"metric {metric!r}: {stem} has no parts; write {stem!r}")


def _check_overlap(settings: Params) -> None:
    """Raise if calibration text is also measured on."""
    own = evalset.load_texts(Path(settings.calibration.set))
    measured = evalset.load_texts(Path(settings.diverge.corpus))
    measured += evalset.load_prompts(Path(settings.diverge.trajectories.prompts))
    local = evalset.local_tasks()
    for task in settings.evaluate.tasks:
        measured += evalset.load_task_rows(task) if task in local else []
    shared = overlap(own, measured)
    if shared:
        more = f" and {len(shared) - 3} more" if len(shared) > 3 else ""
        raise ParamsError(f"{settings.calibration.set} overlaps what is measured: {'; '.join(shared[:3])}{more}")


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
    cli.say("check", f"params.yaml is sound: {len(settings.variants)} variants, {len(settings.gate.rules)} gate rules")


if __name__ == "__main__":
    cli.run(main)
