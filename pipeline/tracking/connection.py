"""Connect to MLflow and write runs, each found by a digest of its content.

A run counts once it is FINISHED. `Tracker` deletes what a crash left half-written, and the next `quantgate track` writes it again.
A run's values share one timestamp, so that a repeated request changes nothing. All text passes `secrets`.

MLflow itself retries an unreachable server for 247 s, so `check_reachable` asks once and limits MLflow's retries.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pipeline.core import artifacts, secrets
from pipeline.core.errors import ArtifactError

KEY = "quantgate.key"
CURRENT = "quantgate.current"
WRITER = "quantgate.writer"
ABANDONED_S = 3600  # age at which nobody is still writing a run: writing one takes seconds
ANSWER_S = 5  # for the first answer; a loaded server may need longer for later ones
REQUEST_S = 30
LIMITS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(REQUEST_S),
    "AWS_MAX_ATTEMPTS": "2",  # botocore's, if S3 is the artifact store
}
DIGEST = 32  # hexadecimal digits of a dataset's digest; MLflow keeps 36
Curve = list[tuple[int, float]]  # (step, value)
DataSet = tuple[str, str, dict[str, str]]  # name, use, {file: sha256}


def check_reachable(uri: str) -> None:
    """Wait for a server's answer; create a missing sqlite file."""
    for name, value in LIMITS.items():
        os.environ.setdefault(name, value)
    scheme = urlsplit(uri).scheme
    if scheme in ("http", "https"):
        _ask_server(uri)
    elif scheme == "sqlite":
        _create_sqlite(uri)


def _ask_server(uri: str) -> None:
    """Accept any answer, even a refusal: MLflow's own request will say why. Send no password and check no certificate: MLflow has
    its own settings for both."""
    import httpx2

    bare = re.sub(r"://[^/]*@", "://", uri).rstrip("/")
    try:
        httpx2.get(f"{bare}/health", timeout=ANSWER_S, verify=False)
    except httpx2.TimeoutException:
        raise TimeoutError(f"no answer within {ANSWER_S} s") from None
    except httpx2.HTTPError as e:
        if "ssl" not in str(e).lower():
            raise


def _create_sqlite(uri: str) -> None:
    """Create MLflow's tables in a temporary file and rename it: a half-made database could never be opened again."""
    import sqlalchemy

    path = Path(sqlalchemy.make_url(uri).database or "")
    if path.exists():
        return
    from mlflow import MlflowClient

    with artifacts.atomic_file(path) as tmp:
        MlflowClient(tracking_uri=f"sqlite:///{tmp}").search_experiments(max_results=1)


class Tracker:
    """Writes runs to one MLflow experiment. created: the number of new variant runs."""

    def __init__(self, uri: str, experiment: str) -> None:
        check_reachable(uri)
        import mlflow

        mlflow.set_tracking_uri(uri)  # the registry uses the global address
        self.client = mlflow.MlflowClient(tracking_uri=uri)
        existing = self.client.get_experiment_by_name(experiment)
        if existing is None:
            folder = artifacts.from_project("mlruns")  # `dvc exp` works in a temporary copy, where MLflow's default would be lost
            files = folder.as_uri() if folder.is_absolute() else None
            self.experiment = str(self.client.create_experiment(experiment, files))
        elif existing.lifecycle_stage == "deleted":
            way = f"restore it (`mlflow experiments restore --experiment-id {existing.experiment_id}`) or name another"
            raise ArtifactError(f"track.experiment {experiment!r} was deleted in MLflow; {way}")
        elif _is_gone(existing.artifact_location):
            where = f"experiment {experiment!r} of MLflow keeps files in {existing.artifact_location}, which is gone"
            raise ArtifactError(f"{where}; if the folder was moved, link it to the old path, or name another track.experiment")
        else:
            self.experiment = str(existing.experiment_id)
        self.created = 0
        for run in self.search("attributes.status != 'FINISHED'"):  # of any state: what a dead process left
            if KEY in run.data.tags and not is_being_written(run):
                if run.info.status == "RUNNING":
                    self.client.set_terminated(run.info.run_id, "KILLED")
                self.client.delete_run(run.info.run_id)

    def search(self, query: str) -> Iterator[Any]:
        return pages(lambda token: self.client.search_runs([self.experiment], query, page_token=token))

    def find(self, key: str) -> Any:
        """The finished run with this key, or None."""
        return next((r for r in self.search(f"tags.`{KEY}` = '{key}'") if r.info.status == "FINISHED"), None)

    def run(self, key: str, name: str, log: Callable[[str], None], tags: dict[str, str]) -> tuple[str, bool]:
        """(id of the run with this key, whether it is new). A new run is filled by `log(run_id)`."""
        if existing := self.find(key):
            return str(existing.info.run_id), False
        tags = {KEY: key, WRITER: f"{platform.node()}:{os.getpid()}", "mlflow.user": user(), **secrets.hide_in(tags)}
        run_id = str(self.client.create_run(self.experiment, run_name=secrets.hide(name), tags=tags).info.run_id)
        try:
            log(run_id)
        except BaseException:
            with contextlib.suppress(Exception):  # if the server is gone, the next Tracker cleans up
                self.client.set_terminated(run_id, "FAILED")
            raise
        self.client.set_terminated(run_id, "FINISHED")
        return run_id, True

    def log_params(self, run_id: str, values: Mapping[str, object]) -> None:
        from mlflow.entities import Param

        self.client.log_batch(run_id, params=[Param(name, secrets.hide(str(value))) for name, value in values.items()])

    def log_metrics(self, run_id: str, values: dict[str, float], curves: dict[str, Curve] | None = None) -> None:
        """Log values at step 0 and a curve's points at theirs (a position, a context, a concurrency)."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        points = [Metric(name, value, now, 0) for name, value in values.items()]
        points += [Metric(name, value, now, step) for name, curve in (curves or {}).items() for step, value in curve]
        self.client.log_batch(run_id, metrics=points)

    def log_datasets(self, run_id: str, sets: Iterable[DataSet]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = []
        for name, use, files in sets:
            digest, source, profile = artifacts.digest(files)[:DIGEST], json.dumps(sorted(files)), json.dumps({"sha256": files})
            dataset = Dataset(name, digest, "local", source, profile=profile)
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", use)]))
        self.client.log_inputs(run_id, datasets=inputs)

    def log_files(self, run_id: str, files: Iterable[Path], folder: str) -> None:
        """Upload the files that exist, with secrets in text hidden."""
        for file in filter(Path.exists, files):
            data = file.read_bytes()
            clean = secrets.hide_bytes(data, file.suffix)
            with tempfile.TemporaryDirectory() as work:
                sent = file if clean is data else Path(work) / file.name
                if sent != file:
                    sent.write_bytes(clean)
                self.client.log_artifact(run_id, str(sent), folder)

    def log_dict(self, run_id: str, value: Mapping[str, object], name: str) -> None:
        self.client.log_dict(run_id, secrets.hide_in(value), name)

    def set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        self.client.log_batch(run_id, tags=[RunTag(k, secrets.hide(v)) for k, v in tags.items()])


def _is_gone(location: str) -> bool:
    """Whether files are kept on this machine in a folder whose parent is gone: MLflow would create it again."""
    url = urlsplit(location)
    return url.scheme in ("", "file") and not Path(unquote(url.path)).parent.parent.exists()


def pages(search: Callable[[str | None], Any]) -> Iterator[Any]:
    """Items of all pages of an MLflow search by the page's token."""
    yield from (page := search(None))
    while page.token:
        yield from (page := search(page.token))


def user() -> str:
    """The user's name, or number if there is no name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def is_being_written(run: Any) -> bool:
    """Whether a process may still be writing an unfinished run."""
    import psutil

    node, _, pid = run.data.tags.get(WRITER, ":").rpartition(":")
    is_recent = time.time() - run.info.start_time / 1000 < ABANDONED_S
    return bool(run.info.status == "RUNNING" and is_recent and (node != platform.node() or psutil.pid_exists(int(pid))))
