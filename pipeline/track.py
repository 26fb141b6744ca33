"""track: MLflow runs + reports/mlflow.json; see tracking/. Running it again logs only what is missing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from pipeline.core import artifacts, cli, params, secrets
from pipeline.core.errors import ArtifactError, QuantgateError
from pipeline.core.params import Params
from pipeline.core.records import Tracked
from pipeline.tracking import runs
from pipeline.tracking.connection import Tracker
from pipeline.tracking.registry import Registry

LOCK = artifacts.ARTIFACTS / "track.lock"
WAIT_S = 60  # for another `track` in this folder
LOGGING_FAILED = (
    "all results are safe in reports/ and artifacts/ (`quantgate report --summary` shows them); once MLflow is back, run "
    "`quantgate track`, or `dvc repro` if this was its stage"
)
Done = TypeVar("Done")


def track(settings: Params, uri: str) -> tuple[Tracked, int]:
    """Log all results; returns (ids and versions, number of new variant runs)."""
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


def address(settings: Params) -> str:
    """The tracking URI; a relative database path is the project's, also under `dvc exp run`."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or settings.track.uri
    return re.sub(r"(?<=^sqlite:///)(?!/).*", lambda file: str(artifacts.from_project(file[0])), uri)


def main() -> None:
    """Log the results to MLflow; safe to repeat."""
    settings, watch = params.load(), artifacts.Stopwatch("track")
    uri = address(settings)
    with alone():
        logged, created = reported(uri, LOGGING_FAILED, lambda: track(settings, uri))
        artifacts.write_json(artifacts.MLFLOW, logged)
        counts = f"{created} new MLflow runs, {len(logged['runs'])} variants"
        cli.say("track", f"{counts} under state {logged['parent'][:8]}, {watch.done():.1f} s")


def alone() -> AbstractContextManager[object]:
    """Lock this folder: two `track` at once would both miss a run and both make it."""
    from filelock import FileLock, Timeout

    artifacts.ARTIFACTS.mkdir(exist_ok=True)
    lock = FileLock(LOCK, timeout=WAIT_S)
    try:
        return lock.acquire()
    except Timeout:
        raise ArtifactError(f"another `quantgate track` has been running here for over {WAIT_S} s; wait for it") from None


def reported(uri: str, advice: str, act: Callable[[], Done]) -> Done:
    """Return `act()`; turn any error of MLflow, SQLAlchemy or a missing driver into one line that ends in `advice`. The stage then
    fails under `dvc repro`, too: DVC would not repeat one that succeeded."""
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
        hint = f"; pip install {e.name}" if isinstance(e, ModuleNotFoundError) else hint  # boto3, if files go to S3 from here
        raise ArtifactError(f"cannot write to MLflow at {secrets.hide(uri)} ({why}{hint}); {advice}") from None


if __name__ == "__main__":
    cli.run(main)
