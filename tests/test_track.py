"""MLflow: the same state makes no second run, a changed one makes one, and nothing half-written stays."""

import getpass
import json
import os
import pwd
import socket
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gate_house import metric, write_manifest, write_metrics
from mlflow import MlflowClient
from track_house import VARIANTS, House, change, copy_tracked, rejudge, rule, sqlite_house, write_results

from pipeline import track
from pipeline.core import artifacts, params, quiet
from pipeline.core.errors import ArtifactError, ParamsError
from pipeline.tracking import connection
from pipeline.tracking.connection import CURRENT, KEY, Tracker
from pipeline.tracking.registry import Registry
from pipeline.tracking.runs import PARENT, load_state, provenance
from tools import track as moves

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Path) -> House:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return sqlite_house(tmp_path, database)


@pytest.fixture
def tracked_house(tmp_path: Path, tracked: Path) -> House:
    """A house whose results are tracked already."""
    return copy_tracked(tracked, tmp_path)


def runs(client: MlflowClient, experiment: str) -> list[Any]:
    return list(client.search_runs([experiment]))


def children(client: MlflowClient, found: dict[str, Any]) -> list[Any]:
    return [r for r in runs(client, found["experiment"]) if r.data.tags.get(PARENT) == found["parent"]]


def test_one_run_a_variant_under_one_of_the_state(house: House) -> None:
    settings, uri, client = house
    found, made = track.track(settings, uri)
    assert made == len(VARIANTS) and len(runs(client, found["experiment"])) == made + 1
    below = children(client, found)
    assert {r.info.run_name for r in below} == set(VARIANTS)
    assert {r.info.run_name: r.data.tags["verdict"] for r in below} == {"bf16": "REFERENCE", "int8": "PASS", "nf4": "FAIL"}
    assert {r.info.status for r in runs(client, found["experiment"])} == {"FINISHED"}
    client.set_tag(found["runs"]["int8"], "mlflow.note.content", "mine")
    client.set_experiment_tag(found["experiment"], "mlflow.note.content", "ours")
    track.track(settings, uri)
    assert client.get_run(found["runs"]["int8"]).data.tags["mlflow.note.content"] == "mine", "a person's words stay"
    assert client.get_experiment(found["experiment"]).tags["mlflow.note.content"] == "ours"


def test_a_user_without_a_name_and_a_home_is_a_number_and_has_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setenv("HOME", "")  # so that it is restored in the end
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert connection.user() == "uid 12345"
    quiet.libraries()
    assert Path.home() == Path("~/x").expanduser().parent == Path(tempfile.gettempdir()), "libraries ask for it when imported"
    monkeypatch.setattr(getpass, "getuser", lambda: Path("/nowhere").stat())  # an OSError, as from Python 3.13 on
    assert connection.user() == "uid 12345"


def test_every_name_that_check_lets_through_names_one_experiment_and_one_registered_model(house: House) -> None:
    _, uri, client = house
    names = ["100 % of %s", "a;b -- c", "ä 模型", "`tick`", "a\\b", "${HOME}", "x" * 250]
    for name in names:
        tags = {"variant": "int8", "location": "here", "model": "m", "verdict": "PASS"}
        assert params.Track(experiment=name).experiment == name
        first, again = Tracker(uri, name).experiment, Tracker(uri, name).experiment
        assert first == again
        run = client.create_run(first).info.run_id
        for _ in range(2):  # the second time all is there
            assert list(Registry(client, name).register(first, {run: tags})) == [run]
    assert sorted(m.name for m in client.search_registered_models()) == sorted(names)


def test_an_experiment_that_was_deleted_in_the_ui_is_named_as_that_and_works_again_once_restored(house: House) -> None:
    settings, uri, client = house
    experiment = Tracker(uri, settings.track.experiment).experiment
    client.delete_experiment(experiment)
    with pytest.raises(ArtifactError, match=f"'quantgate' was deleted in MLflow; restore it .* --experiment-id {experiment}"):
        Tracker(uri, settings.track.experiment)
    client.restore_experiment(experiment)
    assert Tracker(uri, settings.track.experiment).experiment == experiment


def test_the_same_state_makes_no_run_a_changed_variant_two_and_going_back_none(tracked_house: House) -> None:
    settings, uri, client = tracked_house
    first, _ = track.track(settings, uri)
    assert track.track(settings, uri) == (first, 0) and len(runs(client, first["experiment"])) == len(VARIANTS) + 1
    assert len(client.get_metric_history(first["runs"]["int8"], "kld_mean")) == 1, "history is not appended to"
    change("int8", 0.77)
    second, made = track.track(settings, uri)
    assert made == 1 and len(runs(client, first["experiment"])) == len(VARIANTS) + 3
    assert second["parent"] != first["parent"] and second["runs"]["int8"] != first["runs"]["int8"]
    assert {r.info.run_id for r in children(client, second)} == set(second["runs"].values())
    assert [r.info.run_id for r in children(client, first)] == [first["runs"]["int8"]]
    current = {r.info.run_id for r in runs(client, first["experiment"]) if r.data.tags[CURRENT] == "true"}
    assert current == {second["parent"], *second["runs"].values()}
    change("int8", 0.01)
    assert track.track(settings, uri) == (first, 0) and len(runs(client, first["experiment"])) == len(VARIANTS) + 3
    assert len(children(client, first)) == len(VARIANTS)


def test_another_verdict_on_the_same_results_is_a_new_state_of_the_same_runs(tracked_house: House) -> None:
    settings, uri, client = tracked_house
    first, _ = track.track(settings, uri)
    rejudge("int8", overall="FAIL", verdict="FAIL")
    second, made = track.track(settings, uri)
    assert made == 0 and second["runs"] == first["runs"] and second["parent"] != first["parent"]
    assert client.get_run(first["parent"]).data.tags["verdict"] == "PASS"
    tags = client.get_run(second["runs"]["int8"]).data.tags
    assert tags["verdict"] == "FAIL" and tags["mlflow.note.content"].startswith("FAIL: ")


def test_a_run_holds_what_it_was_made_from_and_what_defines_the_measurement(house: House) -> None:
    settings, uri, client = house
    Path("dvc.lock").write_text("stages: {gate: {cmd: x}, track: {cmd: y}}\n", encoding="utf-8")
    rows = [artifacts.answers("int8"), artifacts.timings("int8"), artifacts.generations("int8"), artifacts.failures("int8")]
    for file in (*rows, artifacts.REPORTS / "figures/tradeoff.png"):
        artifacts.write_text(file, f"{file}\n")
    logged, _ = track.track(settings, uri)
    run, parent = (client.get_run(r) for r in (logged["runs"]["int8"], logged["parent"]))
    assert {"quantizer", "engine", "bits", "reference", "tier", "machine"} <= run.data.params.keys()
    assert len(run.data.params) <= 12 and len(parent.data.params) <= 12
    assert run.data.tags["dvc.lock"] == artifacts.digest({"gate": {"cmd": "x"}})
    assert parent.info.run_name.startswith("PASS (") and parent.info.run_name.endswith("vs bf16")
    for run_id in (logged["runs"]["int8"], logged["parent"]):
        held = json.loads(Path(client.download_artifacts(run_id, "made_by.json", str(Path.cwd()))).read_text("utf-8"))
        assert held["amount"]["tasks"] == settings.amount.tasks and held["seed"] == settings.seed
        for section, key in (("evaluate", "batch_size"), ("diverge", "window"), ("compare", "resamples")):
            assert held[section][key] == getattr(getattr(settings, section), key)
    table = client.download_artifacts(logged["parent"], "comparison.json", str(Path.cwd()))
    assert [row[:2] for row in json.loads(Path(table).read_text("utf-8"))["data"]][1] == ["int8", "PASS"]

    def files(run: str, *folders: str) -> list[str]:
        return [f.path for folder in folders for f in client.list_artifacts(run, folder)]

    kinds = ("rows/answers", "rows/timings", "rows/generations")
    kept = files(logged["runs"]["int8"], *kinds, "broke")
    assert kept == [*(f"{kind}/int8.jsonl" for kind in kinds), "broke/int8.json"]


def test_a_tree_is_not_changed_by_what_the_pipeline_writes() -> None:
    settings = write_results()
    Path("dvc.lock").write_text("stages: {}\n", encoding="utf-8")
    own = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*own, *words], check=True)
    changed = []
    for touched in ("dvc.lock", "reports/gate.json", "params.yaml"):
        with Path(touched).open("a", encoding="utf-8") as file:
            file.write("\n")
        changed.append(provenance(load_state(settings))["git.changed"])
    subprocess.run([*own, "commit", "-aqm", "y"], check=True)
    Path("x.py").touch()
    changed.append(provenance(load_state(settings))["git.changed"])
    assert changed == ["false", "false", "true", "true"]


def test_no_password_or_key_is_uploaded(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, uri, client = house
    monkeypatch.setenv("MY_SERVER_TOKEN", "hunter2-hunter2")
    secret = "https://me:hunter2pass@pypi/simple hunter2-hunter2"
    for file in ("params.yaml", "dvc.lock"):
        there = Path(file).read_text(encoding="utf-8") if Path(file).exists() else "stages: {}\n"
        Path(file).write_text(f"{there}# {secret}\n", encoding="utf-8")
    files = [artifacts.answers("int8"), artifacts.timings("int8"), artifacts.failures("int8"), artifacts.served("int8")]
    for file in [*files, artifacts.REPORTS / "report.md", artifacts.REPORTS / "figures/a.svg"]:
        artifacts.write_json(file, {"said": secret})
    calibration = {"source": secret, "digest": "d", "rows_asked": 1, "rows_used": 1, "tokens_per_row": 1}
    write_manifest(artifacts.model_dir("int8"), calibration=calibration)
    for name in settings.variants:
        change(name, options={"index": secret}, versions={"torch": secret})
    rejudge("int8", reason=secret)
    found, _ = track.track(settings, uri)
    for run in (found["parent"], *found["runs"].values()):
        data = client.get_run(run).data
        assert "hunter2" not in f"{data.params} {data.tags}"
        Path(f"kept/{run}").mkdir(parents=True)
        client.download_artifacts(run, "", f"kept/{run}")
    kept = [f for f in Path("kept").rglob("*") if f.is_file()]
    assert [f for f in kept if b"hunter2" in f.read_bytes()] == []
    hidden = {f.name for f in kept if b"https://(hidden)@pypi/simple (hidden)" in f.read_bytes()}
    assert hidden >= {"params.yaml", "dvc.lock", "report.md", "a.svg", "gate.json", "manifest.json", "int8.jsonl", "int8.json"}
    assert "hunter2" not in str([(v.tags, v.description) for v in client.search_model_versions("name = 'quantgate'")])


def test_a_variant_that_cannot_run_here_is_a_run_that_says_why(tracked_house: House) -> None:
    settings, uri, client = tracked_house
    change("nf4", status="unsupported", reason="no kernel", metrics={}, machine=None)
    rejudge("nf4", verdict="UNSUPPORTED", reason="no kernel", rules=[rule(None, "FAIL", n=None)])
    run = client.get_run(track.track(settings, uri)[0]["runs"]["nf4"])
    assert (run.data.tags["status"], run.data.tags["reason"]) == ("unsupported", "no kernel")
    assert run.data.metrics == {} and run.data.tags["verdict"] == "UNSUPPORTED"


def test_metric_names_survive_the_round_trip_unknown_values_are_left_out_and_curves_have_steps(tracked_house: House) -> None:
    from pipeline.metrics.definitions import IN_PROCESS

    settings, uri, client = tracked_house
    names = [f"{n}{t}" for n in IN_PROCESS for t in ("", "/chinese-english", "/arithmetic_copy")]
    metrics = {n: metric(float(i), i - 0.5, i + 0.5) for i, n in enumerate(names)}
    write_metrics(settings, "int8", metrics | {f"tpot_ms/context-{n}": metric(n / 100, None, None) for n in (4096, 256)})
    run = track.track(settings, uri)[0]["runs"]
    logged = client.get_run(run["int8"]).data.metrics
    assert {n: logged[n] for n in names} == {n: float(i) for i, n in enumerate(names)}
    history = client.get_metric_history(run["int8"], "tpot_ms_by_context")
    assert [(m.step, m.value) for m in history] == [(256, 2.56), (4096, 40.96)] and len(logged) == 3 * len(names) + 3
    assert client.get_run(run["nf4"]).data.metrics == pytest.approx({"kld_mean": 0.02, "kld_mean_low": 0.01})


# --- crashes -----------------------------------------------------------------------------------------------------


def test_a_crash_leaves_no_run_running_and_the_next_try_finishes(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, uri, client = house
    honest = Tracker.log_metrics
    calls = iter(range(100))

    def break_third(self: Tracker, *arguments: Any) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        honest(self, *arguments)

    monkeypatch.setattr(Tracker, "log_metrics", break_third)
    with pytest.raises(KeyboardInterrupt):
        track.track(settings, uri)
    experiment = client.get_experiment_by_name(settings.track.experiment)
    assert experiment and {r.info.status for r in runs(client, experiment.experiment_id)} == {"FINISHED", "FAILED"}
    found, made = track.track(settings, uri)
    assert made == 1  # two were finished before
    assert {r.info.status for r in runs(client, found["experiment"])} == {"FINISHED"}


def test_a_run_left_running_by_kill_9_is_cleared_whatever_it_was_of(tracked_house: House) -> None:
    settings, uri, client = tracked_house
    found, _ = track.track(settings, uri)
    for other in ({}, {KEY: "0" * 64}):
        killed = found["runs"]["int8"]
        client.update_run(killed, status="RUNNING")
        for tag, value in ({connection.WRITER: f"{connection.platform.node()}:999999999"} | other).items():
            client.set_tag(killed, tag, value)
        found, made = track.track(settings, uri)
        assert made == 1 and found["runs"]["int8"] != killed
        assert client.get_run(killed).info.status == "KILLED" and client.get_run(killed).info.lifecycle_stage == "deleted"
        assert {r.info.status for r in runs(client, found["experiment"])} == {"FINISHED"}


def test_a_run_that_a_living_process_writes_is_left_alone(house: House) -> None:
    settings, uri, client = house
    tracker = Tracker(uri, settings.track.experiment)
    tags = {KEY: "1" * 64, connection.WRITER: f"{connection.platform.node()}:{os.getpid()}"}
    run = client.create_run(tracker.experiment, tags=tags).info.run_id
    theirs = client.create_run(tracker.experiment, tags={"made by": "somebody else"}).info.run_id
    Tracker(uri, settings.track.experiment)
    assert [client.get_run(r).info.status for r in (run, theirs)] == ["RUNNING", "RUNNING"]


def test_a_store_killed_while_it_is_made_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(MlflowClient, "search_experiments", killed)
    with pytest.raises(KeyboardInterrupt):
        connection.check_reachable(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert list(tmp_path.iterdir()) == []


# --- servers that are away ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, advice", [
    ({}, "all results are safe .*run `quantgate track`, or `dvc repro`"),
    ({"to_promote": "int8", "force": True, "reason": "r"}, "look there who is champion"),
    ({"back": True}, "look there who is champion"),
])  # fmt: skip
def test_a_server_that_is_down_is_said_in_one_line_and_loses_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], advice: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    before = artifacts.metrics("int8").read_bytes()
    with pytest.raises(ArtifactError, match=advice) as caught:
        moves.main(**options)
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value) and artifacts.metrics("int8").read_bytes() == before
    assert ("results are safe" in str(caught.value)) == (not options) and not artifacts.MLFLOW.exists(), "else DVC took it as done"


def test_a_server_that_takes_and_never_answers_is_asked_once(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ANSWER_S", 0.2)
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def take() -> None:
            while True:
                try:
                    asked.append(silent.accept()[0])
                except OSError:
                    return

        threading.Thread(target=take, daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ArtifactError, match="no answer within"):
            track.main()
        silent.shutdown(socket.SHUT_RDWR)
    for taken in asked:
        taken.close()
    assert len(asked) == 1


def test_the_first_question_carries_no_password_and_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("httpx2.get", lambda url, **_: asked.append(url))
    connection.check_reachable("https://user:p%40ss@host.example/mlflow/")
    assert asked == ["https://host.example/mlflow/health"]

    def act() -> None:
        raise ModuleNotFoundError("No module named 'boto3'", name="boto3")

    with pytest.raises(ArtifactError, match="; pip install boto3") as caught:
        track.reported("mssql+pymssql://user:secret@127.0.0.1/x", "then", act)
    assert "secret" not in str(caught.value)


# --- command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, said", [
    ({"to_promote": "int8", "back": True}, "exclude each other"), ({"to_promote": "int8", "force": True}, "--reason TEXT"),
    ({"to_promote": "int8", "force": True, "reason": "  "}, "--reason TEXT"),
    ({"force": True, "reason": "x"}, "--promote VARIANT"), ({"reason": "x"}, "--promote VARIANT or --rollback"),
])  # fmt: skip
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ParamsError, match=said):
        moves.main(**options)


def test_two_at_once_wait_for_each_other(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track, "WAIT_S", 0.1)
    with track.alone(), ThreadPoolExecutor(1) as pool, pytest.raises(ArtifactError, match="has been running here"):
        pool.submit(track.main).result()
