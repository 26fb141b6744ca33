"""What people have around their files changes nothing: droppings of desktops, editors and notebooks, and git's line ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import download, evalset, quantizers
from pipeline.core import artifacts, params
from pipeline.core.droppings import DROPPINGS
from pipeline.core.errors import DataError
from pipeline.core.options import names_in
from pipeline.evalset import chats, tasks
from pipeline.judging import stale

ROOT = Path(__file__).resolve().parent.parent


def litter(folder: Path) -> list[Path]:
    """Beside every file of a folder what macOS, Windows, Emacs, vim, Jupyter and a dead link leave there; returns it."""
    left: list[Path] = []
    for file in [p for p in folder.rglob("*") if p.is_file()]:
        home, name = file.parent, file.name
        (home / ".ipynb_checkpoints").mkdir(exist_ok=True)
        names = (f"._{name}", f"{name}~", f"#{name}#", f".{name}.swp", ".DS_Store", "Thumbs.db", "desktop.ini")
        found = [home / n for n in names] + [home / ".ipynb_checkpoints" / f"{file.stem}-checkpoint{file.suffix}"]
        for one in found:
            one.write_bytes(b"\x00\x05\x16\x07 nobody meant this")
        (home / f".#{name}").symlink_to("someone@host.1234:1700000000")
        left += [*found, home / f".#{name}"]
    return left


def test_droppings_are_no_sets_no_tasks_no_backends_and_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("evalsets", "envs", "pipeline/quantizers"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("constraints.txt", "pipeline/protocol.yaml", "params.yaml"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)

    def seen() -> tuple[object, ...]:
        corpus = Path("evalsets/corpus")
        named = names_in(tmp_path / "pipeline/quantizers")
        return evalset.load_texts(corpus), evalset.sets_digest(corpus), tasks.local_tasks(), named, stale.inputs(params.load())

    before = seen()
    assert len(litter(tmp_path)) > 100
    assert seen() == before and before[3] == quantizers.names()


def test_a_link_with_the_name_of_a_set_that_leads_nowhere_is_named_since_a_part_would_be_missing(tmp_path: Path) -> None:
    shutil.copyfile(ROOT / "evalsets/corpus/news.jsonl", tmp_path / "news.jsonl")
    (tmp_path / "wiki.jsonl").symlink_to("nowhere")
    with pytest.raises(DataError, match="wiki.jsonl is a link that leads nowhere"):
        evalset.load_texts(tmp_path)


def test_droppings_are_no_part_of_a_model_and_no_damage_to_it(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    out.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "sub/vocab.txt"):
        artifacts.write_text(model / name, name)
    manifest = {"files": artifacts.files_of(model)}
    litter(model)
    (model / "gone.safetensors").symlink_to("nowhere")
    (model / "._chat_template.jinja").write_bytes(b"\x00")
    artifacts.verify_files(model, manifest)
    download._from_path(params.PathModel(source="path", path=str(model)), out)
    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert chats.chat_template(model) is None


def test_dvc_ignores_what_the_pipeline_takes_for_droppings_and_nothing_else(tmp_path: Path) -> None:
    patterns = (ROOT / ".dvcignore").read_text(encoding="utf-8").splitlines()
    assert [p for p in patterns if p[0] not in "#/"] == list(DROPPINGS)
    (tmp_path / "news.jsonl").write_text("{}")
    asked = [f"evalsets/{p.relative_to(tmp_path)}" for p in litter(tmp_path)] + ["evalsets/news.jsonl", "evalsets/#1.jsonl"]
    dvc = [sys.executable, "-m", "dvc", "check-ignore", *asked]
    assert subprocess.run(dvc, cwd=ROOT, capture_output=True, text=True).stdout.split() == asked[:-2]


def test_a_clone_under_autocrlf_holds_the_same_bytes(tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "-q", "--shared", "-c", "core.autocrlf=true", str(ROOT), str(tmp_path / "clone")], check=True)
    ends = subprocess.run(["git", "ls-files", "--eol"], cwd=tmp_path / "clone", capture_output=True, text=True, check=True).stdout
    assert "w/lf" in ends and "w/crlf" not in ends and "w/mixed" not in ends


def test_the_hook_lets_through_whatever_names_the_judged_commit_and_refuses_another_by_its_name(tmp_path: Path) -> None:
    def git(*command: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *who, *command], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q", "-b", "main")
    artifacts.write_text(tmp_path / "pipeline/gate.py", "print('judged')")
    git("add", "-A")
    git("commit", "-qm", "old")
    old = git("rev-parse", "HEAD")
    git("commit", "-q", "--allow-empty", "-m", "new")
    git("tag", "-a", "v1", "-m", "v1")
    git("notes", "add", "-m", "a note")
    head, tag, note, none = git("rev-parse", "HEAD"), git("rev-parse", "v1"), git("rev-parse", "refs/notes/commits"), "0" * 40
    assert tag != head
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    pushed = {
        f"refs/tags/v1 {tag}": "judged", f"refs/heads/main {head}\nrefs/tags/v1 {tag}": "judged", f"HEAD {head}": "judged",
        f"refs/notes/commits {note}": "", f"refs/notes/commits {note}\nrefs/tags/v1 {tag}": "judged", f"(delete) {none}": "",
        f"refs/heads/old {old}": "pre-push: refs/heads/old is not checked out",
        f"refs/tags/v1 {tag}\nrefs/heads/old {old}": "pre-push: refs/heads/old is not checked out",
    }  # fmt: skip
    for refs, said in pushed.items():
        asked = "".join(f"{line} refs/x {none}\n" for line in refs.split("\n"))
        hook = ["sh", str(ROOT / ".github/hooks/pre-push")]
        done = subprocess.run(hook, cwd=tmp_path, input=asked, capture_output=True, text=True, env=env)
        assert (done.stdout + done.stderr).startswith(said) and bool(done.stdout + done.stderr) == bool(said), refs
        assert done.returncode == (2 if "not checked" in said else 0)
