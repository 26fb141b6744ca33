"""How runs get into MLflow: found by the content they were made from, finished or made anew, never left RUNNING.

A run counts once it is FINISHED; what a kill, a crash or a lost server left of one is deleted and written again by the next
`python -m pipeline.track`. Values are sent in batches, with one time for a run, so that a repeated request changes nothing.
No text is sent with a password or key that `secrets` knows.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pipeline.core import artifacts, secrets
from pipeline.core.errors import ArtifactError
from pipeline.runs.reach import reach

KEY = "quantgate.key"
CURRENT = "quantgate.current"
WRITER = "quantgate.writer"
PARAMS, METRICS = 100, 500  # to a request: MLflow takes 100 params and tags, 1000 metrics
LONGEST = 6000  # characters of a param
ABANDONED_S = 3600  # another machine's run this old is no longer being written: writing one takes seconds
Curve = list[tuple[int, float]]  # (step, value)


class Tracker:
    """Writes runs to one MLflow experiment."""

    def __init__(self, uri: str, experiment: str) -> None:
        reach(uri)
        import mlflow

        mlflow.set_tracking_uri(uri)  # the registry looks models up at the global address
        self.client = mlflow.MlflowClient(tracking_uri=uri)
        found = self.client.get_experiment_by_name(experiment)
        if found and found.lifecycle_stage == "deleted":
            way = f"restore it (`mlflow experiments restore --experiment-id {found.experiment_id}`) or name another"
            raise ArtifactError(f"track.experiment {experiment!r} was deleted in MLflow; {way}")
        if found and _is_gone(found.artifact_location):
            why = f"in {found.artifact_location}, which is gone: was a folder moved? Link it to where they are, or name another"
            raise ArtifactError(f"experiment {experiment!r} of MLflow keeps files {why} track.experiment")
        self.experiment = str(found.experiment_id if found else self.client.create_experiment(experiment, _place()))
        self.made = 0
        self._sweep()

    def _sweep(self) -> None:
        """Delete what a dead process left half-written, of whatever state: nobody else will."""
        for run in self.search("attributes.status != 'FINISHED'"):
            if KEY in run.data.tags and not _alive(run):
                self._drop(run)

    def _drop(self, run: Any) -> None:
        if run.info.status == "RUNNING":
            self.client.set_terminated(run.info.run_id, "KILLED")
        self.client.delete_run(run.info.run_id)

    def search(self, wanted: str) -> Iterator[Any]:
        """Every run of the experiment that a filter finds, over all pages."""
        token = None
        while True:
            page = self.client.search_runs([self.experiment], wanted, page_token=token)
            yield from page
            token = page.token
            if not token:
                return

    def find(self, key: str) -> Any:
        """The finished run under a key, or None."""
        return next((r for r in self.search(f"tags.`{KEY}` = '{key}'") if r.info.status == "FINISHED"), None)

    def run(self, key: str, name: str, log: Callable[[str], None], tags: dict[str, str]) -> tuple[str, bool]:
        """(id of the run under a key, whether it was made now); made, and filled by `log(run_id)`, unless it is there."""
        found = self.find(key)
        if found:
            return str(found.info.run_id), False
        tags = {KEY: key, WRITER: writer(), "mlflow.user": user(), **secrets.hide_in(tags)}
        run_id = str(self.client.create_run(self.experiment, run_name=secrets.hide(name), tags=tags).info.run_id)
        try:
            log(run_id)
        except BaseException:
            with contextlib.suppress(Exception):  # a server that went away; the next one to come sweeps
                self.client.set_terminated(run_id, "FAILED")
            raise
        self.client.set_terminated(run_id, "FINISHED")
        return run_id, True

    def log_params(self, run_id: str, values: dict[str, Any]) -> None:
        from mlflow.entities import Param

        for some in _batches(list(values.items()), PARAMS):
            self.client.log_batch(run_id, params=[Param(k, _short(secrets.hide(str(v)))) for k, v in some])

    def log_metrics(self, run_id: str, values: dict[str, float], curves: dict[str, Curve] | None = None) -> None:
        """Values at step 0, and curves at the steps that are their x: a position, a context, so many at once."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        points = [(k, 0, v) for k, v in values.items()]
        points += [(k, step, v) for k, curve in (curves or {}).items() for step, v in curve]
        for some in _batches(points, METRICS):
            self.client.log_batch(run_id, metrics=[Metric(k, float(v), now, step) for k, step, v in some])

    def log_datasets(self, run_id: str, sets: Iterable[dict[str, str]]) -> None:
        """sets: {name, digest (up to 36 characters), source, context, profile} of each."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = [
            DatasetInput(
                Dataset(s["name"], s["digest"], "local", s["source"], profile=s["profile"]),
                [InputTag("mlflow.data.context", s["context"])],
            )
            for s in map(secrets.hide_in, sets)
        ]
        if inputs:
            self.client.log_inputs(run_id, datasets=inputs)

    def log_files(self, run_id: str, files: Iterable[Path], folder: str) -> None:
        """Files as artifacts, passwords and keys hidden in those that are text; those that are not there are left out."""
        for file in filter(Path.exists, files):
            data = file.read_bytes()
            clean = secrets.hide_bytes(data, file.suffix)
            with tempfile.TemporaryDirectory() as work:
                sent = file if clean is data else Path(work) / file.name
                if sent != file:
                    sent.write_bytes(clean)
                self.client.log_artifact(run_id, str(sent), folder)

    def log_dict(self, run_id: str, value: dict[str, Any], name: str) -> None:
        self.client.log_dict(run_id, secrets.hide_in(value), name)

    def set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        self.client.log_batch(run_id, tags=[RunTag(k, secrets.hide(v)) for k, v in tags.items()])


def _place() -> str | None:
    """Where a new experiment keeps its files: MLflow takes the working directory, which may be a copy that goes away."""
    own = artifacts.from_project("mlruns")
    return own.as_uri() if own.is_absolute() else None


def _is_gone(location: str) -> bool:
    """Whether files are kept on this machine, in a folder whose folder is no longer there: MLflow would make it again."""
    place = urlsplit(location)
    return place.scheme in ("", "file") and not Path(unquote(place.path)).parent.parent.exists()


def user() -> str:
    """Who runs this: by name, or by number where the system has none for it, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def writer() -> str:
    """Who writes a run: machine, process, and when that process began, since numbers are given out again."""
    import psutil

    return f"{platform.node()}:{os.getpid()}:{psutil.Process().create_time():.0f}"


def _alive(run: Any) -> bool:
    """Whether a run that is not finished may still be written."""
    import psutil

    node, _, process = run.data.tags.get(WRITER, "::").partition(":")
    pid, _, began = process.partition(":")
    if run.info.status != "RUNNING" or not pid.isdigit():
        return False
    if node != platform.node():
        return bool(time.time() - run.info.start_time / 1000 < ABANDONED_S)
    try:
        return bool(f"{psutil.Process(int(pid)).create_time():.0f}" == began)
    except psutil.Error:
        return False


def _short(text: str) -> str:
    """A param's text within MLflow's limit, and saying so where it was cut."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 40]} ... ({len(text)} characters)"


def _batches(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
