"""MLflow: the same state makes no second run, a changed one makes one, and names survive the round trip."""

from __future__ import annotations

import copy
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from pipeline import artifacts, params, track
from pipeline.errors import ArtifactError

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh sqlite store takes seconds to make; make it once and copy it."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_database: Path) -> tuple[params.Params, str, MlflowClient]:
    monkeypatch.chdir(tmp_path)
    shutil.copy(empty_database, "mlflow.db")
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    settings = params.load()
    verdict: dict[str, Any] = {"verdict": "PASS", "variants": {}}
    for k, name in enumerate(settings.variants):
        artifacts.write_json(artifacts.metrics(name), {
            "variant": name, "status": "ok", "quantizer": "cast", "engine": "hf", "options": {"dtype": "x"}, "base": "b" * 64,
            "model": "m", "versions": {"torch": "2"}, "machine": {"cpu": "c"},
            "metrics": {
                "kld_mean": {"value": 0.1 * k, "low": 0.05 * k, "high": None},
                "kld_mean/news": {"value": None, "low": None, "high": None},
            },
        })  # fmt: skip
        verdict["variants"][name] = {"verdict": "FAIL" if k else "PASS"}
    artifacts.write_json(artifacts.GATE, verdict)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    return settings, uri, MlflowClient(tracking_uri=uri)


def runs(client: MlflowClient, experiment: str) -> list[Any]:
    return list(client.search_runs([experiment]))


def test_one_run_a_variant_under_one_parent(house: tuple[params.Params, str, MlflowClient]) -> None:
    settings, uri, client = house
    found, made = track.track(settings, uri)
    all_runs = runs(client, found["experiment"])
    assert made == len(all_runs) == len(settings.variants) + 1
    children = [r for r in all_runs if r.data.tags.get("mlflow.parentRunId") == found["parent"]]
    assert {r.info.run_name for r in children} == set(settings.variants)
    assert all(r.info.status == "FINISHED" for r in all_runs)
    assert {r.data.tags["verdict"] for r in children} == {"PASS", "FAIL"}


def test_the_same_state_makes_no_second_run_and_appends_nothing(house: tuple[params.Params, str, MlflowClient]) -> None:
    settings, uri, client = house
    first, _ = track.track(settings, uri)
    again, made = track.track(settings, uri)
    assert made == 0 and again == first
    assert len(client.get_metric_history(first["runs"]["int8"], "kld_mean")) == 1


def test_one_changed_variant_makes_one_run_and_retires_the_old(house: tuple[params.Params, str, MlflowClient]) -> None:
    settings, uri, client = house
    first, _ = track.track(settings, uri)
    result = artifacts.read_json(artifacts.metrics("int8"))
    result["metrics"]["kld_mean"]["value"] = 0.77
    artifacts.write_json(artifacts.metrics("int8"), result)
    second, made = track.track(settings, uri)
    assert made == 1 and second["parent"] == first["parent"] and second["runs"]["int8"] != first["runs"]["int8"]
    assert client.get_run(first["runs"]["int8"]).data.tags[track.CURRENT] == "false"
    assert client.get_run(second["runs"]["int8"]).data.tags[track.CURRENT] == "true"


def test_every_kind_of_rows_is_kept_though_their_files_have_one_name(house: tuple[params.Params, str, MlflowClient]) -> None:
    settings, uri, client = house
    made = [artifacts.answers("int8"), artifacts.timings("int8"), artifacts.generations("int8"), artifacts.broke("int8")]
    for file in made:
        artifacts.write_text(file, f"{file}\n")
    run = track.track(settings, uri)[0]["runs"]["int8"]
    kept = [f.path for kind in ("answers", "timings", "generations") for f in client.list_artifacts(run, f"rows/{kind}")]
    assert kept == ["rows/answers/int8.jsonl", "rows/timings/int8.jsonl", "rows/generations/int8.jsonl"]
    assert [f.path for f in client.list_artifacts(run, "broke")] == ["broke/int8.json"]


def test_unknown_values_are_left_out_and_bounds_stand_beside(house: tuple[params.Params, str, MlflowClient]) -> None:
    settings, uri, client = house
    found, _ = track.track(settings, uri)
    logged = client.get_run(found["runs"]["int8"]).data.metrics
    assert logged == pytest.approx({"kld_mean": 0.2, "kld_mean_low": 0.1})


def test_metric_names_survive_the_round_trip(house: tuple[params.Params, str, MlflowClient]) -> None:
    from pipeline.metrics import DEFINITIONS

    settings, uri, client = house
    result = artifacts.read_json(artifacts.metrics("int8"))
    names = [f"{n}{t}" for n in DEFINITIONS for t in ("", "/chinese-english", "/arithmetic_copy")]
    result["metrics"] = {n: {"value": float(i), "low": i - 0.5, "high": i + 0.5} for i, n in enumerate(names)}
    artifacts.write_json(artifacts.metrics("int8"), result)
    found, _ = track.track(settings, uri)
    logged = client.get_run(found["runs"]["int8"]).data.metrics
    assert {n: logged[n] for n in names} == {n: float(i) for i, n in enumerate(names)}
    assert len(logged) == 3 * len(names)


def test_names_that_would_collide_are_an_error() -> None:
    metric = {"value": 1.0, "low": 1.0, "high": 1.0}
    with pytest.raises(ArtifactError, match="two metrics would both be called 'kld_mean_low'"):
        track.flat_metrics({"kld_mean": metric, "kld_mean_low": metric})


def test_a_crash_leaves_no_run_running_and_the_next_try_finishes(
    house: tuple[params.Params, str, MlflowClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, uri, client = house
    honest = track.Tracker.log_metrics
    calls = iter(range(100))

    def break_third(self: track.Tracker, run_id: str, values: dict[str, float]) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        honest(self, run_id, values)

    monkeypatch.setattr(track.Tracker, "log_metrics", break_third)
    with pytest.raises(KeyboardInterrupt):
        track.track(settings, uri)
    experiment = client.get_experiment_by_name(settings.track.experiment)
    assert experiment and {r.info.status for r in runs(client, experiment.experiment_id)} == {"FINISHED", "FAILED"}
    found, made = track.track(settings, uri)
    assert made == len(settings.variants) - 2  # parent and two children were finished before
    assert {r.info.status for r in runs(client, found["experiment"])} == {"FINISHED"}


def test_a_run_left_running_by_kill_9_is_replaced(house: tuple[params.Params, str, MlflowClient]) -> None:
    settings, uri, client = house
    first, _ = track.track(settings, uri)
    client.update_run(first["runs"]["int8"], status="RUNNING")
    second, made = track.track(settings, uri)
    assert made == 1 and second["runs"]["int8"] != first["runs"]["int8"]
    assert {r.info.status for r in runs(client, first["experiment"])} == {"FINISHED"}


def test_a_server_that_is_down_costs_seconds_and_loses_nothing(
    house: tuple[params.Params, str, MlflowClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    before = copy.deepcopy(artifacts.read_json(artifacts.metrics("int8")))
    start = time.monotonic()
    with pytest.raises(ArtifactError) as caught:
        track.main()
    assert time.monotonic() - start < 60 and "run `python -m pipeline.track`" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert artifacts.read_json(artifacts.metrics("int8")) == before


def test_shipped_params_name_the_ui_s_database() -> None:
    shipped = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    assert shipped["track"]["uri"] in (ROOT / "Makefile").read_text(encoding="utf-8")
