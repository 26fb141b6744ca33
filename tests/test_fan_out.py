"""Fan-out: DVC's graph, dvc.lock and the choice of what runs next, with copies worked on one after another, without Ray."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from dvc.cli import main as dvc

from pipeline import fan_out
from pipeline.core import artifacts, copies, params
from pipeline.core.copies import Job, Ran
from pipeline.core.errors import ArtifactError, QuantgateError
from pipeline.fan_out import Folder, Line, Needs

Stages = dict[str, dict[str, Any]]
pytestmark = pytest.mark.filterwarnings("ignore")  # DVC's own


def stages_of(ran: Path) -> Stages:
    """A small line: each stage notes its name in `ran`; `time` belongs to a class of machine, `judge` writes what is not cached."""
    line: Stages = {
        "z-base": {"cmd": "cp in base", "deps": ["in"], "params": ["size"], "outs": ["base"]},
        "score": {"cmd": "cat base new > score", "deps": ["base", "new"], "outs": ["score"]},
        "time": {"cmd": "date +%N > time", "deps": ["base"], "params": [{"reports/machine.yaml": ["machine"]}], "outs": ["time"]},
        "judge": {"cmd": "mkdir -p found && cat score score > found/score", "deps": ["score", "base"]},
        "gate": {"cmd": "wc found/* > gate", "deps": ["found", "time"], "outs": ["gate"]},
    }
    line["judge"]["outs"] = [{"found/score": {"cache": False}}]
    return {name: stage | {"cmd": f"{stage['cmd']} && echo {name} >> {ran}"} for name, stage in line.items()}


class Here:
    """Jobs one after another in this process. lost: stages whose worker dies."""

    def __init__(self, *lost: str, slots: int = 9) -> None:
        self.slots = slots
        self.lost, self.jobs = lost, list[tuple[Job, Needs, bytes]]()

    def start(self, job: Job, needs: Needs, tree: bytes) -> None:
        self.jobs.append((job, needs, tree))

    def next(self) -> tuple[str, Ran | str]:
        job, _, tree = self.jobs.pop()  # the last first: any order gives the same
        return job.stage, "failed: its worker died" if job.stage in self.lost else copies.run(job, tree)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """Run commands in a folder below tmp_path; returns the stages that ran."""
    ran = tmp_path / "ran"

    def in_process(words: list[str], home: Path, log: Path, job: Job) -> int:
        with monkeypatch.context() as there:
            there.chdir(home)
            there.setenv("DVC_ROOT", job.project)
            log.write_bytes(b"log")
            return dvc(words[1:])

    def runs(folder: str, *commands: str | Callable[[], Any]) -> list[str]:
        ran.write_text("")
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        for command in commands:
            if not isinstance(command, str):
                command()
            elif command.startswith("dvc "):
                assert dvc(command.split()[1:]) == 0, command
            else:
                subprocess.run(["sh", "-c", command], check=True)
        return ran.read_text().split()

    monkeypatch.setattr(copies, "dvc", in_process)
    monkeypatch.setattr(Folder, "run", lambda self, name: dvc(["repro", "-q", "--single-item", name]))
    for name, value in {"DVC_NO_ANALYTICS": "1", "GIT_CONFIG_COUNT": "0", "HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(artifacts, "seconds_of", lambda name: (None, False))
    return runs


def project(ran: Path) -> None:
    for name, text in {
        "in": "a",
        "params.yaml": "size: 1",
        ".gitignore": "/artifacts/",
        "reports/machine.yaml": "machine: one",
    }.items():
        artifacts.write_text(Path(name), text + "\n")
    artifacts.write_json(Path("dvc.yaml"), {"stages": stages_of(ran)})
    for words in ("init -q", "config user.name a", "config user.email a@b"):
        subprocess.run(["git", *words.split()], check=True)
    assert dvc(["init", "-q"]) == dvc(["cache", "dir", str(ran.parent / "cache")]) == 0
    for words in ("add -A", "commit -qm x"):
        subprocess.run(["git", *words.split()], check=True)


def everything(*lost: str, remote: bool = False) -> dict[str, str]:
    return fan_out.fan_out(Here(*lost), lambda name: Needs(), remote).state


def test_dvc_lock_is_that_of_a_serial_run_and_a_plain_repro_runs_nothing(work: Any, tmp_path: Path) -> None:
    """With an uncommitted edit of params and an untracked file, which copies have too."""
    edit = "echo 'size: 2' > params.yaml; echo b > new"
    assert work("a", lambda: project(tmp_path / "ran"), edit, "dvc repro -q")[0] == "z-base"
    serial = (tmp_path / "a/dvc.lock").read_text()
    work("a", "rm -rf ../cache/runs dvc.lock base score time found gate")
    assert sorted(work("a", everything)) == ["gate", "judge", "score", "time", "z-base"]
    fanned = (tmp_path / "a/dvc.lock").read_text()
    now, then = (tmp_path / "a/time").read_text(), fan_out.Folder._parsed(serial)["stages"]
    assert now and list(fan_out.Folder._parsed(fanned)["stages"]) == list(then)
    same = [name for name in then if Folder._parsed(fanned)["stages"][name] == then[name]]
    assert same == [name for name in then if name not in ("time", "gate")]  # these hold a time
    assert work("a", "dvc repro -q") == [] and not list((tmp_path / "a" / copies.COPIES).iterdir())


def test_an_entry_of_dvc_lock_whose_outputs_nobody_has_does_not_run_a_stage_again(work: Any, tmp_path: Path) -> None:
    """Two clones share a cache. The committed entry's outputs are gone from it; the run cache has those of a later run."""
    clone = "echo b > new; git add new dvc.lock && git commit -qm y; git clone -q . ../b; git clone -q . ../c"
    work("a", lambda: project(tmp_path / "ran"), "echo b > new", "dvc repro -q", clone)
    time = Folder._parsed((tmp_path / "b/dvc.lock").read_text())["stages"]["time"]["outs"][0]["md5"]
    (tmp_path / "cache/files/md5" / time[:2] / time[2:]).unlink()
    assert work("a", "dvc repro -qsf time") == ["time"]
    local = f"dvc config --local cache.dir {tmp_path / 'cache'}"
    assert work("b", local, "dvc repro -q") == [
        "time",
        "judge",
        "gate",
    ]  # the trap; DVC keeps no run of `judge`
    assert work("c", local, everything)[0] == "judge"
    assert work("c", "dvc repro -q") == []


def test_a_clone_that_shares_a_remote_times_again_on_another_machine_and_runs_nothing_else(work: Any, tmp_path: Path) -> None:
    """Nothing but the remote is shared: each clone has its own cache, and so have the copies."""
    share = f"dvc remote add -d shared {tmp_path / 'remote'}"
    clone = "git add -A; git commit -qm y; git clone -q . ../b"
    work("a", lambda: project(tmp_path / "ran"), share, "echo b > new", lambda: everything(remote=True))
    work("a", "dvc push --run-cache", clone)
    local = "dvc config --local cache.dir ../own"
    assert (
        work("b", local, "dvc pull -q --run-cache", "mkdir found; cp ../a/found/score found", lambda: everything(remote=True)) == []
    )
    assert work("b", "echo 'machine: two' > reports/machine.yaml", lambda: everything(remote=True)) == ["time", "gate"]


def test_what_fails_or_is_lost_costs_what_follows_it_and_the_next_start_goes_on(work: Any, tmp_path: Path) -> None:
    states: list[dict[str, str]] = []
    assert work("a", lambda: project(tmp_path / "ran"), lambda: states.append(everything())) == ["z-base", "time"]
    assert states[-1] == {"z-base": "done", "score": "failed", "time": "done", "judge": "waiting", "gate": "waiting"}  # no `new`
    assert work("a", "echo b > new", lambda: states.append(everything("judge"))) == ["score"] and states[-1]["judge"] == "failed"
    assert work("a", everything) == ["judge", "gate"]
    logs = tmp_path / "a" / fan_out.LOGS
    assert (logs / "score.log").read_bytes() == b"log" and not list((tmp_path / "a" / copies.COPIES).iterdir())


def test_what_runs_next_is_what_waits_for_nothing() -> None:
    line = Line({"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"], "e": ["d"], "f": []})
    assert line.ready() == ["a", "f"]
    line.state |= {"a": "done", "c": "running", "f": "done"}
    assert line.ready() == ["b"] and line.waits_for("d") == ["b", "c"]
    line.state |= {"b": "failed", "c": "done"}
    assert line.ready() == [] and [line.held_up_by(name) for name in "cde"] == [[], ["b"], ["b"]]


def test_this_projects_lock_is_written_as_dvc_does() -> None:
    text = (ROOT / "dvc.lock").read_text(encoding="utf-8")
    assert Folder._dumped(fan_out.merged(Folder._parsed(text), "", None, [])) == text


def test_a_stage_takes_the_gpus_that_its_engine_spreads_over_and_a_judge_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = params.load(ROOT / "params.yaml")
    found = {"diverge@int8": fan_out.room.Need(5e9, card=2e9, spread=0), "diverge@nf4": fan_out.room.Need(1e9, card=1e9)}
    monkeypatch.setattr(fan_out, "base_folder", lambda settings: Path("x"))
    monkeypatch.setattr(fan_out.room, "needs", lambda settings, folder: found)
    takes = fan_out.needs_of(settings, fan_out.room.Room(3e9, [1e9] * 4))
    assert [takes(name).gpus for name in ("diverge@int8", "diverge@nf4", "compare@nf4")] == [3, 1, 0]
    assert takes("diverge@int8").memory == 3e9
    said = capsys.readouterr().out
    assert "diverge@int8: about 5.0 GB of memory and 3.0 GB are here" in said and "diverge@nf4: about 1.0 GB on a card" in said
    unknown = fan_out.needs_of(settings, fan_out.room.Room(9e9, [math.inf] * 2))  # without nvidia-smi
    assert [unknown(name).gpus for name in found] == [2, 1]
    assert fan_out.needs_of(settings, fan_out.room.Room(9e9, []))("diverge@int8").gpus == 0


def test_what_a_stage_reads_beside_what_dvc_knows_is_there_before_it() -> None:
    settings = params.load(ROOT / "params.yaml")
    assert fan_out.unlisted(settings) == {}
    speculate = {"speculate": {"draft": "gguf-q4_0", "tokens": 4}}
    drafted = settings.variants["gguf-bf16"].model_copy(update={"engine_options": speculate})
    asked = settings.model_copy(update={"tier": "full", "variants": settings.variants | {"gguf-bf16": drafted}})
    found = fan_out.unlisted(asked)
    assert found["benchmark@gguf-bf16"] == found["compare@gguf-bf16"] == ["quantize@gguf-q4_0"]
    assert found["evaluate@gguf-bf16"] == ["quantize@gguf-q4_0", "evaluate@bf16"] and found["evaluate@int8"] == ["evaluate@bf16"]
    assert "evaluate@bf16" not in found and "diverge@int8" not in found


def test_a_copy_has_what_is_read_beside_what_dvc_knows(work: Any, tmp_path: Path) -> None:
    """`score` looks for what `time` writes."""
    seen = "sed -i 's/cat base new > score/cat base new time > score/' dvc.yaml"
    asked = partial(fan_out.fan_out, Here(), lambda name: Needs(), False, {"score": ["time"]})
    ran = work("a", lambda: project(tmp_path / "ran"), "echo b > new", seen, asked)
    assert ran.index("time") < ran.index("score") and "gate" in ran


def test_of_what_is_ready_the_longest_chain_starts_first_and_what_times_last(
    work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after: dict[str, list[str]] = {"a": [], "b": [], "c": ["a"], "d": ["a", "b"], "e": ["d"]}
    seconds = {"a": 1.0, "b": 5.0, "c": 9.0, "d": 2.0, "z-base": 1.0, "score": 3.0, "time": 70.0}  # of e unknown
    monkeypatch.setattr(artifacts, "seconds_of", lambda name: (seconds.get(name), False))
    assert fan_out.to_the_end(after) == {"a": 10.0, "b": 7.0, "c": 9.0, "d": 2.0, "e": 0.0}
    one = partial(fan_out.fan_out, Here(slots=1), lambda name: Needs())
    assert work("a", lambda: project(tmp_path / "ran"), "echo b > new", one) == ["z-base", "score", "judge", "time", "gate"]


def test_two_heads_in_one_folder_and_a_folder_without_git_are_refused(work: Any, tmp_path: Path) -> None:
    work("a", lambda: project(tmp_path / "ran"))
    with fan_out.FileLock(tmp_path / "a" / f"{copies.COPIES}.lock"), pytest.raises(ArtifactError, match="another fan-out"):
        everything()
    work("b")
    with pytest.raises(ArtifactError, match="not in git"):
        copies.pack([])


def test_a_folder_may_have_any_name_and_so_may_files(work: Any, tmp_path: Path) -> None:
    odd = lambda: Path(os.fsdecode(b"caf\xe9")).touch()  # noqa: E731  # no UTF-8
    local = "dvc config --local cache.dir .dvc/cache"
    assert "gate" in work("Größe 1", lambda: project(tmp_path / "ran"), local, odd, "echo b > new", everything)


def test_outputs_that_are_not_on_a_shared_disk_end_in_one_sentence(work: Any, tmp_path: Path) -> None:
    def elsewhere() -> None:
        with pytest.raises(ArtifactError, match=r"z-base ran on .*; its outputs are not in .*/cache: is it on a shared disk\?"):
            everything()

    work("a", lambda: project(tmp_path / "ran"))
    run = copies.run
    with pytest.MonkeyPatch.context() as there:
        there.setattr(copies, "run", lambda job, tree: run(job._replace(cache=str(tmp_path / "elsewhere")), tree))
        work("a", elsewhere)
    assert not (tmp_path / "a/dvc.lock").exists()


def test_what_a_full_disk_left_in_the_run_cache_is_removed(work: Any, tmp_path: Path) -> None:
    work("a", lambda: project(tmp_path / "ran"), "echo b > new", everything)
    for file in (runs := list((tmp_path / "cache/runs").glob("*/*/*"))):
        file.rename(file.with_name(".x.tmp"))
        os.utime(file.parent, (0, 0))
    assert runs and "gate" in work("a", "rm dvc.lock base score time", everything)


def test_a_stage_asks_for_what_one_node_has() -> None:
    """Ray keeps what no node has waiting for ever; the machine that times need not be the one with the most cards."""
    cluster = object.__new__(fan_out.Cluster)
    sizes = {"a": {"memory": 9e9}, "b": {"memory": 3e9, "GPU": 4.0}, "c": {"memory": 5e9, "GPU": 1.0}}
    cluster.nodes = [{"NodeID": name, "Resources": has} for name, has in sizes.items()]
    cluster._timing = {"a", "c"}
    asked = Needs(gpus=2, memory=8e9)
    assert cluster.had(asked) == Needs(gpus=2, memory=3e9) and cluster.had(Needs(memory=8e9)) == Needs(memory=8e9)
    assert cluster.had(asked._replace(alone=True)) == Needs(alone=True, gpus=1, memory=5e9)


def test_without_ray_one_sentence_says_how_to_install_it() -> None:
    try:
        import ray  # noqa: F401
    except ImportError:
        with pytest.raises(QuantgateError, match=r"Ray is not installed: pip install -e '\.\[ray\]'"):
            fan_out.Cluster(None, 1)
    else:
        pytest.skip("Ray is installed here")
