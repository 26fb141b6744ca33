"""`quantgate`: one command with subcommands; `status` and `doctor`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.__main__ import COMMANDS
from pipeline.core import artifacts, params
from pipeline.preflight import room
from pipeline.tracking import connection
from tools import doctor, status

ROOT = Path(__file__).parents[1]


def quantgate(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "pipeline", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | variables)


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    done = quantgate("--help")
    assert done.returncode == 0
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)
    assert not {"torch", "dvc", "mlflow"} & {line.split("|")[-1].strip() for line in done.stderr.splitlines()}


def test_a_mistyped_command_gets_the_nearest() -> None:
    done = quantgate("stats")
    assert done.returncode == 2
    assert "Did you mean 'status'?" in done.stderr


def test_the_shell_completes_commands_and_their_options() -> None:
    asked = {"_PYTHON _M PIPELINE_COMPLETE": "complete_bash", "COMP_WORDS": "python do", "COMP_CWORD": "1"}
    assert quantgate(**asked).stdout.split() == ["doctor"]
    asked |= {"COMP_WORDS": "python gate --en", "COMP_CWORD": "2"}
    assert quantgate(**asked).stdout.split() == ["--enforce"]


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a pipeline of two stages that ran, the second after the first; a third stands alone."""
    from dvc.repo import Repo

    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("a")
    stages = {
        "first": {"cmd": "cp text copy", "deps": ["text"], "outs": ["copy"]},
        "second@int8": {"cmd": "cp copy last", "deps": ["copy"], "outs": ["last"]},
        "alone": {"cmd": "echo 1 > one", "outs": ["one"]},
    }
    both = stages.pop("second@int8")
    (tmp_path / "dvc.yaml").write_text(json.dumps({"stages": stages | {"second": {"foreach": ["int8"], "do": both}}}))
    with Repo.init(str(tmp_path), no_scm=True) as repo:
        repo.reproduce()
    for stage, seconds in {"first": 30.0, "second@nf4": 60.0}.items():
        facts = {"wall_s": seconds, "peak_memory_bytes": 1, "finished": "2026-12-01T00:00:00Z"}
        artifacts.write_json(artifacts.RUNS / f"{stage}.json", facts)
    return tmp_path


def test_status_lists_what_changed_and_what_may_follow(line: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.pending() == []
    (line / "text").write_text("b")
    assert status.pending() == [("first", "changed: text", 30.0, False), ("second@int8", None, 60.0, True)]
    status.main()
    printed = capsys.readouterr().out
    assert "`make repro` runs these 1 stages: about 30 s." in printed
    assert "up to 1 stages follow: at most about 2 min in all." in printed
    status.main(as_json=True)
    assert json.loads(capsys.readouterr().out)["seconds_at_most"] == 90.0


def test_status_outside_a_project_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(artifacts.ArtifactError, match="DVC cannot compare this folder"):
        status.pending()


@pytest.fixture
def settings() -> params.Params:
    return params.load(ROOT / "params.yaml")


def problems(findings: object) -> list[str]:
    return [f"{f.about}: {f.seen}" for f in findings if f.state == "problem"]  # type: ignore[attr-defined]


def test_doctor_sees_a_disk_and_a_memory_that_are_too_small(settings: params.Params, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "base_folder", lambda _: Path())
    monkeypatch.setattr(room, "disk_bytes", lambda *_: 1e18)
    monkeypatch.setattr(room, "needs", lambda *_: {"floor": room.Need(1.0), "quantize@onnx-int4": room.Need(1e18)})
    assert [p.split(":")[0] for p in problems(doctor.room(settings))] == ["disk", "memory", "room"]


def test_doctor_sees_a_card_that_torch_cannot_use(settings: params.Params, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("torch can use the card of this machine")
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [Path("/gpu")])
    (seen,) = problems(doctor.torch_and_card(settings))
    assert "CPU build" in seen or "cannot use" in seen


def test_doctor_sees_offline_switches_that_a_hub_model_cannot_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    here = params.load(ROOT / "params.yaml")
    assert problems(doctor.hub(here)) == []
    there = here.model_copy(update={"model": params.HubModel(source="hub", id="a/b", revision="main")})
    assert any("HF_HUB_OFFLINE" in p for p in problems(doctor.hub(there)))


def test_doctor_sees_a_port_in_use(settings: params.Params, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(doctor, "UI_PORT", server.getsockname()[1])
        assert [f.state for f in doctor.ports(settings)] == ["note"]
    assert [f.state for f in doctor.ports(settings)] == ["ok"]


@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_doctor_sees_mlflow_tables_of_another_version(
    settings: params.Params, database: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import shutil
    import sqlite3

    copy = tmp_path / "mlflow.db"
    shutil.copyfile(database, copy)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{copy}")
    assert problems(doctor.mlflow(settings)) == []
    assert doctor.schema_fault(f"sqlite:///{copy}") is None
    with sqlite3.connect(copy) as db:
        db.execute("UPDATE alembic_version SET version_num = '451aebb31d03'")
    db.close()
    (seen,) = problems(doctor.mlflow(settings))
    assert "451aebb31d03" in seen


def test_doctor_sees_an_error_of_mlflow_that_has_no_message(settings: params.Params, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> None:
        raise RuntimeError

    monkeypatch.setattr(connection, "check_reachable", broken)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2pass@host")
    assert problems(doctor.mlflow(settings)) == ["MLflow: http://(hidden)@host: RuntimeError: "]


def test_doctor_names_the_first_variant_that_loses(settings: params.Params, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    findings = {f.about: f.seen for f in doctor.results(settings)}
    assert "going down in bits, nf4 is the first to FAIL" in findings["quality"]


def test_a_check_that_cannot_look_is_a_note(settings: params.Params, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: params.Params) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(doctor, "CHECKS", (broken,))
    assert [(f.state, f.seen) for f in doctor.findings(settings)] == [("note", "could not look: no such device")]
