"""track: MLflow runs + reports/mlflow.json. The only file that imports mlflow.

One parent run per base model, reference and experiment; one child run per variant, keyed by the content of its metrics.
The same state makes no second run, a changed option makes one, and a run that a crash left half-written is finished by
the next `python -m pipeline.track`, because whatever is not FINISHED under its key is deleted and written again.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from pipeline import artifacts, cli, params
from pipeline.errors import ArtifactError, QuantgateError
from pipeline.params import Params

KEY = "quantgate.key"
CURRENT = "quantgate.current"


class Tracker:
    """Writes runs to one MLflow experiment."""

    def __init__(self, uri: str, experiment: str) -> None:
        # an unreachable server would otherwise block for minutes; results are safe on disk, so fail within seconds
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
        from mlflow import MlflowClient

        self.client = MlflowClient(tracking_uri=uri)
        found = self.client.get_experiment_by_name(experiment)
        self.experiment = found.experiment_id if found else self.client.create_experiment(experiment)
        self.made = 0

    def find(self, key: str) -> Any:
        """The finished run under a key, or None; half-written ones are deleted."""
        done = None
        for run in self.client.search_runs([self.experiment], f"tags.`{KEY}` = '{key}'"):
            if run.info.status == "FINISHED":
                done = run
            else:
                self.client.delete_run(run.info.run_id)
        return done

    def run(self, key: str, name: str, log: Any, tags: dict[str, str]) -> str:
        """Id of the run under a key; made, and filled by `log(run_id)`, unless it is there already."""
        found = self.find(key)
        if found:
            return str(found.info.run_id)
        run_id = str(self.client.create_run(self.experiment, run_name=name, tags={KEY: key, **tags}).info.run_id)
        try:
            log(run_id)
        except BaseException:
            self.client.set_terminated(run_id, "FAILED")
            raise
        self.client.set_terminated(run_id, "FINISHED")
        self.made += 1
        return run_id

    def log_params(self, run_id: str, values: dict[str, Any]) -> None:
        from mlflow.entities import Param

        self.client.log_batch(run_id, params=[Param(k, str(v)[:6000]) for k, v in values.items()])

    def log_metrics(self, run_id: str, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self.client.log_batch(run_id, metrics=[Metric(k, float(v), now, 0) for k, v in values.items()])

    def log_files(self, run_id: str, files: list[Path], folder: str) -> None:
        for file in files:
            if file.exists():
                self.client.log_artifact(run_id, str(file), folder)


def flat_metrics(metrics: dict[str, dict[str, Any]]) -> dict[str, float]:
    """{name: value} with `_low` and `_high` beside; unknown values are left out, since MLflow would show them as 0.

    A bound goes before the slash: kld_mean_low/news. Two names that would collide raise.
    """
    flat: dict[str, float] = {}
    for name, metric in metrics.items():
        stem, _, task = name.partition("/")
        for suffix, key in (("", "value"), ("_low", "low"), ("_high", "high")):
            full = f"{stem}{suffix}/{task}" if task else f"{stem}{suffix}"
            if full in flat:
                raise ArtifactError(f"two metrics would both be called {full!r} in MLflow")
            if metric[key] is not None:
                flat[full] = float(metric[key])
    return flat


def track(settings: Params, uri: str) -> tuple[dict[str, Any], int]:
    """Log every variant's results; returns ({parent, runs, experiment}, number of runs made)."""
    results = {name: artifacts.read_json(artifacts.metrics(name)) for name in settings.variants}
    verdict = artifacts.read_json(artifacts.GATE)
    tracker = Tracker(uri, settings.track.experiment)
    reference = results[settings.reference]
    context = {"base": reference["base"], "reference": settings.reference}
    parent = tracker.run(
        artifacts.digest(context),
        f"{settings.model.source} model {reference['base'][:8]} vs {settings.reference}",
        lambda run_id: tracker.log_params(run_id, {**settings.model.model_dump(), **context, "seed": settings.seed}),
        {"mlflow.note.content": "Each child run is one variant. Their metrics are differences to the reference."},
    )
    runs = {name: _child(tracker, parent, name, result, settings) for name, result in results.items()}
    _retag(tracker, parent, runs, verdict)
    for file in (artifacts.REPORTS / "report.html", artifacts.REPORTS / "report.md", artifacts.TRADEOFF_TABLE, artifacts.GATE):
        tracker.log_files(parent, [file], "report")
    tracker.log_files(parent, sorted((artifacts.REPORTS / "figures").glob("*")), "figures")
    return {"experiment": tracker.experiment, "parent": parent, "runs": runs}, tracker.made


def _child(tracker: Tracker, parent: str, name: str, result: dict[str, Any], settings: Params) -> str:
    """The run of one variant, keyed by what defines it and what was measured."""

    def log(run_id: str) -> None:
        tracker.log_params(run_id, {
            "variant": name, "quantizer": result["quantizer"], "engine": result["engine"], "status": result["status"],
            **{f"options.{k}": v for k, v in result["options"].items()},
            "model": result["model"], "seed": settings.seed, "versions": result["versions"], "machine": result["machine"],
        })  # fmt: skip
        tracker.log_metrics(run_id, flat_metrics(result["metrics"]))
        tracker.log_files(run_id, [artifacts.metrics(name)], "metrics")
        tracker.log_files(run_id, [artifacts.model_dir(name) / artifacts.MANIFEST], "manifest")
        rows = [artifacts.answers(name), artifacts.timings(name), artifacts.tokens(name), artifacts.generations(name)]
        for file in rows:  # a folder for each kind: they are all called <variant>.jsonl
            tracker.log_files(run_id, [file], f"rows/{file.parent.name}")
        tracker.log_files(run_id, [artifacts.broke(name)], "broke")

    broke = artifacts.broke(name)
    key = artifacts.digest([parent, name, result, artifacts.sha256_file(broke) if broke.exists() else None])
    return tracker.run(key, name, log, {"mlflow.parentRunId": parent, "variant": name})


def _retag(tracker: Tracker, parent: str, runs: dict[str, str], verdict: dict[str, Any]) -> None:
    """Verdicts, the commit, and which children are the present state: they may change while the results do not."""
    tracker.client.set_tag(parent, "verdict", verdict["verdict"])
    commit = _commit()
    if commit:
        tracker.client.set_tag(parent, "mlflow.source.git.commit", commit)
    for run in tracker.client.search_runs([tracker.experiment], f"tags.`mlflow.parentRunId` = '{parent}'"):
        current = str(run.info.run_id in runs.values()).lower()
        if run.data.tags.get(CURRENT) != current:
            tracker.client.set_tag(run.info.run_id, CURRENT, current)
    for name, run_id in runs.items():
        tracker.client.set_tag(run_id, "verdict", verdict["variants"].get(name, {}).get("verdict", "REFERENCE"))


def _commit() -> str | None:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def main() -> None:
    """Log the results to MLflow; safe to repeat."""
    watch = artifacts.Stopwatch("track")
    settings = params.load()
    uri = os.environ.get("MLFLOW_TRACKING_URI") or settings.track.uri
    try:
        found, made = track(settings, uri)
    except QuantgateError:
        raise
    except Exception as e:  # MLflow, SQLAlchemy, a driver that is not installed: all mean that it was not written
        lines = str(e).strip().splitlines() or [type(e).__name__]
        why = _without_password(lines[0])[:200]
        raise ArtifactError(
            f"MLflow at {_without_password(uri)} could not be written ({why}); all results are safe in reports/ and "
            "artifacts/: run `python -m pipeline.track` when it is back"
        ) from None
    artifacts.write_json(artifacts.MLFLOW, found)
    told = f"{made} new MLflow runs, {len(found['runs'])} variants under parent {found['parent'][:8]}"
    cli.say("track", f"{told}, {watch.done():.1f} s")


def _without_password(text: str) -> str:
    """Addresses in a text without their `user:password@`."""
    return re.sub(r"://\S*@", "://", text)


if __name__ == "__main__":
    cli.run(main)
