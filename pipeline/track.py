"""track: MLflow runs + reports/mlflow.json; `--promote VARIANT` and `--rollback` move the alias `champion` of the registry.

pipeline/tracking/ says what is logged. Running it again is always safe: it logs what is missing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated, TypeVar

import typer

from pipeline.core import artifacts, cli, params, secrets
from pipeline.core.errors import ArtifactError, ParamsError, QuantgateError
from pipeline.core.params import Params
from pipeline.core.records import Tracked
from pipeline.gating import verdicts
from pipeline.tracking import runs
from pipeline.tracking.connection import Tracker
from pipeline.tracking.registry import Move, Registry

LOCK = artifacts.ARTIFACTS / "track.lock"
WAIT_S = 60  # for another `track` in this folder
LOGGING_FAILED = (
    "all results are safe in reports/ and artifacts/ (`python -m pipeline.report --summary` shows them); once MLflow is back, run "
    "`python -m pipeline.track`, or `dvc repro` if this was its stage"
)
MOVING_FAILED = "once MLflow is back, look there who is champion, and repeat the command if it was not moved"
Done = TypeVar("Done")


def track(settings: Params, uri: str) -> tuple[Tracked, int]:
    """Log every variant's results; returns (what is tracked, number of new variant runs)."""
    state = runs.load_state(settings)
    tracker = Tracker(uri, settings.track.experiment)
    made_from = runs.provenance(state)
    children = {name: runs.log_variant(tracker, state, name, settings, made_from) for name in state.results}
    parent = runs.log_state(tracker, state, settings, made_from, children)
    runs.mark_current(tracker, parent, children, state)
    tags = {run: runs.version_tags(state, name) for name, run in children.items()}
    by_run = Registry(tracker.client, settings.track.experiment).register(tracker.experiment, tags)
    runs.describe_experiment(tracker.client, tracker.experiment)
    versions = {name: by_run[run] for name, run in children.items()}
    return {"experiment": tracker.experiment, "parent": parent, "runs": children, "versions": versions}, tracker.created


def promote(settings: Params, uri: str, variant: str, *, force: bool, reason: str) -> str:
    """Make a variant the champion; returns a sentence about what happened. Without `force`, raises `ArtifactError` unless its
    verdict is PASS and not stale."""
    settings.variant(variant)
    state = runs.load_state(settings)
    if not force:
        _check_promotable(variant, settings)
    tracker = Tracker(uri, settings.track.experiment)
    registry = Registry(tracker.client, settings.track.experiment)
    run = tracker.find(state.variant_key(variant))
    version = registry.version_of(run.info.run_id) if run else None
    if version is None:
        raise ArtifactError(f"{variant}'s current results are not in MLflow; run `python -m pipeline.track` first")
    move = registry.promote(version, reason=reason or "verdict PASS", forced=force)
    return _sentence(move) if move else f"{variant} (version {version}) is already the champion; nothing changed"


def _check_promotable(variant: str, settings: Params) -> None:
    """Raise unless the variant's verdict, judged as a merge judges it, is PASS."""
    force, refused = "or use --force --reason TEXT", f"{variant} is not promoted"
    try:
        judged = verdicts.for_merge(settings).verdict["variants"]
    except QuantgateError as e:
        raise ArtifactError(f"{refused}: {e}; {force}") from None
    if variant == settings.reference:
        passing = ", ".join(name for name, v in judged.items() if v["verdict"] == "PASS") or "none at present"
        why = f"it is the reference, which others are judged by and nothing judges; variants with a PASS: {passing}"
        raise ArtifactError(f"{refused}: {why}; {force}")
    if (word := judged[variant]["verdict"]) != "PASS":
        raise ArtifactError(f"{refused}: its verdict is {word}, not PASS: {judged[variant]['reason']}; mend it, {force}")


def rollback(settings: Params, uri: str, reason: str) -> str:
    """Make the previous champion champion again; returns a sentence about what happened."""
    tracker = Tracker(uri, settings.track.experiment)
    return _sentence(Registry(tracker.client, settings.track.experiment).rollback(reason or "rollback"))


def _sentence(move: Move) -> str:
    before = f"before: version {move['before']}" if move["before"] else "the first champion"
    return f"champion is {move['variant']} (version {move['version']}), by {move['how']}; {before}; reason: {move['reason']}"


def main(
    to_promote: Annotated[str, typer.Option("--promote", metavar="VARIANT", help="Make it champion; its verdict must PASS.")] = "",
    back: Annotated[bool, typer.Option("--rollback", help="Make the previous champion champion again.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Promote whatever the verdict; needs --reason.")] = False,
    reason: Annotated[str, typer.Option("--reason", help="Kept with the move.")] = "",
) -> None:
    """Log the results to MLflow; safe to repeat."""
    if to_promote and back:
        raise ParamsError("--promote and --rollback exclude each other; give one")
    if force and not (to_promote and reason.strip()):
        raise ParamsError("--force goes with --promote VARIANT and --reason TEXT, which is kept with the move")
    if reason and not (to_promote or back):
        raise ParamsError("--reason goes with --promote VARIANT or --rollback")
    settings, why = params.load(), reason.strip()
    uri = os.environ.get("MLFLOW_TRACKING_URI") or settings.track.uri
    uri = re.sub(r"(?<=^sqlite:///)(?!/).*", lambda file: str(artifacts.from_project(file[0])), uri)
    with _alone():
        if to_promote:
            sentence = _reported(uri, MOVING_FAILED, lambda: promote(settings, uri, to_promote, force=force, reason=why))
        elif back:
            sentence = _reported(uri, MOVING_FAILED, lambda: rollback(settings, uri, why))
        else:
            watch = artifacts.Stopwatch("track")
            logged, created = _reported(uri, LOGGING_FAILED, lambda: track(settings, uri))
            artifacts.write_json(artifacts.MLFLOW, logged)
            counts = f"{created} new MLflow runs, {len(logged['runs'])} variants"
            sentence = f"{counts} under state {logged['parent'][:8]}, {watch.done():.1f} s"
        cli.say("track", sentence)


def _alone() -> AbstractContextManager[object]:
    """Lock this folder: two `track` at once would both find a run missing and both make it."""
    from filelock import FileLock, Timeout

    artifacts.ARTIFACTS.mkdir(exist_ok=True)
    lock = FileLock(LOCK, timeout=WAIT_S)
    try:
        return lock.acquire()
    except Timeout:
        raise ArtifactError(f"another `python -m pipeline.track` has been running here for over {WAIT_S} s; wait for it") from None


def _reported(uri: str, advice: str, act: Callable[[], Done]) -> Done:
    """Return `act()`; turn whatever MLflow, SQLAlchemy or a missing driver raises into one line that ends in `advice`. The stage
    exits 1 under `dvc repro` too: DVC would not repeat a stage that succeeded."""
    try:
        return act()
    except QuantgateError:
        raise
    except Exception as e:
        lines = str(e).strip().splitlines() or [type(e).__name__]
        why = secrets.hide(lines[0])[:200]
        if schemas := re.search(r"found version (\w+), but expected (\w+)", why):
            why = "another MLflow's schema, {} where this one has {}: if that one was older, `mlflow db upgrade`; else install it"
            why = why.format(*schemas.groups())
        hint = "; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" if "401" in why else ""
        hint = f"; pip install {e.name}" if isinstance(e, ModuleNotFoundError) else hint  # boto3, where files go to S3 from here
        raise ArtifactError(f"cannot write to MLflow at {secrets.hide(uri)} ({why}{hint}); {advice}") from None


if __name__ == "__main__":
    cli.run(main)
