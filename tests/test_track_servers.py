"""Tracking to real servers on 127.0.0.1: MLflow's own, and one with passwords (needs `pip install 'mlflow[auth]'`)."""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mlflow import MlflowClient
from track_house import VARIANTS, write_results
from werkzeug.security import generate_password_hash
from werkzeug.serving import make_server

from pipeline import track
from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError
from pipeline.tracking.connection import Tracker
from tools import track as moves

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]  # the warnings are MLflow's own
UP_S = 240  # a loaded machine takes its time to start a server
PASSWORD = "not-a-real-password-1"
needs_auth = pytest.mark.skipif(importlib.util.find_spec("flask_wtf") is None, reason="no flask_wtf: pip install 'mlflow[auth]'")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


class Here:
    """MLflow's server in a thread, which can be stopped and started again at once: a process takes five seconds."""

    def __init__(self) -> None:
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        from mlflow.server import app

        self.served = make_server("127.0.0.1", self.port, app, threaded=True)
        self.thread = threading.Thread(target=self.served.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.served.shutdown()
        self.thread.join()
        self.served.server_close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, database: Path) -> Iterator[Here]:
    folder = tmp_path_factory.mktemp("server")
    settings = {"FILE_STORE": f"sqlite:///{shutil.copy(database, folder)}", "ARTIFACT_DESTINATION": str(folder / "files"),
            "ARTIFACT_ROOT": "mlflow-artifacts:/", "SERVE_ARTIFACTS": "true"}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():  # as MLflow's command line sets them for its workers
            patch.setenv(f"_MLFLOW_SERVER_{name}", value)
        made = Here()
        made.start()
        yield made
        made.stop()


@pytest.fixture
def house(tmp_path: Path) -> Path:
    write_results()
    for file in (artifacts.answers("int8"), artifacts.REPORTS / "report.html"):
        artifacts.write_text(file, "x\n")
    return tmp_path


def own_experiment(name: str) -> None:
    """Tests share a server, not an experiment."""
    path = Path("params.yaml")
    path.write_text(path.read_text(encoding="utf-8").replace("experiment: quantgate", f"experiment: {name}"), encoding="utf-8")


def statuses(uri: str, name: str) -> list[str]:
    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(name)
    return sorted(r.info.status for r in client.search_runs([found.experiment_id])) if found else []


def files(client: MlflowClient, run: str, folder: str = "") -> set[str]:
    found = set()
    for item in client.list_artifacts(run, folder or None):
        found |= files(client, run, item.path) if item.is_dir else {item.path}
    return found


def test_a_server_gets_runs_files_versions_and_a_champion(house: Path, server: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    track.main()
    track.main()
    assert statuses(server.uri, "quantgate") == ["FINISHED"] * (len(VARIANTS) + 1)
    found, client = artifacts.read_json(artifacts.MLFLOW), MlflowClient(tracking_uri=server.uri)
    assert {"rows/answers/int8.jsonl", "metrics/int8.json"} <= files(client, found["runs"]["int8"])
    assert {"report/report.html", "comparison.json"} <= files(client, found["parent"])
    moves.main(to_promote="nf4", force=True, reason="a trial")
    moves.main(to_promote="bf16", force=True, reason="another")
    moves.main(back=True, reason="enough")
    assert client.get_model_version_by_alias("quantgate", "champion").tags["variant"] == "nf4"
    assert not (house / "mlruns").exists() and not (house / "mlflow.db").exists()


def test_a_server_that_dies_midway_loses_nothing_and_the_next_track_finishes(
    house: Path, server: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_experiment("midway")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    honest, calls = Tracker.log_metrics, iter(range(100))

    def stop_at_second(self: Tracker, *arguments: Any) -> None:
        if next(calls) == 1:
            server.stop()
        honest(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Tracker, "log_metrics", stop_at_second)
        with pytest.raises(ArtifactError, match="all results are safe"):
            track.main()
    assert not artifacts.MLFLOW.exists() and artifacts.metrics("int8").exists()
    server.start()
    assert statuses(server.uri, "midway") == ["FINISHED", "RUNNING"]
    monkeypatch.setattr("pipeline.tracking.connection.is_being_written", lambda run: False)  # this process wrote it
    track.main()
    assert statuses(server.uri, "midway") == ["FINISHED"] * (len(VARIANTS) + 1)


@needs_auth
def test_a_server_with_passwords_refuses_in_one_line_and_takes_the_right_one(
    house: Path, database: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("auth")
    config = folder / "auth.ini"
    config.write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{folder / 'auth.db'}\nadmin_username = admin\n"
        f"admin_password = {PASSWORD}\nauthorization_function = mlflow.server.auth:authenticate_request_basic_auth\n",
        encoding="utf-8",
    )
    uri, store = f"http://127.0.0.1:{(port := free_port())}", f"sqlite:///{shutil.copy(database, folder)}"
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1", "--backend-store-uri", store,
               "--artifacts-destination", str(folder / "files"), "--app-name", "basic-auth"]  # fmt: skip
    env = {"MLFLOW_AUTH_CONFIG_PATH": str(config), "MLFLOW_FLASK_SERVER_SECRET_KEY": "k"}
    env["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=folder, env=os.environ | env, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(uri, process)
        quick = generate_password_hash(PASSWORD, "pbkdf2:sha256:1")  # MLflow's own costs each request a tenth of a second
        with contextlib.closing(sqlite3.connect(folder / "auth.db")) as users, users:
            users.execute("UPDATE users SET password_hash = ?", (quick,))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong-password-2")
        with pytest.raises(ArtifactError, match="MLFLOW_TRACKING_PASSWORD") as caught:
            track.main()
        assert "wrong-password-2" not in str(caught.value) and "\n" not in str(caught.value)
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
        track.main()
        assert statuses(uri, "quantgate") == ["FINISHED"] * (len(VARIANTS) + 1)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its workers would go on without it
        process.wait()


def wait_for(uri: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + UP_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(f"{uri}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"no server at {uri}")
