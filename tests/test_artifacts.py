"""A stage killed anywhere leaves the old output or none; JSON is strict; changed files are found."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from pipeline.core import artifacts, cli, quiet
from pipeline.core.errors import ArtifactError, Unsupported


def test_a_failed_write_leaves_the_old_file_or_folder_and_nothing_else(tmp_path: Path) -> None:
    file, folder = tmp_path / "a.json", tmp_path / "model"
    artifacts.write_json(file, {"x": 1})
    with artifacts.atomic_dir(folder) as out:
        (out / "w").write_text("old")
    with pytest.raises(RuntimeError), artifacts.atomic_file(file) as tmp, artifacts.atomic_dir(folder) as out:
        tmp.write_text("half")
        (out / "w").write_text("new")
        raise RuntimeError
    assert json.loads(file.read_text()) == {"x": 1} and (folder / "w").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["a.json", "model"]


WRITER = """
import sys, time
from pathlib import Path
from pipeline.core import artifacts, cli, quiet
with artifacts.{kind}(Path({path!r})) as out:
    ({file}).write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("kind, file", [("atomic_file", "out"), ("atomic_dir", "out / 'w'")])
def test_kill_9_leaves_no_output_and_the_next_run_sweeps_up(tmp_path: Path, kind: str, file: str) -> None:
    path = tmp_path / "target"
    code = WRITER.format(kind=kind, path=str(path), file=file)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout and child.stdout.readline() == "writing\n"
        child.kill()
    assert not path.exists() and len(os.listdir(tmp_path)) == 1
    artifacts.write_json(path, {})
    assert os.listdir(tmp_path) == ["target"]


def test_json_stays_strict_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    value = {
        "int": np.int64(7), "float": np.float32(0.5), "nan": float("nan"), "inf": np.float64("inf"), "array": np.arange(3),
        "dtype": np.dtype("float32"), "path": Path("x/y"), "set": {1}, 5: True, "none": None, "stderr": "N/A",
    }  # fmt: skip
    artifacts.write_json(path, value)
    written = json.loads(path.read_text(), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    assert written == {
        "int": 7, "float": 0.5, "nan": None, "inf": None, "array": [0, 1, 2], "dtype": "float32", "path": "x/y", "set": [1],
        "5": True, "none": None, "stderr": "N/A",
    }  # fmt: skip


def test_lines_with_odd_separators_survive_the_round_trip(tmp_path: Path) -> None:
    rows = [{"text": "a\u2028b\u0085c\n\r\x0b"}, {"text": "日本"}]
    artifacts.write_jsonl(tmp_path / "r.jsonl", rows)
    assert artifacts.read_jsonl(tmp_path / "r.jsonl") == rows


@pytest.mark.parametrize("change, words", [
    (lambda folder: (folder / "w").write_text("2"), "w was changed"), (lambda folder: (folder / "w").unlink(), "w is missing"),
    (lambda folder: (folder / "v").write_text("2"), "v was added"),
])  # fmt: skip
def test_a_file_changed_after_the_manifest_is_found(tmp_path: Path, change: Callable[[Path], object], words: str) -> None:
    (tmp_path / "w").write_text("1")
    manifest = {"files": artifacts.files_of(tmp_path)}
    artifacts.verify_files(tmp_path, manifest)
    change(tmp_path)
    with pytest.raises(ArtifactError, match=words):
        artifacts.verify_files(tmp_path, manifest)


def test_a_variant_without_a_result_leaves_empty_rows_and_a_meta_file_that_says_why(tmp_path: Path) -> None:
    path, meta = tmp_path / "int8.jsonl", {"status": "ok", "reason": None}
    with artifacts.recording(meta, path) as rows:
        rows += [{"id": "a"}]
    assert artifacts.read_jsonl(path) == [{"id": "a"}] and artifacts.read_json(artifacts.meta_of(path)) == meta
    with artifacts.recording(meta, path) as rows:
        rows += [{"id": "a"}]
        raise Unsupported("no kernel")
    assert artifacts.read_jsonl(path) == []
    assert artifacts.read_json(artifacts.meta_of(path)) == meta == {"status": "unsupported", "reason": "no kernel"}


def test_damaged_and_missing_results_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ArtifactError, match="not valid JSON.*dvc repro"):
        artifacts.read_json(tmp_path / "a.json")
    with pytest.raises(ArtifactError, match="missing.*dvc repro"):
        artifacts.read_json(tmp_path / "b.json")


def stage(body: str) -> str:
    return f"import os, time\nfrom pipeline.core import cli\ndef main() -> None:\n    {body}\ncli.run(main)\n"


ORPHAN = """parent = os.getppid()
    print("started", flush=True)
    while os.getppid() == parent:
        time.sleep(0.01)
    time.sleep(0.1)
    print("outlived", flush=True)"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
@pytest.mark.parametrize("starter, says", [({"DVC_STAGE": "serve@int8"}, ""), ({}, "outlived\n")])
def test_a_stage_ends_with_the_dvc_that_started_it_and_a_person_s_command_outlives_its_shell(
    starter: dict[str, str], says: str
) -> None:
    code = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {stage(ORPHAN)!r}])\ntime.sleep(60)"
    env = {k: v for k, v in os.environ.items() if k != "DVC_STAGE"} | starter
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env) as parent:
        assert parent.stdout and parent.stdout.readline() == "started\n"
        parent.kill()
        parent.wait()
        assert parent.stdout.read() == says


def test_an_interrupted_stage_does_not_look_like_a_success() -> None:
    code = stage("print('started', flush=True); time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout and child.stdout.readline() == "started\n"
        child.terminate()
        assert child.wait(20) != 0


def test_an_error_of_ours_is_one_line_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ArtifactError("no such thing")

    monkeypatch.setattr("sys.argv", ["stage"])
    monkeypatch.setattr(quiet, "libraries", lambda: None)
    with pytest.raises(SystemExit, match="^error: no such thing$"):
        cli.run(fail)


def test_a_digest_is_of_the_content_not_of_the_order_of_keys() -> None:
    assert artifacts.digest({"a": 1, "b": [1, 2]}) == artifacts.digest({"b": [1, 2], "a": 1})
    assert len({artifacts.digest(v) for v in ({"a": 1, "b": [2, 1]}, {"a": 1, "b": [1, 2]}, {"a": 2, "b": [1, 2]})}) == 3
