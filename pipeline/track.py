"""track: MLflow runs + reports/mlflow.json; `--promote VARIANT` and `--rollback` move the alias `champion` of the registry.

One parent run per state of the pipeline (every variant's results and verdict), one child run per variant, keyed by the
content of its results: the same state makes no run, a changed option makes one of the variant and one of the new state.
A variant that did not change keeps its run, which moves under the newest state that holds it; comparison.json of an older
state says what it held. What a crash left half-written is made anew by the next `python -m pipeline.track`.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from pipeline.core import artifacts, cli, params
from pipeline.core.droppings import data_files
from pipeline.core.errors import ArtifactError, ParamsError, QuantgateError
from pipeline.core.params import Params
from pipeline.gating import merge
from pipeline.runs import run_content, run_picture, views
from pipeline.runs.reach import without_password
from pipeline.runs.registry import Move, Registry
from pipeline.runs.state import State, compared_files, load_state, model_name, provenance, version_tags
from pipeline.runs.tracking import CURRENT, Tracker

LOCK = artifacts.ARTIFACTS / "track.lock"
WAIT_S = 60  # for another `track` in this folder
PARENT, JUDGED = "mlflow.parentRunId", "quantgate.judged"
AWAY_LOG = (
    "all results are safe in reports/ and artifacts/ (`python -m pipeline.report --summary` shows them): once that is mended, run "
    "`python -m pipeline.track`; where this was a stage of `dvc repro`, the next `dvc repro` does it"
)
AWAY_MOVE = "once that is mended, see there who is champion, and repeat the command if it was not moved"
Done = TypeVar("Done")


def track(settings: Params, uri: str) -> tuple[dict[str, Any], int]:
    """Log every variant's results; returns ({experiment, parent, runs, versions}, number of variants' runs made)."""
    state = load_state(settings)
    tracker = Tracker(uri, settings.track.experiment)
    made_from = provenance(state, settings)
    runs = {name: _child(tracker, state, name, settings, made_from) for name in state.results}
    parent = _parent(tracker, state, settings, made_from, runs)
    _retag(tracker, parent, runs, state, settings)
    versions = Registry(tracker.client, settings.track.experiment).register(
        tracker.experiment, {run: version_tags(state, name, settings) for name, run in runs.items()}
    )
    views.dress(tracker.client, tracker.experiment)
    found = {"experiment": tracker.experiment, "parent": parent, "runs": runs}
    return found | {"versions": {name: versions[run] for name, run in runs.items()}}, tracker.made


def _child(tracker: Tracker, state: State, name: str, settings: Params, made_from: dict[str, str]) -> str:
    """The run of one variant."""
    result = state.results[name]
    folder = artifacts.model_dir(name)
    manifest = artifacts.read_manifest(folder) if (folder / artifacts.MANIFEST).exists() else {}

    def log(run_id: str) -> None:
        tracker.log_params(run_id, run_content.params_of(name, result, manifest, settings))
        tracker.log_metrics(run_id, run_content.flat_metrics(result["metrics"]), run_content.curves(result, state.serving[name]))
        tracker.log_datasets(run_id, run_content.datasets(name))
        tracker.log_files(run_id, [artifacts.metrics(name)], "metrics")
        tracker.log_files(run_id, [folder / artifacts.MANIFEST], "manifest")
        tracker.log_files(run_id, [artifacts.served(name)], "serving")
        made = (artifacts.answers, artifacts.timings, artifacts.tokens, artifacts.generations, artifacts.serving)
        for file in (make(name) for make in made):  # a folder for each kind: they are all called <variant>.jsonl
            tracker.log_files(run_id, [file], f"rows/{file.parent.name}")
        tracker.log_files(run_id, [artifacts.broke(name)], "broke")

    run_id, made = tracker.run(
        state.key_of(name),
        name,
        log,
        {"variant": name, "mlflow.runColor": views.colour(list(state.results).index(name)), **made_from},
    )
    tracker.made += made
    return run_id


def _parent(tracker: Tracker, state: State, settings: Params, made_from: dict[str, str], runs: dict[str, str]) -> str:
    """The run of the whole state; its pages are always the newest, since words may change while results do not."""
    key, verdict = state.key(), state.verdict
    comparison = run_content.comparison(state.results, verdict, settings.reference)
    base = state.results[settings.reference]["base"]

    def log(run_id: str) -> None:
        shared = {f"model.{k}": v for k, v in settings.model.model_dump().items()}
        shared |= {"base": base, "reference": settings.reference, "seed": settings.seed, "tier": settings.tier}
        shared |= run_content.measured_by(settings)
        tracker.log_params(run_id, shared | {"variants": ", ".join(runs), "machine": made_from["machine"]})
        tracker.log_dict(run_id, comparison, "comparison.json")
        tracker.log_dict(run_id, {"runs": runs, "key": key}, "state.json")
        tracker.log_files(run_id, [Path("params.yaml"), Path("dvc.lock")], "made_from")

    name = f"{verdict['verdict']} ({key[:6]}): {model_name(settings)} vs {settings.reference}"  # lists cut a name's end
    tags = {
        "mlflow.note.content": run_content.state_note(state.results, verdict, settings),
        "mlflow.loggedArtifacts": '[{"path": "comparison.json", "type": "table"}]',  # the UI shows it as a table
    }
    run_id, _ = tracker.run(key, name, log, tags)
    tracker.set_tags(run_id, {"verdict": verdict["verdict"], **made_from})
    pages = [artifacts.REPORTS / "report.html", artifacts.REPORTS / "report.md", artifacts.TRADEOFF_TABLE, artifacts.GATE]
    tracker.log_files(run_id, pages, "report")
    tracker.log_files(run_id, data_files(artifacts.REPORTS / "figures", "*"), "figures")
    return run_id


def _retag(tracker: Tracker, parent: str, runs: dict[str, str], state: State, settings: Params) -> None:
    """Which runs are the present state, whose children they are, and how they were judged: results may stay the same."""
    present = {parent: None, **{run: name for name, run in runs.items()}}
    for run in list(tracker.search(f"tags.`{CURRENT}` = 'true'")):
        if run.info.run_id not in present:
            tracker.set_tags(run.info.run_id, {CURRENT: "false"})
    tracker.set_tags(parent, {CURRENT: "true"})
    for name, run_id in runs.items():
        tracker.set_tags(run_id, {PARENT: parent, CURRENT: "true", "verdict": state.word(name, settings.reference)})
        _judge(tracker, run_id, name, state, settings)


def _judge(tracker: Tracker, run_id: str, name: str, state: State, settings: Params) -> None:
    """A run's description and picture of its rules, anew where the rules or the verdict are; a person's words stay till then."""
    if name == settings.reference:  # it has no rules, and a page without any picture looks broken
        tracker.log_files(run_id, [artifacts.REPORTS / "figures/tradeoff.png"], "figures")
    judged = state.verdict["variants"].get(name, {})
    digest = artifacts.digest([judged, settings.compare.confidence])
    if tracker.client.get_run(run_id).data.tags.get(JUDGED) == digest:
        return
    with tempfile.TemporaryDirectory() as work:
        picture = Path(work) / "rules.png"
        if run_picture.draw_rules(name, judged, settings.compare.confidence, picture):
            tracker.log_files(run_id, [picture], "figures")
    note = run_content.variant_note(name, state.verdict, settings.reference)
    tracker.set_tags(run_id, {"mlflow.note.content": note, JUDGED: digest})


# --- the alias ---------------------------------------------------------------------------------------------------


def promote(settings: Params, uri: str, variant: str, *, force: bool, reason: str) -> str:
    """Make a variant the champion; returns what happened, in words.

    Raises `ArtifactError` unless its verdict is PASS and not stale, and its files, where they are here, are those that were
    measured; with `force` it needs a reason instead.
    """
    settings.variant(variant)
    state = load_state(settings)
    word = state.word(variant, settings.reference)
    files, changed = compared_files(state, variant)
    if not force:
        _refuse_unfit(variant, settings, changed)
        word = "PASS"
    tracker = Tracker(uri, settings.track.experiment)
    registry = Registry(tracker.client, settings.track.experiment)
    run = tracker.find(state.key_of(variant))
    version = registry.version_of(run.info.run_id) if run else None
    if version is None:
        raise ArtifactError(f"{variant}'s present results are not in MLflow; run `python -m pipeline.track` first")
    move = registry.promote(version, reason=reason or f"verdict {word}", forced=force, files=files)
    return _told(move) if move else f"{variant} (version {version}) is the champion already; nothing was changed"


def _refuse_unfit(variant: str, settings: Params, changed: str) -> None:
    """Raise unless the variant's verdict, judged as a merge judges it, is PASS and the files are those measured."""
    force, told = "or use --force --reason TEXT", f"{variant} is not promoted"
    try:
        judged = merge.judge(settings).verdict["variants"]
    except QuantgateError as e:
        raise ArtifactError(f"{told}: {e}; {force}") from None
    if variant == settings.reference:
        passing = ", ".join(name for name, v in judged.items() if v["verdict"] == "PASS") or "none at present"
        why = f"it is the reference, which others are judged by and nothing judges; variants with a PASS: {passing}"
        raise ArtifactError(f"{told}: {why}; {force}")
    if (word := judged[variant]["verdict"]) != "PASS":
        raise ArtifactError(f"{told}: its verdict is {word}, not PASS: {judged[variant]['reason']}; mend it, {force}")
    if changed:
        raise ArtifactError(f"{told}: {changed}; run `dvc repro`, {force}")


def rollback(settings: Params, uri: str, reason: str) -> str:
    """Make the champion before the present one champion again; returns what happened, in words."""
    tracker = Tracker(uri, settings.track.experiment)
    return _told(Registry(tracker.client, settings.track.experiment).rollback(reason or "rollback"))


def _told(move: Move) -> str:
    before = f"before: version {move['before']}" if move["before"] else "there was none before"
    told = f"champion is {move['variant']} (version {move['version']}), by {move['how']}; {before}; reason: {move['reason']}"
    return f"{told}; its files: {move['files']}"


# --- command line ------------------------------------------------------------------------------------------------


def main(
    to_promote: Annotated[str, typer.Option("--promote", metavar="VARIANT", help="Make it champion; its verdict must PASS.")] = "",
    back: Annotated[bool, typer.Option("--rollback", help="Make the champion before the present one champion again.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Promote whatever the verdict; needs --reason.")] = False,
    reason: Annotated[str, typer.Option("--reason", help="Why; kept with the move.")] = "",
) -> None:
    """Log the results to MLflow; safe to repeat."""
    _refuse_odd_options(to_promote, back, force, reason)
    settings = params.load()
    uri = os.environ.get("MLFLOW_TRACKING_URI") or settings.track.uri
    uri = re.sub(r"(?<=^sqlite:///)(?!/).*", lambda file: str(artifacts.from_project(file[0])), uri)
    with _alone():
        if to_promote:
            cli.say(
                "track", _safely(uri, lambda: promote(settings, uri, to_promote, force=force, reason=reason.strip()), AWAY_MOVE)
            )
        elif back:
            cli.say("track", _safely(uri, lambda: rollback(settings, uri, reason.strip()), AWAY_MOVE))
        else:
            _log(settings, uri)


def _log(settings: Params, uri: str) -> None:
    watch = artifacts.Stopwatch("track")
    found, made = _safely(uri, lambda: track(settings, uri), AWAY_LOG)
    artifacts.write_json(artifacts.MLFLOW, found)
    told = f"{made} new MLflow runs, {len(found['runs'])} variants under state {found['parent'][:8]}"
    cli.say("track", f"{told}, {watch.done():.1f} s")


def _refuse_odd_options(to_promote: str, back: bool, force: bool, reason: str) -> None:
    if to_promote and back:
        raise ParamsError("--promote and --rollback exclude each other; give one")
    if force and not (to_promote and reason.strip()):
        raise ParamsError("--force goes with --promote VARIANT and --reason TEXT, which is kept with the move")
    if reason and not (to_promote or back):
        raise ParamsError("--reason goes with --promote VARIANT or --rollback")


def _alone() -> Any:
    """One `track` of a folder at a time: two would both find a run missing, and both make it."""
    from filelock import FileLock, Timeout

    artifacts.ARTIFACTS.mkdir(exist_ok=True)
    lock = FileLock(LOCK, timeout=WAIT_S)
    try:
        return lock.acquire()
    except Timeout:
        raise ArtifactError(f"another `python -m pipeline.track` has been running here for over {WAIT_S} s; wait for it") from None


def _safely(uri: str, act: Callable[[], Done], then: str) -> Done:
    """What `act` returns; whatever MLflow, SQLAlchemy or a missing driver raises becomes one line. then: what is safe, what to do.

    It is an error (exit 1) under `dvc repro` too: a stage that were said to be done would not be run again.
    """
    start = time.monotonic()
    try:
        return act()
    except QuantgateError:
        raise
    except Exception as e:
        lines = str(e).strip().splitlines() or [type(e).__name__]
        why = without_password(lines[0])[:200]
        if schemas := re.search(r"found version (\w+), but expected (\w+)", why):
            why = "another MLflow's schema, {} where this one has {}: if that one was older, `mlflow db upgrade`; else install it"
            why = why.format(*schemas.groups())
        hint = "; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" if "401" in why else ""
        hint = f"; pip install {e.name}" if isinstance(e, ModuleNotFoundError) else hint  # boto3, where files go to S3 from here
        raise ArtifactError(
            f"MLflow at {without_password(uri)} could not be written ({why}{hint}; {time.monotonic() - start:.0f} s); {then}"
        ) from None


if __name__ == "__main__":
    cli.run(main)
